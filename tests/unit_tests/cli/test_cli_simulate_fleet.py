"""`simulate-fleet` on the command line."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_async.cli import main as cli
from megatron_async.lab.fleet_command import COLUMNS, fleet_lines
from megatron_async.lab.fleets import fleet_jobs
from tests.support.ranks import quick_context

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
