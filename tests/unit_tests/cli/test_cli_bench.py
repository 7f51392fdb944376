"""`megatron-async bench`: what is measured, what is printed, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_async.cli import main as cli
from megatron_async.lab.bench_command import table
from tests.unit_tests.cli.cli_runs import fails

SMALL = ["dummy:tiny", "--device", "cpu", "--no-progress", "--input-len", "8", "--output-len", "6"]


def figures(file: Path) -> dict[str, Any]:
    (found,) = json.loads(file.read_text())["figures"]
    assert isinstance(found, dict)
    return found


def test_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "b.json"
    arguments = [*SMALL, "--batch-size", "3", "--repeats", "2", "--json", str(file)]
    assert cli.main(["bench", "latency", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "dummy:tiny on cpu: batches of 3, 8 tokens in, 6 out, 2 times" in shown
    found = figures(file)
    tokens = found["tokens_out_per_second"] * found["duration_s"]
    assert tokens == pytest.approx(2 * 3 * 6)  # the warm-up is not counted
    assert found["ttft_ms"]["p50"] <= found["latency_ms"]["p50"]
    assert found["latency_ms"]["p50"] == pytest.approx(
        found["ttft_ms"]["p50"] + 5 * found["tpot_ms"]["p50"], rel=0.5
    )


def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "b.json"
    arguments = [*SMALL, "--num-prompts", "10", "--length-sigma", "0", "--json", str(file)]
    assert cli.main(["bench", "throughput", *arguments]) == 0
    assert "10 requests at once" in capsys.readouterr().out
    found = figures(file)
    assert found["requests_per_second"] * found["duration_s"] == pytest.approx(10)
    assert found["tokens_in_per_second"] * found["duration_s"] == pytest.approx(80)


def test_the_table_has_a_row_for_all_that_was_measured() -> None:
    spread = {"p50": 1.0, "p90": 2.0, "p99": 3.0, "mean": 1.5}
    none = dict.fromkeys(spread)
    lines = table({"ttft_ms": spread, "tpot_ms": none, "goodput_per_second": 4.0, "other": 1})
    assert [line.split()[-4:] for line in lines[:2]] == [
        ["p50", "p90", "p99", "mean"],
        ["1.00", "2.00", "3.00", "1.50"],
    ]
    assert lines[2].split() == ["goodput/s", "4.00"]
    assert len(lines) == 3  # answers of one token have no TPOT


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["latency", "--batch-size", "0"], "--batch-size 0 must be from 1 to"),
        (["throughput", "--num-prompts", "-1"], "--num-prompts -1 must be from 1 to"),
        (["serve", "https://x"], "URL 'https://x' is not asked: write it as http://HOST:PORT"),
        (["serve", "http://x:99999"], "URL 'http://x:99999' is not asked"),
        (["serve", "http://[x"], "URL 'http://[x' is not asked"),
        (["serve", "--api-key", "ä"], "--api-key has what no header may have"),
        (["serve", "--num-prompts", "9" * 20], f"--num-prompts {'9' * 20} must be from 1 to"),
        (["serve", "--input-len", "9" * 20], "--input-len 9"),
        (["serve", "--client-processes", "5000"], "--client-processes 5000 must be from 1 to 256"),
        (["serve", "--length-sigma", "inf"], "--length-sigma inf must be from 0 to 10"),
        (["serve", "--request-rate", "nan"], "--request-rate nan must be above 0 (inf: all"),
        (["serve", "--request-rate", "-1"], "--request-rate -1 must be above 0"),
        (["serve", "--seed", "-1"], "--seed -1 must be 0 or more"),
        (["serve", "http://127.0.0.1:9", "--goodput", "speed:3"], "write ttft:MS"),
        (["serve", "http://127.0.0.1:9", "--goodput", "ttft:0"], "a number above 0"),
        (["serve", "http://127.0.0.1:9"], "is a server there"),
        (["latency", "--json", "/no/such/folder/b.json"], "/no/such/folder"),
    ],
)
def test_what_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in fails(capsys, "bench", *arguments)


def test_several_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["bench", "latency"]) == 2
    assert "bench runs as one process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--request-rate=fast", "argument --request-rate: 'fast' is not allowed: give a number ("),
        ("--seed=1.5", "argument --seed: '1.5' is not allowed: give an integer (see"),
    ],
)
def test_what_is_no_number(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "serve", option])
    assert words in capsys.readouterr().err
