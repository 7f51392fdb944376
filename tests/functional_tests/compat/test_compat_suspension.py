"""Suspend and resume as reinforcement learning uses them: weights change in between, epochs say
which weights made what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.engines.dynamic_engine import EngineState

from megatron_async.compat.inference.engines import DynamicInferenceEngine
from tests.support.compat_models import fill, gpt_model
from tests.support.compat_trio import PROMPTS, compat_engine, drive, greedy_params

PERSIST, RECOMPUTE = KVCacheManagementMode.PERSIST, KVCacheManagementMode.RECOMPUTE
PROMPT = list(range(3, 45, 2))
TOKENS = 16


@pytest.mark.parametrize("mode", ["persist", "recompute"])
@pytest.mark.parametrize("interval", [2, 3, 5])
def test_megatrons_loop_with_suspends(
    tiny_model: torch.nn.Module, mode: str, interval: int
) -> None:
    with compat_engine(tiny_model, kv_cache_management_mode=mode) as engine:
        expected = drive(engine, PROMPTS, greedy_params(8))
        found = drive(engine, PROMPTS, greedy_params(8), suspend_resume_interval=interval)
        evictions = engine.evicted_request_count
    assert [r.generated_tokens for r in found] == [r.generated_tokens for r in expected]
    kinds = [event.type.name for request in found for event in request.events]
    assert (evictions > 0) is ("EVICT" in kinds) is (mode == "recompute")


def test_memory_goes_back_only_with_recompute(tiny_model: torch.nn.Module) -> None:
    for mode in (PERSIST, RECOMPUTE):
        with compat_engine(tiny_model, kv_cache_management_mode=mode) as engine:
            engine.add_request(0, PROMPTS[0], greedy_params(5))
            engine.step_modern()
            freed = engine.suspend()
            assert (freed > 0) is (mode is RECOMPUTE)
            assert engine.suspend() == 0, "suspended already"
            engine.resume()
            engine.resume()  # nothing happens
            assert engine.state is EngineState.RUNNING


@contextmanager
def serving(model: Any, **fields: Any) -> Iterator[DynamicInferenceEngine]:
    with compat_engine(model, **fields) as engine:
        yield engine


def tokens_of(engine: DynamicInferenceEngine, prompt: list[int] = PROMPT) -> list[int]:
    (record,) = engine.generate([prompt], greedy_params(TOKENS))
    tokens: list[int] = record[0].generated_tokens
    return tokens


@pytest.fixture(scope="module")
def weights() -> tuple[list[int], list[int]]:
    """Tokens of a fresh engine with the weights of seed 0, and with those of seed 1."""
    found = []
    for seed in (0, 1):
        with serving(gpt_model(seed=seed)) as engine:
            found.append(tokens_of(engine))
    assert found[0] != found[1]
    assert all(len(set(tokens)) > 4 for tokens in found)
    return found[0], found[1]


@pytest.mark.parametrize("mode", [PERSIST, RECOMPUTE])
@pytest.mark.parametrize("caching", [False, True])
def test_weights_that_training_changed_in_place_are_served(
    weights: tuple[list[int], list[int]], mode: KVCacheManagementMode, caching: bool
) -> None:
    model = gpt_model(seed=0)
    with serving(model, kv_cache_management_mode=mode, enable_prefix_caching=caching) as engine:
        assert tokens_of(engine) == weights[0]
        for seed in (1, 0, 1):
            engine.suspend()
            fill(model, seed=seed)
            engine.resume()
            # The same prompt: a block that is found again would be the old weights'.
            assert tokens_of(engine) == weights[seed]


def half_way(engine: DynamicInferenceEngine, tokens: int) -> Any:
    """A request that has generated about so many tokens, its engine suspended."""
    future = engine.add_request(0, PROMPT, greedy_params(TOKENS))
    while len(engine.get_request(0).generated_tokens) < tokens:
        engine.step_modern()
    engine.suspend()
    return future


def test_a_running_request_goes_on_with_new_weights_over_its_old_keys_or_new_ones(
    weights: tuple[list[int], list[int]],
) -> None:
    answers = {}
    for mode in (PERSIST, RECOMPUTE):
        model = gpt_model(seed=0)
        with serving(model, kv_cache_management_mode=mode) as engine:
            future = half_way(engine, 6)
            known = list(engine.get_request(0).generated_tokens)
            assert known == weights[0][: len(known)]
            fill(model, seed=1)
            engine.resume()
            while engine.has_unfinished_requests():
                engine.step_modern()
            answers[mode] = future.result()[0].generated_tokens
            assert answers[mode][: len(known)] == known, "booked tokens stay"
            # What new weights alone make of prompt and tokens so far.
            rest = engine.generate([PROMPT + known], greedy_params(TOKENS - len(known)))
            alone = known + rest[0][0].generated_tokens
        assert (answers[mode] == alone) is (mode is RECOMPUTE)
    assert answers[PERSIST] != answers[RECOMPUTE]


@pytest.mark.parametrize("mode", [PERSIST, RECOMPUTE])
def test_epochs(mode: KVCacheManagementMode) -> None:
    with serving(gpt_model(), kv_cache_management_mode=mode) as engine:
        before = engine.add_request(9, PROMPT, greedy_params(1))
        while engine.has_unfinished_requests():
            engine.step_modern()
        assert (before.result()[0].policy_epoch, before.result()[0].kv_cache_epoch) == (None, None)

        engine.set_generation_epoch(3)
        future = half_way(engine, 5)
        live = engine.get_request(0)
        assert live.policy_epoch == live.kv_cache_epoch == [(0, 3)]
        known = len(PROMPT) + len(live.generated_tokens)
        engine.set_generation_epoch(4)
        live = engine.get_request(0)
        assert live.policy_epoch == [(0, 3), (known - 1, 4)]
        engine.resume()
        while engine.has_unfinished_requests():
            engine.step_modern()
        request = future.result().merge()
        assert request.policy_epoch == [(0, 3), (known - 1, 4)]
        # With RECOMPUTE all keys and values are the new weights'.
        kept = mode is PERSIST
        assert request.kv_cache_epoch == ([(0, 3), (known - 1, 4)] if kept else [(0, 4)])
        after = engine.add_request(1, PROMPT, greedy_params(1))
        while engine.has_unfinished_requests():
            engine.step_modern()
        assert after.result()[0].policy_epoch == [(0, 4)]
        engine.reset()
        assert engine.book.epoch is None


def test_an_epoch_told_after_a_recompute_counts_from_there(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model, kv_cache_management_mode=RECOMPUTE) as engine:
        engine.set_generation_epoch(1)
        future = half_way(engine, 3)
        engine.resume()
        engine.step_modern()  # it is admitted again, with the weights of epoch 1
        engine.set_generation_epoch(2)
        known = len(PROMPT) + len(engine.get_request(0).generated_tokens)
        while engine.has_unfinished_requests():
            engine.step_modern()
        request = future.result()[0]
        assert request.policy_epoch == request.kv_cache_epoch == [(0, 1), (known - 1, 2)]
