"""Hybrid models and drafts on several GPUs: the tokens of one CPU, the drafts of one GPU."""

import pytest

from tests.support.cards import on_cards
from tests.support.gpu_ranks import (
    CASES,
    DRAFTING,
    JOBS,
    SHAPES,
    draft_alone,
    draft_here,
    serve,
    serve_on,
    world_of,
)
from tests.support.hybrid_ranks import store_lively
from tests.support.ranks import run_ranks

Stored = dict[str, tuple[str, list[list[int]]]]
EVERYTHING = tuple(range(len(JOBS)))
MODELS = [
    ("Mamba-2", "tensor"),
    ("one group", "tensor"),
    ("Gated DeltaNet", "tensor"),
    ("Gated DeltaNet", "tensor and sequence"),
    ("Mamba-2", "pipeline"),
    ("Gated DeltaNet", "pipeline"),
    ("Mamba-2", "experts"),
    ("Gated DeltaNet", "experts"),
    ("Mamba-2", "tensor and pipeline"),
    ("Gated DeltaNet", "tensor and experts"),
    ("Gated DeltaNet", "pipeline of 4"),
    ("Mamba-2", "experts of 4"),
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Folders of lively models, and what they say on one rank, step by step."""
    return store_lively(SHAPES, tmp_path_factory.mktemp("hybrid"), alone)


def alone(folder: str) -> list[list[int]]:
    """What one rank on a CPU says."""
    return list(serve_on(folder, "cpu", EVERYTHING, lookahead=0).tokens.values())


@pytest.mark.parametrize(
    ("name", "layout", "world"), on_cards((*case, world_of(case[1])) for case in MODELS)
)
def test_gpus_say_what_one_cpu_says(stored: Stored, name: str, layout: str, world: int) -> None:
    """Steps are captured, requests evicted, and begun from snapshots."""
    folder, expected = stored[name]
    ranks = run_ranks(world, serve, folder, layout, timeout_s=280)
    for case in CASES:
        said: dict[int, list[int]] = {}
        for rank in ranks:
            said |= rank[case].tokens
        assert [said[number] for number in EVERYTHING] == expected, case
        counters = [rank[case].stats for rank in ranks]
        assert all(stats["captured_steps"] > 10 for stats in counters), case
        assert any(stats["evictions"] for stats in counters) == (case == "evictions"), case
        hits = max(stats["prefix_cache_snapshot_hits"] for stats in counters)
        assert (hits > 0) == (case == "snapshots"), case


@pytest.mark.parametrize(
    ("name", "world"), on_cards((name, world_of(case.layout)) for name, case in DRAFTING.items())
)
def test_gpus_draft_what_one_drafts(name: str, world: int) -> None:
    """Behind the same tokens as in serial steps; so as many are accepted in a step."""
    (alone,) = run_ranks(1, draft_alone, name, timeout_s=200)
    compared = 0
    for found in run_ranks(world, draft_here, name, timeout_s=280):
        both = found.keys() & alone.keys()
        compared += len(both)
        for tokens in both:
            drafts = found[tokens]
            assert drafts == alone[tokens][: len(drafts)], (len(tokens), drafts, alone[tokens])
        assert len(both) >= 0.9 * len(found)
    assert compared > 100
