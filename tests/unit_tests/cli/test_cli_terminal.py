"""Words at the terminal's edge, beside the standard library's wrapping; keys while it speaks."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import textwrap
from itertools import pairwise
from random import Random

import pytest

from megatron_async.cli.terminal import WordWrap

PROSE = "The quick brown fox, whose name is longer than it seems, jumps over lazy dogs. " * 3


def wrapped(text: str, cuts: list[int], columns: int) -> str:
    out: list[str] = []
    wrap = WordWrap(out.append, lambda: columns)
    for begin, end in pairwise([0, *sorted(cuts), len(text)]):
        wrap.show(text[begin:end])
    wrap.end()
    return "".join(out)


@pytest.mark.parametrize("columns", [12, 20, 33, 80])
def test_as_textwrap_however_the_text_comes(columns: int) -> None:
    drawn = Random(columns)
    text = PROSE.strip()
    expected = textwrap.fill(text, columns - 1, break_on_hyphens=False, break_long_words=False)
    for _ in range(10):
        cuts = [drawn.randrange(len(text)) for _ in range(drawn.randrange(30))]
        assert wrapped(text, cuts, columns) == expected


def test_lines_indents_and_wide_letters() -> None:
    code = "def f():\n    return 1\n\n"
    assert wrapped(code, [3, 9, 14], 30) == code.rstrip(" ")
    assert wrapped("日本語の文", [2], 6) == "日本\n語の\n文"
    assert wrapped("x" * 500, [7], 20) == "x" * 500


KEYS = """
import sys, time
from megatron_async.cli.terminal import unseen_keys
with unseen_keys():
    print("speaking", flush=True)
    while sys.stdin not in __import__("select").select([sys.stdin], [], [], 60)[0]:
        pass
print("ended", flush=True)
print("read", sys.stdin.readline().strip(), flush=True)
"""


def test_keys_are_neither_shown_nor_kept_while_it_speaks() -> None:
    master, slave = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", KEYS], stdin=slave, stdout=slave, stderr=slave, close_fds=True
    )
    seen = b""

    def until(word: bytes) -> None:
        nonlocal seen
        while word not in seen:
            seen += os.read(master, 1000)

    until(b"speaking")
    os.write(master, b"typed meanwhile\n")
    until(b"ended")
    assert b"typed" not in seen
    assert termios.tcgetattr(slave)[3] & termios.ECHO
    os.write(master, b"after\n")
    until(b"read after")
    assert child.wait(60) == 0
    os.close(master)
    os.close(slave)
