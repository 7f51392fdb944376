"""`generate --record`, `replay`, `simulate` and `simulate-fleet` on the command line."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_async.cli import main as cli
from megatron_async.lab.fleet_command import COLUMNS, fleet_lines
from megatron_async.lab.fleets import fleet_jobs
from tests.support.ranks import quick_context


def fails(capsys, *arguments):
    """Run a command that must fail as a user's error; return its one line on stderr."""
    assert cli.main(arguments) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("megatron-async: error: ")
    return line


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    path = tmp_path_factory.mktemp("recording") / "run.rec"
    prompts = [option for i in range(3) for option in ("--prompt", f"{i + 1} {i + 2} {i + 3}")]
    options = ["--device", "cpu", "--no-progress", "--json", "--max-new-tokens", "24"]
    arguments = ["generate", "--model", "dummy:tiny", *options, *prompts, "--record", str(path)]
    assert cli.main(arguments) == 0
    return path


def test_record_and_replay(recording, capsys):
    assert cli.main(["replay", str(recording)]) == 0
    assert capsys.readouterr().out == "24 steps planned, every one as recorded.\n"
    assert cli.main(["replay", str(recording), "--until-step", "3"]) == 0
    output = capsys.readouterr().out
    assert "step 3 is planned; 3 of 256 slots" in output
    assert output.count("DECODING") == 3


def test_bad_recordings_are_one_line(recording, tmp_path, capsys):
    assert "missing.rec: no such file" in fails(capsys, "replay", str(tmp_path / "missing.rec"))
    (tmp_path / "text.rec").write_text("hello")
    assert "that is no recording" in fails(capsys, "replay", str(tmp_path / "text.rec"))
    (tmp_path / "short.rec").write_bytes(recording.read_bytes()[:-60])
    assert "--allow-truncated" in fails(capsys, "replay", str(tmp_path / "short.rec"))
    assert cli.main(["replay", str(tmp_path / "short.rec"), "--allow-truncated"]) == 0
    assert "The recording has no end" in capsys.readouterr().out
    assert "steps 0 to 23" in fails(capsys, "replay", str(recording), "--until-step", "99")
    nowhere = str(tmp_path / "nowhere" / "run.rec")
    generate = ["generate", "--model", "dummy:tiny", "--device", "cpu", "--no-progress"]
    assert "nowhere" in fails(capsys, *generate, "--prompt", "1", "--record", nowhere)


def test_simulate_writes_a_table_and_a_record(tmp_path, capsys):
    path = tmp_path / "figures.json"
    options = ["--num-requests", "40", "--rate", "64", "--lookahead", "0", "1", "--no-progress"]
    assert cli.main(["simulate", *options, "--json", str(path)]) == 0
    output = capsys.readouterr().out
    assert "one H200" in output
    record = json.loads(path.read_text())
    assert record["benchmark"] == "simulate"
    serial, ahead = record["figures"]
    assert (serial["overlap_ratio"], ahead["overlap_ratio"]) == (0, 1)
    assert ahead["idle_share"] < 0.01 < 0.1 < serial["idle_share"]
    assert ahead["tpot_ms"]["p50"] < serial["tpot_ms"]["p50"]
    for title in ("TTFT ms", "TPOT ms", "evictions", "recomputed", "zombies"):
        assert title in output


def test_simulate_by_a_recording(recording, capsys):
    options = ["--machine", str(recording), "--num-requests", "5", "--no-progress"]
    assert cli.main(["simulate", *options, "--rate", "1000", "--lookahead", "1"]) == 0
    output = capsys.readouterr()
    assert "a recording of 22 steps on cpu" in output.out
    assert "the recording reaches: 0 prompt tokens, 3 decode tokens, 78 KV tokens in a step" in (
        output.out
    )
    assert "warning: rate 1000, lookahead 1 is a guess: its steps have up to" in output.err
    assert "prompt tokens (recorded: 0, always" in output.err
    assert (
        "decode tokens (recorded: 3, always, so more of them are taken to cost noth" in output.err
    )


def test_a_simulation_within_the_recording_is_no_guess(tmp_path, capsys):
    """Prompts of other lengths, so that rows and prompt tokens vary; then a smaller load."""
    path = str(tmp_path / "run.rec")
    prompts = [f"--prompt={' '.join(['7'] * (4 * n + 9))}" for n in range(12)]
    options = ["--device", "cpu", "--no-progress", "--max-new-tokens", "24", "--max-requests", "4"]
    arguments = ["generate", "--model", "dummy:tiny", *options, *prompts, "--record", path]
    assert cli.main(arguments) == 0
    options = ["--num-requests", "4", "--max-requests", "2", "--rate", "100", "--lookahead", "1"]
    lengths = ["--prompt-mean", "6", "--max-prompt-tokens", "8", "--output-mean", "8"]
    lengths += ["--max-output-tokens", "12", "--max-step-tokens", "8", "--no-progress"]
    capsys.readouterr()
    assert cli.main(["simulate", "--machine", path, *options, *lengths]) == 0
    output = capsys.readouterr()
    assert "the recording reaches: " in output.out
    assert output.err == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--machine", "h100"], "--machine h100 is neither a file nor one of h200:"),
        (["--rate", "0"], "--rate 0 must be above 0"),
        (["--lookahead", "-1"], "--lookahead -1"),
        (["--mixed-step-tokens", "0"], "--mixed-step-tokens 0"),
        (["--num-kv-blocks", "2"], "needs"),
        (
            ["--prompt-mean", "9999"],
            "--prompt-mean 9999 must be from 1 to --max-prompt-tokens 1024",
        ),
        (["--max-output-tokens", "0"], "--output-mean 128 must be from 1 to --max-output-tokens 0"),
        (["--length-sigma", "nan"], "--length-sigma nan must be from 0 to 10"),
        (["--seed", "-1"], "--seed -1 must be 0 or more"),
    ],
)
def test_bad_options_of_simulate(options, message, capsys):
    assert message in fails(capsys, "simulate", "--num-requests", "3", "--no-progress", *options)


def test_impossible_numbers_of_requests(capsys):
    for count in ("0", "9" * 20):
        message = fails(capsys, "simulate", "--num-requests", count)
        assert f"--num-requests {count} must be from 1 to 1048576" in message


@pytest.mark.parametrize(
    ("machine", "options", "ttft_ms", "tpot_ms", "tolerance"),
    [
        ("llama-3.1-8b", ["--rate", 48, "--mixed-step-tokens", 384], 14.3, 5.67, 0.06),
        ("llama-3.1-8b", ["--rate", 48, "--mixed-step-tokens", 256], 16.8, 5.46, 0.06),
        # Mixed steps of so small a model take longer than its decode steps of as many tokens.
        ("smollm2-135m", ["--rate", 200], 1.9, 0.55, 0.3),
    ],
)
def test_predictions_stay_near_the_measurements(
    machine, options, ttft_ms, tpot_ms, tolerance, tmp_path
):
    """docs/records/whole_steps.md, "Late launches on GPUs", "Decode rows beside prompts". A change
    of the scheduler moves both or is a surprise."""
    path = tmp_path / "figures.json"
    options = ["--machine", f"h200:{machine}", *options, "--lookahead", 1, "--no-progress"]
    options += ["--num-requests", 512, "--json", path]
    assert cli.main(["simulate", *map(str, options)]) == 0
    found = json.loads(path.read_text())["figures"][0]
    assert found["ttft_ms"]["p50"] == pytest.approx(ttft_ms, rel=tolerance)
    assert found["tpot_ms"]["p50"] == pytest.approx(tpot_ms, rel=tolerance)


QUICK = ["--machine", "h200:smollm2-135m", "--num-requests", "10", "--rate", "2", "--no-progress"]
SHORT = 24
"""Tokens of an answer at most: each is a step to simulate, and those of chats are ten times as
long."""


@pytest.fixture(scope="module")
def short_chats(tmp_path_factory) -> Path:
    """A trace of chats of several turns, so that policies differ, with short answers."""
    file = tmp_path_factory.mktemp("trace") / "chats.jsonl"
    made = ["--num-requests", "20", "--write-trace", str(file)]
    assert cli.main(["simulate-fleet", *QUICK, *made]) == 0
    requests = [json.loads(line) for line in file.read_text().splitlines()]
    for request in requests:
        request["output_length"] = min(request["output_length"], SHORT)
        pieces = -(-(request["input_length"] + request["output_length"]) // 512)
        if "output_hash_ids" in request:  # not where the last turn's answer is nobody's prompt
            del request["output_hash_ids"][pieces - len(request["hash_ids"]) :]
    file.write_text("".join(f"{json.dumps(request)}\n" for request in requests))
    return file


def test_a_row_for_every_combination(short_chats, tmp_path, capsys):
    path = tmp_path / "figures.json"
    grid = ["--replicas", "1", "2", "--policy", "prefix", "round-robin", "--kv-gb", "4"]
    grid += ["--trace", str(short_chats)]
    options = [*QUICK, *grid, "--block-size-tokens", "16", "64", "--json", str(path)]
    assert cli.main(["simulate-fleet", *options]) == 0
    output = capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["benchmark"] == "simulate-fleet"
    figures = record["figures"]
    assert len(figures) == 8
    assert len(output.split("\n\n")[1].splitlines()) == 9
    assert "a cache without limits, blocks of 16: " in output
    for row in figures:
        assert 0.5 < row["hit_ratio"] <= row["ceiling"] < 1
        assert f"{100 * row['hit_ratio']:.1f}" in output
    by_key = {(r["block_size_tokens"], r["replicas"], r["policy"]): r for r in figures}
    assert by_key[16, 1, "prefix"]["hit_ratio"] == by_key[16, 1, "round-robin"]["hit_ratio"]
    assert by_key[16, 2, "prefix"]["hit_ratio"] > by_key[16, 2, "round-robin"]["hit_ratio"]
    assert by_key[16, 1, "prefix"]["hit_ratio"] > by_key[64, 1, "prefix"]["hit_ratio"]


def test_a_trace_is_written_and_served_from_its_file(tmp_path, capsys):
    file, records = str(tmp_path / "trace.jsonl"), [tmp_path / "made.json", tmp_path / "read.json"]
    assert cli.main(["simulate-fleet", *QUICK, "--write-trace", file]) == 0
    assert capsys.readouterr().out == f"10 requests in {file}\n"
    for source, record in zip(("chats", file), records):
        assert cli.main(["simulate-fleet", *QUICK, "--trace", source, "--json", str(record)]) == 0
    made, read = (json.loads(record.read_text())["figures"][0] for record in records)
    assert made["cached_tokens"] == read["cached_tokens"] > 0
    assert made["ttft_ms"]["p50"] == pytest.approx(read["ttft_ms"]["p50"], rel=1e-3)


def test_columns_of_states_are_shown_where_a_row_has_them():
    times = dict.fromkeys(("p50", "p99"), 1.0)
    row = dict.fromkeys((key for _, key, _ in COLUMNS), 1) | {"policy": "prefix", "hit_ratio": 0.5}
    row |= {"ttft_ms": times, "tpot_ms": times | {"p50": None}}
    none = row | {"prefix_caching_mamba_gb": None, "snapshot_interval": None}
    sizes = none | {"prefix_caching_mamba_gb": 5.0}
    often = none | {"snapshot_interval": 2048}
    off = none | {"prefix_caching_mamba_gb": 0.0}
    for rows, cells in (
        ([none], None), ([none, sizes], ["-", "5"]), ([often, none], ["-", "-"]), ([off], ["0"]),
    ):  # fmt: skip
        title, *lines = (line.split() for line in fleet_lines(rows))
        assert ("states" in title) == ("every" in title) == (cells is not None)
        assert len({len(line) for line in fleet_lines(rows)}) == 1
        assert cells is None or [line[2] for line in lines] == cells
    assert fleet_lines([often])[1].split()[3] == "2048"


def test_processes_give_the_same_rows(short_chats, tmp_path, monkeypatch):
    quick = SimpleNamespace(get_context=lambda _: quick_context())
    monkeypatch.setattr(fleet_jobs, "multiprocessing", quick)
    rows, quick = [], [*QUICK, "--trace", str(short_chats)]
    for number in ("1", "2"):
        path = tmp_path / f"{number}.json"
        options = [*quick, "--replicas", "1", "2", "--processes", number, "--json", str(path)]
        assert cli.main(["simulate-fleet", *options]) == 0
        figures = json.loads(path.read_text())["figures"]
        rows.append([{k: v for k, v in f.items() if "simulator" not in k} for f in figures])
    assert rows[0] == rows[1]


def test_without_a_cache(tmp_path):
    path = tmp_path / "figures.json"
    assert cli.main(["simulate-fleet", *QUICK, "--no-prefix-caching", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["figures"]
    assert row["cached_tokens"] == 0
    assert row["enable_prefix_caching"] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--trace", "nowhere.jsonl"],
            "trace nowhere.jsonl is neither a file nor one of chats, ag",
        ),
        (["--policy", "best"], "--policy best is unknown: use prefix, least-loaded, round-robin"),
        (["--replicas", "0"], "--replicas 0 must be from 1 to"),
        (["--num-requests", "9" * 20], f"--num-requests {'9' * 20} must be from 1 to"),
        (["--replicas", "9" * 20], f"--replicas {'9' * 20} must be from 1 to 65536"),
        (["--rate", "0"], "--rate 0 must"),
        (["--kv-gb", "-1"], "--kv-gb -1.0"),
        (["--block-size-tokens", "0"], "--block-size-tokens 0 must be from 1 to"),
        (["--kv-gb", "0.0001"], "holds no usable KV block"),
        (["--seed", "-1"], "--seed -1 must be 0 or more"),
        (["--processes", "0"], "--processes 0 must be from 1 to 256"),
        (["--machine", "h100"], "--machine h100 is neither"),
    ],
)
def test_bad_options(options, message, capsys):
    assert cli.main(["simulate-fleet", *QUICK, *options]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("megatron-async: error: ")
    assert message in line
