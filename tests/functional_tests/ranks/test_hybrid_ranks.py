"""Hybrid models on several ranks say what they say on one."""

from __future__ import annotations

import pytest

from megatron_async.models.parallel_state import ParallelSizes
from tests.support.hybrid_ranks import (
    CASES,
    JOBS,
    MODELS,
    NUMBERS,
    PLENTY,
    STAGES,
    RankRun,
    alone,
    pools,
    serve_all,
    serve_mine,
)
from tests.support.lively_models import store_lively
from tests.support.ranks import run_ranks

Stored = dict[str, tuple[str, list[list[int]]]]
EVERY = (0, 1, 2, 3)
"""Numbers of all cases. Models that several ways of sharing take run some of them on each way, so
that model and case meet, and way and case."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Folders of lively models, and what they say on one rank."""
    return store_lively(MODELS, tmp_path_factory.mktemp("hybrid"), alone)


def check(ranks: list[list[RankRun]], expected: list[list[int]], cases: tuple[int, ...]) -> None:
    """Both ranks said the same in the same steps."""
    for number, one, other in zip(cases, *ranks, strict=True):
        settings = CASES[number]
        assert one == other, settings
        assert one.tokens == expected, settings
        assert (one.evictions > 0) == ("num_kv_blocks" in settings), settings
        assert one.captured_steps > 10 or "num_cuda_graphs" not in settings
        assert one.prefix_cache_snapshot_hits == settings["enable_prefix_caching"]


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "cases"),
    [
        ("attention behind", False, (1, 2)),
        ("one group", False, EVERY),
        ("gated delta", False, (0, 3)),
        ("gated delta", True, EVERY),
    ],
)
def test_tensor_parallel(
    stored: Stored, name: str, sequence_parallel: bool, cases: tuple[int, ...]
) -> None:
    folder, expected = stored[name]
    sizes = ParallelSizes(2, sequence_parallel=sequence_parallel)
    found = run_ranks(2, serve_all, folder, sizes, cases)
    check([runs for _, runs in found], expected, cases)


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("attention behind", (0, 3)),
        ("attention ahead", EVERY),
        ("both on both", EVERY),
        ("gated delta", (1, 2)),
    ],
)
def test_pipeline(stored: Stored, name: str, cases: tuple[int, ...]) -> None:
    """A stage may have no attention, or no recurrent layer.

    Break one of these, and it fails:

    - `is_recurrent`: look at the pattern of one stage (then stages cut prompts in other places)
    - `max_paused_blocks`: divide by a block of no bytes
    """
    folder, expected = stored[name]
    sizes = ParallelSizes(pipeline_model_parallel=2)
    found = run_ranks(2, serve_all, folder, sizes, cases)
    assert "|".join(layers for layers, _ in found) == STAGES[name]
    check([runs for _, runs in found], expected, cases)


def test_the_stage_with_attention_sizes_the_pool(stored: Stored) -> None:
    """Blocks take no memory on the other one, which gives enough of them for every request."""
    first, second = run_ranks(2, pools, stored["attention behind"][0])
    assert first == second
    assert first[0] == PLENTY["max_requests"] * 512 // PLENTY["block_size_tokens"]
    assert 0 < first[1] < first[0]


@pytest.mark.parametrize(("name", "cases"), [("attention behind", (0, 3)), ("gated delta", (1, 2))])
def test_experts(stored: Stored, name: str, cases: tuple[int, ...]) -> None:
    folder, expected = stored[name]
    ranks = run_ranks(2, serve_mine, folder, cases)
    for number, *pair in zip(cases, *ranks, strict=True):
        settings = CASES[number]
        assert pair[0].steps == pair[1].steps, settings
        said = {n: t for ns, run in zip(NUMBERS, pair, strict=True)
                for n, t in zip(ns, run.tokens, strict=True)}  # fmt: skip
        assert [said[number] for number in range(len(JOBS))] == expected, settings
        assert any(run.evictions for run in pair) == ("num_kv_blocks" in settings), settings
        hits = sum(run.prefix_cache_snapshot_hits for run in pair)
        assert hits == settings["enable_prefix_caching"]
