"""Examples say what went wrong in words, and show what they say they show."""

import asyncio
import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks

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


def lines_of(out: str) -> list[tuple[float, float, float]]:
    """Reward, K3 before and after of each line of rl_loop.py."""
    pattern = r"reward ([\d.]+), tokens of versions [\d, ]+, K3 before (\S+), after (\S+)"
    return [tuple(map(float, found)) for found in re.findall(pattern, out)]


def test_a_loop_learns_while_its_rollouts_go_on(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rl_loop.py", "--updates", "6", "--batch-size", "24"])
    runpy.run_path(str(EXAMPLES / "rl_loop.py"))["main"]()
    out = capsys.readouterr().out
    found = lines_of(out)
    rewards = [reward for reward, *_ in found]
    assert len(found) == 6
    assert rewards[-1] > rewards[0] + 0.1, rewards
    assert "versions 0, 1," in out  # rollouts that had begun before an update
    assert max(before for _, before, _ in found) > 1e-4
    assert max(after for *_, after in found) < 1e-9


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is served")
def test_a_loop_of_one_arithmetic_wants_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rl_loop.py", "--engine-forward"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / "rl_loop.py"))["main"]()
    assert "a CPU's loops round by the number of rows" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_loop_of_one_arithmetic_has_no_gap(monkeypatch, capsys):
    options = ["--engine-forward", "--updates", "6", "--batch-size", "24"]
    monkeypatch.setattr(sys, "argv", ["rl_loop.py", *options])
    runpy.run_path(str(EXAMPLES / "rl_loop.py"))["main"]()
    found = lines_of(capsys.readouterr().out)
    assert [after for *_, after in found] == [0] * 6
    assert found[-1][0] > found[0][0] + 0.1


def loop_of_two() -> str:
    """A rank's output."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        sys.argv = ["rl_loop.py", "--updates", "2", "--batch-size", "4"]
        runpy.run_path(str(EXAMPLES / "rl_loop.py"))["main"]()
    return out.getvalue()


def test_the_loop_runs_on_a_trainers_and_an_engines_rank():
    trainer, engine = run_ranks(2, loop_of_two, timeout_s=240)
    assert engine == ""
    assert len(lines_of(trainer)) == 2
    assert max(after for *_, after in lines_of(trainer)) < 1e-9
