"""One command for all loads of the engine; what each measures is tested beside its parts."""

import benchmark_engine
import pytest
from engine_loads import mixed
from engine_loads.features import FEATURES, ONE

from megatron_async import SamplingParams, llm
from tests.support.benchmark_scripts import run_script
from tests.support.capturing_cpu import CapturingCpu


@pytest.mark.parametrize("load", benchmark_engine.LOADS)
def test_every_load_has_the_common_options(load, capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark_engine.main([load, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: benchmark_engine.py {load} ")
    for option in ("--model", "--device", "--dtype", "--json"):
        assert option in text


def test_an_unknown_load_is_named_with_the_choices(capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark_engine.main(["stready"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "'stready'" in message
    assert all(load in message for load in benchmark_engine.LOADS)


def test_every_feature_is_asked_of_the_engine():
    """The sampling of each load differs from plain sampling: none is timed under a wrong name."""
    asked = [repr(SamplingParams(temperature=0.0, **changes)) for changes in FEATURES.values()]
    assert len(set(asked)) == len(asked)


TINY = ("--model", "dummy:tiny", "--device", "cpu", "--prompt-tokens", 8, "--steps", 2)


def test_events(tmp_path):
    options = ("--batch-size", 8, "--num-tokens", 48, "--lookahead", 1)
    record = run_script("benchmark_engine", tmp_path, "events", *TINY, *options)
    (row,) = record["figures"]
    assert 0 < row["rows"] <= 8
    # Memory for 60 % of what the requests want: some are paused, and paused ones evicted.
    assert row["pauses"] >= row["evictions"] > 0
    assert row["steady_ms"] > 0
    assert 0 < row["ahead"] <= 1


MIXED = ("--models", "dummy:tiny", "--device", "cpu", "--decode-rows", 4, "--context-tokens", 20)


def test_mixed(tmp_path):
    """Each step has the tokens that its line says, or the load fails."""
    options = ("--tokens", 10, 60, "--prompt-tokens", 9, "--steps", 3, "--max-requests", 32)
    record = run_script("benchmark_engine", tmp_path, "mixed", *MIXED, *options, "--rounds", 2)
    rows = record["figures"]
    assert [row["tokens"] for row in rows] == [4, 10, 60]
    for row in rows:
        assert row["token_us"] == pytest.approx(row["step_ms"] * 1e3 / row["tokens"])
        assert (row["captured"], row["padded_tokens"]) == (0, row["tokens"])
    alone = rows[0]["step_ms"]
    for row in rows[1:]:
        assert row["prompt_us"] * (row["tokens"] - 4) == pytest.approx(
            (row["step_ms"] - alone) * 1e3
        )


@pytest.mark.parametrize(("tokens", "mean"), [(0, 9), (1, 9), (56, 9), (2020, 228), (5, 1)])
def test_prompts_of_a_mixed_step(tokens, mean):
    lengths = mixed.prompt_lengths(tokens, mean)
    assert sum(lengths) == tokens
    assert len(lengths) in (round(tokens / mean), min(tokens, 1))
    assert not lengths or max(lengths) - min(lengths) <= 1
    assert mixed.blocks_of(lengths) <= tokens // mixed.BLOCK_SIZE + len(lengths)


def test_mixed_says_what_is_captured(tmp_path, monkeypatch):
    """Three decode rows are padded to four; attention of prompts is not captured on a CPU."""
    monkeypatch.setattr(llm, "make_device", lambda _name: CapturingCpu())
    options = ("--tokens", 10, "--prompt-tokens", 9, "--steps", 2, "--max-requests", 32)
    rows_of = ("--decode-rows", 3, "--rounds", 1)
    record = run_script("benchmark_engine", tmp_path, "mixed", *MIXED, *options, *rows_of)
    found = [(row["tokens"], row["captured"], row["padded_tokens"]) for row in record["figures"]]
    assert found == [(3, 1, 4), (10, 0, 10)]


def test_mixed_says_when_its_steps_are_not_full():
    options = ("--tokens", 60, "--prompt-tokens", 4, "--steps", 3, "--max-requests", 10)
    with pytest.raises(SystemExit, match="instead of 56: give more --max-requests"):
        benchmark_engine.main(["mixed", *map(str, (*MIXED, *options))])


def test_mixed_wants_room_for_prompts(capsys):
    with pytest.raises(SystemExit):
        benchmark_engine.main(["mixed", *map(str, MIXED), "--tokens", "4"])
    assert "--tokens 4 must be more than --decode-rows 4" in capsys.readouterr().err


def test_features(tmp_path):
    options = ("--batch-size", 2, "--windows", 1, "--rounds", 1)
    record = run_script("benchmark_engine", tmp_path, "features", *TINY, *options)
    plain, *others = record["figures"]
    assert (plain["feature"], plain["over_plain"], plain["cpu_over_plain"]) == ("plain", 1, 1)
    assert [row["feature"] for row in others] == [*list(FEATURES)[1:], ONE]
    for row in others:
        assert row["over_plain"] == row["step_ms"] / plain["step_ms"]
        assert row["cpu_over_plain"] == row["cpu_us"] / plain["cpu_us"]
        assert row["overlap_ratio"] == 1


def test_ranks_alone(tmp_path):
    record = run_script("benchmark_engine", tmp_path, "ranks", *TINY, "--batch-sizes", 2)
    (row,) = record["figures"]
    assert (row["batch"], row["lookahead"], row["rows"]) == (2, 1, 2)
    assert row["tokens_per_row"] == pytest.approx(1)
    assert row["agreement_us"] == 0, "a rank alone agrees with nobody"
    assert record["settings"]["world_size"] == 1


def test_arrivals_at_one_replica(tmp_path):
    options = ("--num-requests", 6, "--rate", 100, "--output-mean", 8, "--max-output-tokens", 16)
    lengths = ("--prompt-mean", 8, "--max-prompt-tokens", 16, "--rounds", 2)
    record = run_script(
        "benchmark_engine", tmp_path, "arrivals", "--device", "cpu", *options, *lengths
    )
    rows = record["figures"]
    assert [(row["round"], row["launches"]) for row in rows] == [
        (round_, way) for round_ in range(2) for way in ("at once", "late")
    ]
    for row in rows:
        assert 0 < row["ttft_p50"] <= row["ttft_p99"] < 1e3 * row["duration_s"]
        assert row["steps"] >= 8


def test_a_prefix_cache_is_measured(tmp_path):
    """A hybrid model: what is cached is not computed, and snapshots stand where they should."""
    options = ["--models", "dummy:tiny-hybrid", "--device", "cpu", "--repeats", 1, "--batch", 2]
    options += ["--loads", "tail", "turns", "unique", "snapshots", "--prefix-tokens", 256]
    options += ["--tails", 16, "--turns", 2, "--turn-tokens", 140, "--output-tokens", 3]
    record = run_script("benchmark_engine", tmp_path, "prefix-cache", *options, "--interval", 128)
    tail, first, second, unique, snapshots = record["figures"]
    assert tail["cached"] == 256
    assert tail["ratio"] == pytest.approx(tail["warm_ttft_ms"] / tail["chunk_ms"])
    assert (first["computed"], second["prompt"]) == (140, 420)
    # New tokens, and at most two blocks of 128 that hold tokens of the first turn.
    assert 140 <= second["computed"] <= 140 + 256
    assert unique["ratio"] > 0
    assert snapshots["snapshots"] == 3  # two prompts, and one of them at 256 too


def test_updates(tmp_path):
    """All ways are told, and what is told of one fits together."""
    options = ("--batch-sizes", 2, "--rounds", 2, "--most-steps", 400)
    record = run_script("benchmark_engine", tmp_path, "updates", *TINY, *options)
    rows = record["figures"]
    assert [row["way"] for row in rows] == ["direct", "device", "host"]
    for row in rows:
        assert row["bytes"] == rows[0]["bytes"] > 0
        assert 0 < row["host"] <= row["round"]
        assert row["longest_gap"] >= row["gap"] == pytest.approx(row["step"] + row["added"])
        assert row["ratio"] == pytest.approx(row["added"] / row["floor"])
