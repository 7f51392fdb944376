"""What the prefix cache must not find any more: blocks whose owner went or whose step failed, and
those that were handed out or forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async import DynamicInferenceEngine
from megatron_async.contexts.prefix_hashes import block_hashes
from tests.support.attention_model import AttentionModel
from tests.support.caching_engine import TEXT, caching
from tests.support.harness import Job, alone_once, assert_all_is_back, greedy, make_engine, run_at
from tests.support.late_device import LateDevice
from tests.support.poison import poison_blocks


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AttentionModel()


@pytest.fixture(scope="module")
def serial(model: torch.nn.Module) -> Iterator[DynamicInferenceEngine]:
    """Plain decoding, with room for all, and nothing shared."""
    engine = make_engine(model, lookahead=0, max_requests=16, block_size_tokens=16)
    yield engine
    engine.close()


@pytest.mark.parametrize("steps", range(1, 6))
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_the_donor_goes(
    model: torch.nn.Module, serial: DynamicInferenceEngine, lookahead: int, steps: int
) -> None:
    """It is aborted while steps of it are in flight and others have its blocks."""
    jobs = [Job([*TEXT[:30], number], greedy(9)) for number in range(4)]
    expected = alone_once(serial, jobs)
    engine = caching(model, device=LateDevice(), lookahead=lookahead, block_size_tokens=3,
                     max_requests=4, num_kv_blocks=30, max_tokens=14)  # fmt: skip
    blocks = poison_blocks(engine)
    futures = [engine.add_request(0, jobs[0].prompt, jobs[0].params)]
    for _ in range(steps):
        engine.step_modern()
    for number, job in enumerate(jobs[1:], 1):
        futures.append(engine.add_request(number, job.prompt, job.params))
    engine.step_modern()
    engine.abort_request(0)
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert [future.result().generated_tokens for future in futures[1:]] == expected[1:]
    assert engine.stats()["prefix_cache_hits"] > 0
    assert_all_is_back(engine)
    blocks.check_free_blocks()
    engine.close()


def test_what_is_lost_is_told_once(model: torch.nn.Module) -> None:
    """And not what has come back meanwhile."""
    engine = caching(model, num_kv_blocks=12, max_requests=2)
    cache = engine.context.prefix_cache
    assert cache is not None

    def hashes(text: list[int]) -> list[bytes]:
        return block_hashes(np.array(text), 4)

    run_at(engine, {0: [Job(TEXT[:30], greedy(2))]})
    assert cache.take_lost() == []
    other = [token + 1 for token in TEXT[:30]]
    run_at(engine, {0: [Job(other, greedy(2))]})
    # 8 blocks more than the 5 that were free; of the sequence its end goes first.
    assert cache.take_lost() == hashes(TEXT[:30])[4:][::-1]
    assert cache.take_lost() == []
    run_at(engine, {0: [Job(TEXT[:30], greedy(2))]})
    run_at(engine, {0: [Job(other, greedy(2))]})
    lost = cache.take_lost()
    assert set(lost) <= set(hashes(TEXT[:30]))
    assert not set(lost) & set(cache._block_of)
    engine.close()


@pytest.mark.parametrize("failing", range(6))
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_failed_steps_blocks_are_not_found(
    model: torch.nn.Module,
    serial: DynamicInferenceEngine,
    lookahead: int,
    failing: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Break `PrefixCache.failed` so that it forgets nothing, and it fails."""
    jobs = [Job([*TEXT[:30], number], greedy(5)) for number in range(6)]
    expected = alone_once(serial, jobs)
    engine = caching(model, lookahead=lookahead, max_tokens=14)
    launch = engine.controller.enqueue_step

    def fail_once(plan: Any) -> Any:
        if plan.step == failing:
            raise RuntimeError("planted")
        return launch(plan)

    monkeypatch.setattr(engine.controller, "enqueue_step", fail_once)
    futures = [engine.add_request(n, job.prompt, job.params) for n, job in enumerate(jobs)]
    while engine.has_unfinished_requests():
        engine.step_modern()
    ended = [future.result() for future in futures]
    assert sum(request.error is not None for request in ended) > 0
    for request, tokens in zip(ended, expected):
        assert request.error is not None or request.generated_tokens == tokens
    # Whoever comes later finds what was written, and nothing else.
    late = [engine.add_request(10 + n, job.prompt, job.params) for n, job in enumerate(jobs)]
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert [future.result().generated_tokens for future in late] == expected
    assert_all_is_back(engine)
    engine.close()


@pytest.mark.parametrize("failing", range(1, 12))
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_failed_step_feeds_no_token(
    model: torch.nn.Module,
    serial: DynamicInferenceEngine,
    lookahead: int,
    failing: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Break `PrefixCache.failed` so that its requests still enter what they leave, and it fails."""
    answer = alone_once(serial, [Job(TEXT[:6], greedy(30))])[0]
    late = Job([*TEXT[:6], *answer[:20], 5], greedy(6))
    expected = alone_once(serial, [late])[0]
    engine = caching(model, lookahead=lookahead)
    poison_blocks(engine)
    launch = engine.controller.enqueue_step

    def fail_once(plan: Any) -> Any:
        if plan.step == failing:
            raise RuntimeError("planted")
        return launch(plan)

    monkeypatch.setattr(engine.controller, "enqueue_step", fail_once)
    future = engine.add_request(0, TEXT[:6], greedy(30))
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert future.result().error is not None
    assert run_at(engine, {0: [late]}, first_id=1)[0] == expected
    engine.close()


@pytest.mark.parametrize("way", ["reset", "suspend", "in flight"])
def test_what_is_forgotten(
    model: torch.nn.Module, serial: DynamicInferenceEngine, way: str
) -> None:
    """By `reset_prefix_cache`, or with the cache's memory; requests from before leave nothing."""
    job, engine = Job(TEXT[:40], greedy(12)), caching(model)
    expected = alone_once(serial, [job])[0]
    future = engine.add_request(0, job.prompt, job.params)
    while engine.has_unfinished_requests() and (way != "in flight" or engine.stats()["steps"] < 4):
        engine.step_modern()
    if way == "suspend":
        engine.suspend(free_kv_cache=True)
        engine.resume()
    else:
        engine.reset_prefix_cache()
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert future.result().generated_tokens == expected
    assert run_at(engine, {0: [job]}, first_id=1)[0] == expected
    assert engine.stats()["prefix_cache_hits"] == 0
    assert run_at(engine, {0: [job]}, first_id=2)[0] == expected
    assert engine.stats()["prefix_cache_hits"] == 39
    assert_all_is_back(engine)
    engine.close()
