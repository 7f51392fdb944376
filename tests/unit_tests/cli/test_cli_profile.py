"""`megatron-async profile`: real runs of a tiny random model, what they write, and errors."""

import json
import os

import pytest

from megatron_async.cli import main as cli
from megatron_async.errors import ConfigurationError
from megatron_async.lab import profile_command as cli_profile
from megatron_async.lab.profile_workload import WORKLOADS, ProfileWorkload

TINY = ["profile", "--model", "dummy:tiny", "--device", "cpu", "--batch", "4"]
SMALL = ["--prompt-tokens", "8", "--no-progress"]


def run(capsys, folder, *arguments):
    """Run a profile; return its record and what it printed."""
    assert cli.main([*TINY, *SMALL, "--out", str(folder), *arguments]) == 0
    record = json.loads((folder / "gaps.json").read_text())
    return record, capsys.readouterr().out


def fails(capsys, *arguments):
    assert cli.main([*TINY, *SMALL, *arguments]) == 2
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
    # Whether there was such a time depends on the machine; see test_step_gaps.py.
    assert ("times there was nothing to do" in printed) == bool(record["idle_us"])
    assert not set(map(int, record["idle_us"])) & {step["step"] for step in record["steps"]}
    assert record["steps"]


def test_errors_name_the_value(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert "--out" in fails(capsys, "--out", str(tmp_path / "file"))
    assert "--out" in fails(capsys, "--out", "/proc/nowhere")
    out = ["--out", str(tmp_path)]
    assert "--batch 0 must" in fails(capsys, *out, "--batch", "0")
    assert "--steps 1 must" in fails(capsys, *out, "--steps", "1")
    assert "--seed -1 must be from 0" in fails(capsys, *out, "--seed", "-1")
    assert "--rate 0.0 must" in fails(capsys, *out, "--rate", "0")
    assert "--finishes 5 must" in fails(capsys, *out, "--workload", "churn", "--finishes", "5")
    assert "--lookahead -1" in fails(capsys, *out, "--lookahead", "-1")
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
