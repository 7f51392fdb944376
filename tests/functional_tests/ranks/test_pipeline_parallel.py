"""Pipelines of 2 and 4 stages over gloo: the tokens of one rank, whatever happens meanwhile."""

import os
from functools import partial
from typing import Any

import pytest

from megatron_async import LLM
from megatron_async.devices import CpuDevice
from megatron_async.errors import OutOfMemoryError
from tests.support.harness import greedy, make_engine
from tests.support.pipeline_scenarios import (
    CASES,
    PROMPTS,
    fail_once,
    run_captured,
    run_cases,
    stage_model,
)
from tests.support.ranks import RankError, run_ranks

RUNS = {
    "all at once": [0, 1, 2, 3],
    "small pool": [1, 3],
    "one request": [2],
    "arrivals": [1, 2],
    "aborts": [2],
    "shared": [1, 2],
    "stops": [2],
    "grammars": [2, 5],
}
"""Case -> lookaheads."""
FOUR_STAGES = {"all at once": [4], "grammars": [1]}
Found = dict[tuple[str, int], Any]


@pytest.fixture(scope="module")
def alone() -> Found:
    """One rank, serial."""
    return run_cases(1, {name: [0] for name in CASES}, chaos=False)


@pytest.fixture(scope="module")
def two_stages() -> list[Found]:
    return run_ranks(2, run_cases, 2, RUNS)


def assert_same(found: Found, alone: Found) -> None:
    for (name, lookahead), (requests, _) in found.items():
        where = f"{name}, lookahead {lookahead}"
        for got, wanted in zip(requests, alone[name, 0][0], strict=True):
            for key in ("tokens", "status", "reason"):
                assert got[key] == wanted[key], where
            for key in ("log probs", "prompt log probs"):
                assert (got[key] is None) == (wanted[key] is None), where
                assert got[key] is None or got[key] == pytest.approx(wanted[key], abs=1e-4), where
            assert _tokens(got["top"]) == _tokens(wanted["top"]), where


def _tokens(top: list[dict[str, float]] | None) -> list[set[str]] | None:
    return None if top is None else [set(place) for place in top]


def test_two_stages_say_what_one_rank_says(two_stages: list[Found], alone: Found) -> None:
    for found in two_stages:
        assert_same(found, alone)


def test_ranks_took_the_same_steps(two_stages: list[Found]) -> None:
    for case in two_stages[0]:
        first, second = (found[case][1] for found in two_stages)
        for name in ("steps", "rows", "pauses", "evictions", "zombie_rows", "kv_blocks"):
            assert first[name] == second[name], (case, name)


def test_requests_paused_and_were_evicted(two_stages: list[Found]) -> None:
    for name in ("small pool", "shared"):
        for lookahead in RUNS[name]:
            stats = two_stages[0][name, lookahead][1]
            assert stats["pauses"] > 0
            assert stats["evictions"] > 0


def test_the_pipeline_fills_with_enough_lookahead(two_stages: list[Found]) -> None:
    bubble = {case: stats["pipeline_bubble"] for case, (_, stats) in two_stages[0].items()}
    assert bubble["all at once", 0] == pytest.approx(0.5, abs=0.02)
    assert bubble["arrivals", 1] < 0.1
    assert bubble["one request", 2] > 0.4


def test_four_stages_of_five_layers(alone: Found) -> None:
    for found in run_ranks(4, run_cases, 4, FOUR_STAGES):
        assert_same(found, alone)


def test_captured_steps(alone: Found) -> None:
    for found in run_ranks(2, run_captured):
        assert found[1]["captured_steps"] > 20
        assert_same({("arrivals", 2): found}, alone)


@pytest.mark.parametrize(
    ("stage", "where"), [(0, "forward"), (1, "forward"), (1, "launch"), (0, "send")]
)
def test_a_failed_step_fails_on_every_stage(stage: int, where: str) -> None:
    ranks = run_ranks(2, fail_once, stage, where)
    engine = make_engine(stage_model(1), max_requests=6)
    wanted = [
        request.generated_tokens for request in engine.generate(PROMPTS[:6], [greedy(12)] * 6)
    ]
    engine.close()
    requests, _, later = ranks[0]
    assert [r["status"] for r in requests] == [r["status"] for r in ranks[1][0]]
    failed = [request["status"] == "FAILED" for request in requests]
    assert 0 < sum(failed) < 6, "one micro-batch, not both"
    for request, tokens, is_failed in zip(requests, wanted, failed, strict=True):
        assert request["tokens"] == tokens[: len(request["tokens"])]
        assert is_failed == (len(request["tokens"]) < 12)
    for rank, (_, causes, _) in enumerate(ranks):
        named = (
            "told to fail" if rank == stage else f"StageFailed('it failed on pipeline stage {stage}"
        )
        assert causes
        assert all(named in cause for cause in causes), (rank, causes)
    assert [request["tokens"] for request in later] == wanted[:3]


def dummy_tokens(**settings: Any) -> tuple[list[list[int]], int, int]:
    # Without token ids beside the keys, which the last stage alone has.
    with LLM("dummy:tiny", device="cpu", enable_prefix_caching=False, **settings) as llm:
        requests = llm.generate([[1, 2, 3], [4] * 9], greedy(8))
        stats = llm.engine.stats()
        blocks = llm.engine.context.gpu_view.kv_cache.num_bytes // (stats["kv_blocks"] + 1)
    return [r.generated_tokens for r in requests], int(stats["lookahead"]), blocks


def test_llm_splits_a_model_that_ties_its_embeddings() -> None:
    tokens, _, block = dummy_tokens(num_kv_blocks=8)
    leader, follower = run_ranks(2, pipelined_dummy)
    assert leader == (tokens, 2, block // 2)
    assert follower == ([], 2, block // 2)


def pipelined_dummy() -> tuple[list[list[int]], int, int]:
    return dummy_tokens(num_kv_blocks=8, pipeline_model_parallel_size=2)


def test_rollback_is_refused() -> None:
    with pytest.raises(RankError, match="invalidation='rollback' is not served"):
        run_ranks(2, with_rollback)


def with_rollback() -> None:
    LLM("dummy:tiny", device="cpu", pipeline_model_parallel_size=2, invalidation="rollback")


def uneven_memory() -> list[tuple[int, str]]:
    """KV blocks, or the error, where one rank has memory for few blocks, and then for none (but for
    what its slots take)."""
    model, found = stage_model(2), []
    for free in (2_000_000, 160_000):
        device = CpuDevice()
        if os.environ["RANK"] == "1":
            device.free_memory = partial(int, free)  # type: ignore[method-assign]
        try:
            engine = make_engine(model, device=device, num_kv_blocks=None)
            found.append((engine.context.blocks.total, ""))
        except OutOfMemoryError as error:
            found.append((0, str(error)))
    return found


def test_the_rank_with_least_memory_decides() -> None:
    (few, other), (same, own) = run_ranks(2, uneven_memory)
    assert few == same
    assert 0 < few[0] < 200
    assert "does not fit on another rank" in other[1]
    assert "holds no usable KV block" in own[1]
