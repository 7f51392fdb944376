"""`megatron-async bench` and `profile`: what is measured, printed, written and refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_async.cli import main as cli
from megatron_async.errors import ConfigurationError
from megatron_async.lab import profile_command as cli_profile
from megatron_async.lab.bench_command import table
from megatron_async.lab.profile_workload import WORKLOADS, ProfileWorkload
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
def test_what_is_refused(arguments: list[str], words: str, capsys):
    assert words in fails(capsys, "bench", *arguments)


def test_several_ranks_are_refused(monkeypatch, capsys):
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


TINY = ["profile", "--model", "dummy:tiny", "--device", "cpu", "--batch", "4"]
SMALL_STEP = ["--prompt-tokens", "8", "--no-progress"]


def run(capsys, folder, *arguments):
    """Run a profile; return its record and what it printed."""
    assert cli.main([*TINY, *SMALL_STEP, "--out", str(folder), *arguments]) == 0
    record = json.loads((folder / "gaps.json").read_text())
    return record, capsys.readouterr().out


def refused(capsys, *arguments):
    assert cli.main([*TINY, *SMALL_STEP, *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_help_names_every_workload(capsys):
    assert tuple(WORKLOADS) == cli_profile.WORKLOADS
    with pytest.raises(SystemExit):
        cli.main(["profile", "--help"])
    text = capsys.readouterr().out
    for name, meaning in WORKLOADS.items():
        assert f"{name:<7} {meaning}" in text


@pytest.mark.parametrize("workload", ["steady", "churn"])
def test_a_run_of_steps(capsys, tmp_path, workload):
    folder = tmp_path / "new" / "folder"
    record, printed = run(capsys, folder, "--workload", workload, "--steps", "30")
    assert sorted(os.listdir(folder)) == ["gaps.json", "gaps.txt", "index.html", "timeline.json"]
    assert (folder / "gaps.txt").read_text() in printed
    assert record["facts"]["workload"] == workload
    # The last step of the warm-up may still have been in flight when recording began.
    assert 29 <= len(record["steps"]) <= 31
    steps = [step["step"] for step in record["steps"]]
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert all(step["device_us"] > 0 for step in record["steps"])
    # Every step between the first and the last was prepared, launched, awaited and booked.
    for step in record["steps"][1:-2]:
        assert set(step["cpu_us"]) == {"prepare", "upload", "launch", "wait", "book", "emit"}
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert {e["name"] for e in events} >= {"device_step", "prepare_step", "resolve"}
    page = (folder / "index.html").read_text()
    assert f"before step {record['worst_steps'][0]}<" in page


def test_gaps_are_what_the_timeline_says(capsys, tmp_path):
    record, _ = run(capsys, tmp_path, "--steps", "20")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    device = {
        e["args"]["step"]: (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["name"] == "device_step"
    }
    for step in record["steps"]:
        number = step["step"]
        gap = device[number][0] - device[number - 1][1]
        assert step["gap_us"] == pytest.approx(max(gap, 0), abs=0.01)


def test_a_serial_run_is_never_ahead(capsys, tmp_path):
    record, printed = run(capsys, tmp_path, "--steps", "12", "--lookahead", "0")
    assert record["launched_ahead_share"] == 0
    assert {step["no_overlap"] for step in record["steps"]} <= {"serial", None}
    assert "serial" in printed


def test_a_trace_does_not_count_the_time_with_nothing_to_do(capsys, tmp_path):
    options = ["--requests", "4", "--rate", "20", "--output-tokens", "6", "--seed", "3"]
    record, printed = run(capsys, tmp_path, "--workload", "trace", *options)
    # Whether there was such a time depends on the machine; see test_gpu_profile.py.
    assert ("times there was nothing to do" in printed) == bool(record["idle_us"])
    assert not set(map(int, record["idle_us"])) & {step["step"] for step in record["steps"]}
    assert record["steps"]


def test_errors_name_the_value(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert "--out" in refused(capsys, "--out", str(tmp_path / "file"))
    assert "--out" in refused(capsys, "--out", "/proc/nowhere")
    out = ["--out", str(tmp_path)]
    assert "--batch 0 must" in refused(capsys, *out, "--batch", "0")
    assert "--steps 1 must" in refused(capsys, *out, "--steps", "1")
    assert "--seed -1 must be from 0" in refused(capsys, *out, "--seed", "-1")
    assert "--rate 0.0 must" in refused(capsys, *out, "--rate", "0")
    assert "--finishes 5 must" in refused(capsys, *out, "--workload", "churn", "--finishes", "5")
    assert "--lookahead -1" in refused(capsys, *out, "--lookahead", "-1")
    with pytest.raises(SystemExit) as exit_:
        cli.main([*TINY, *out, "--workload", "nonsense"])
    assert exit_.value.code == 2
    assert "'nonsense' (choose from" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="workload='nonsense'"):
        ProfileWorkload("nonsense")


def test_the_prefix_cache_is_told_of(capsys, tmp_path):
    arguments = "--enable-prefix-caching", "--steps", "10", "--model", "dummy:tiny-hybrid"
    record, _ = run(capsys, tmp_path, *arguments)
    assert "tokens found" in record["facts"]["prefix cache"]
    assert "snapshots" in record["facts"]["states"]
    assert "prefix cache" in (tmp_path / "index.html").read_text()
