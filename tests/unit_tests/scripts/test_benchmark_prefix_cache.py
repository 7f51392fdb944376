"""The benchmark of the prefix cache runs on a CPU and measures what it says."""

import pytest

from tests.support.benchmark_scripts import run_script


def test_a_prefix_cache_is_measured(tmp_path):
    """Of a hybrid model: what is cached is not computed, and snapshots stand where they should."""
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
