"""Examples say what went wrong in words, and show what they say they show."""

import asyncio
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def test_stream_prints_lines_of_text(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["stream.py", "--prompt", "1, 2, 3,", "--max-new-tokens", "4"])
    asyncio.run(runpy.run_path(str(EXAMPLES / "stream.py"))["main"]())
    first, last = capsys.readouterr().out.splitlines()
    assert first.rstrip() == "[0] 1, 2, 3, 4,"
    assert last.startswith("[0] ended after ")


def test_stream_says_why_a_request_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["stream.py", "--model", "dummy:tiny", "--prompt", "x"])
    asyncio.run(runpy.run_path(str(EXAMPLES / "stream.py"))["main"]())
    assert capsys.readouterr().out.startswith("[0] refused: a text prompt needs a tokenizer")


def test_the_client_names_the_server_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["openai_client.py", "--url", "http://127.0.0.1:9/v1"])
    with pytest.raises(SystemExit, match="start `megatron-async serve smollm2` first"):
        runpy.run_path(str(EXAMPLES / "openai_client.py"))["main"]()
