"""What the command line shows of a run, and words and keys at the terminal's edge."""

import contextlib
import json
import os
import pty
import socket
import subprocess
import sys
import termios
import textwrap
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from random import Random

import pytest

from megatron_async.checkpoints.source import byte_bar
from megatron_async.cli import main as cli
from megatron_async.cli.terminal import WordWrap
from megatron_async.errors import ConfigurationError
from megatron_async.observe.generation_bar import line
from tests.support.patience import PATIENCE_S
from tests.unit_tests.cli.cli_runs import TINY, fails


def test_the_progress_line_says_what_there_is_to_say():
    stats = {"overlap_ratio": 0.987, "waiting_requests": 0, "pauses": 0, "evictions": 0}
    assert line(stats, rows=7) == "7 rows, overlap 0.99"
    stats |= {"waiting_requests": 3, "evictions": 2}
    assert line(stats, rows=7) == "7 rows, overlap 0.99, 3 waiting, 2 evictions"


def run_with_progress(capsys):
    command = [a for a in TINY if a != "--no-progress"]
    prompts = ["--prompt", "1 2", "--prompt", "3"]
    logged = ["--max-new-tokens", "9", "--json", "--logging-step-interval", "4"]
    assert cli.main([*command, *prompts, *logged]) == 0
    output = capsys.readouterr()
    json.loads(output.out)
    assert "step 3: device" in output.err
    assert "step 7: device" in output.err
    return output.err


def test_off_a_terminal_nothing_is_drawn_again(capsys):
    shown = run_with_progress(capsys)
    assert "\r" not in shown
    assert "token/s" not in shown


def test_on_a_terminal_tokens_are_counted(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = run_with_progress(capsys).split("\r")[-1]
    assert "18token" in shown
    assert "2/2 prompts" in shown
    assert "overlap 1.00" in shown


def test_a_replica_leaves_the_line_that_serve_writes_alone(capsys, monkeypatch):
    def cannot(*_, **__):
        raise ConfigurationError("no model.")

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("megatron_async.llm.LLM", cannot)
    monkeypatch.setattr("megatron_async.observe.log_lines.log_to_stderr", lambda _: None)
    assert cli.main(["replica", "dummy:tiny"]) == 2
    assert "being imported" not in capsys.readouterr().err
    assert cli.main([*TINY, "--prompt", "1"]) == 2
    assert "being imported" in capsys.readouterr().err


def test_log_lines_do_not_break_into_an_answer(capfd):
    """Both in one file, as in a terminal: the prompt's line is followed by the whole answer's."""
    with contextlib.redirect_stdout(sys.stderr):
        logged = ["--max-new-tokens", "9", "--logging-step-interval", "2"]
        assert cli.main([*TINY, "--prompt", "1 2", *logged]) == 0
    lines = capfd.readouterr().err.splitlines()
    assert sum("device" in line for line in lines) >= 3
    answer = lines[lines.index(">>> 1 2") + 1]
    assert len(answer.split()) == 9
    assert all(token.isdecimal() for token in answer.split())


def test_statistics_are_beside_the_answers(capsys):
    assert cli.main([*TINY, "--prompt", "1", "--max-new-tokens", "5"]) == 0
    output = capsys.readouterr()
    assert "overlap ratio" in output.err
    assert "overlap ratio" not in output.out


def test_metrics_are_served_while_prompts_are_answered(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    page = f"http://127.0.0.1:{port}/metrics"
    command = [*TINY, "--prompt", "1", "--max-new-tokens", "600", "--metrics-port", str(port)]
    with ThreadPoolExecutor() as pool:
        run = pool.submit(cli.main, command)
        text = ""
        while not run.done() and "megatron_async_steps_total" not in text:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(page, timeout=PATIENCE_S) as answer,
            ):
                text = answer.read().decode()
        assert run.result() == 0
    assert "megatron_async_steps_total" in text
    capsys.readouterr()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = fails(capsys, *TINY, "--prompt", "1", "--metrics-port", str(port))
    assert "choose a free port" in line


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_bar_of_weights_is_drawn_on_a_terminal_alone(capsys, monkeypatch, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with byte_bar(100, show=True) as bar:
        bar.update(60)
    assert ("loading weights" in capsys.readouterr().err) == is_terminal


def test_simulate_draws_no_bar_off_a_terminal(capsys):
    assert cli.main(["simulate", "--num-requests", "5", "--lookahead", "1"]) == 0
    assert capsys.readouterr().err == ""


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
