"""Requests that begin alike share blocks, and get the tokens that they would get alone; blocks
whose owner went or whose step failed, and those handed out or forgotten, are not found any more."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async import DynamicInferenceEngine, InferenceConfig
from megatron_async.devices import Chaos, CpuDevice
from megatron_async.errors import ConfigurationError
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.planning import prefix_cache
from megatron_async.planning.prefix_hashes import block_hashes
from tests.support.attention_model import VOCABULARY, AttentionModel
from tests.support.caching_engine import TEXT, answers_without_the_donor, caching
from tests.support.drafters import DRAFTERS
from tests.support.harness import (
    Job,
    alone_once,
    assert_all_is_back,
    drain,
    fail_call,
    greedy,
    make_engine,
    make_model,
    run_at,
)
from tests.support.late_device import LateDevice
from tests.support.poison import poison_blocks
from tests.support.schedules import Schedule, run_schedule, sharing_schedule

SCHEDULES = 24
ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.1},
    {"frequency_penalty": 1.5, "presence_penalty": 0.7},
    {"logit_bias": {3: 5.0, 8: -4.0}, "temperature": 0.9},
    {"min_tokens": 7, "stop_token_ids": list(range(24))},
    {"bad_words": [[3], [5, 7], [9, 2, 4], [1, 1]], "temperature": 1.3},
    {"return_log_probs": True, "skip_prompt_log_probs": True, "frequency_penalty": 0.8},
]
"""What the slots' former owners ask for, and then, in another order, requests that share blocks."""


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AttentionModel()


@pytest.fixture(scope="module")
def serial(model: torch.nn.Module) -> Iterator[DynamicInferenceEngine]:
    """Plain decoding, with room for all, and nothing shared."""
    engine = make_engine(model, lookahead=0, max_requests=16, block_size_tokens=16)
    yield engine
    engine.close()


@pytest.mark.parametrize("budget", [200, 13])
def test_equal_prompts_cost_one_prefill(model, serial, lookahead, budget: int):
    """Equal prompts arrive together; a prompt takes one step, or several. Break it, and it fails:
    `Scheduler._may_admit` does not wait for what the planned step writes."""
    jobs = [Job(TEXT[:40], greedy(6)) for _ in range(8)]
    expected = alone_once(serial, jobs)
    engine = caching(model, lookahead=lookahead, max_tokens=budget)
    assert run_at(engine, {0: jobs}) == expected
    # One computes 40 tokens; 10 blocks are found by the others, which compute the last token again.
    stats = engine.stats()
    assert stats["prefill_tokens"] == 40 + 7
    assert (stats["prefix_cache_queries"], stats["prefix_cache_hits"]) == (8 * 40, 7 * 39)


@pytest.mark.parametrize("length", range(15, 26))
def test_warm_equals_cold(model, serial, lookahead, length: int):
    """A prompt that ends at each place of a block, and parts from the one before at each."""
    jobs = [Job([*TEXT[:length], number], greedy(9)) for number in (1, 2, 1)]
    expected = alone_once(serial, jobs)
    engine = caching(model, lookahead=lookahead)
    assert [run_at(engine, {0: [job]})[0] for job in jobs] == expected
    hits = engine.stats()["prefix_cache_hits"]
    assert hits == length // 4 * 4 + min((length + 1) // 4 * 4, length)


@pytest.mark.parametrize("size", [2, 4, 1])
def test_a_prompt_of_whole_blocks(model, serial, lookahead, size: int):
    """The last token alone is computed again, by several requests at once; nobody writes to the
    blocks that they share.

    Break one of these, and it fails:

    - `PrefixCache._most`: the last block is never shared
    - `PlanBuilder.build`: without REPEATS
    - `_unpack_chunks`: the table of the dummy slot for a token that repeats
    """
    engine = caching(model, lookahead=lookahead, block_size_tokens=size)
    poison_blocks(engine)
    for length in (4, 8, 40):
        jobs = [
            Job(TEXT[:length], greedy(tokens, **asked))
            for tokens, asked in zip((5, 1, 6, 9), ASKED[1:])
        ]
        cold = Job(TEXT[:length], greedy(2))
        assert run_at(engine, {0: [cold]}) == alone_once(serial, [cold])
        before = engine.stats()["prefill_tokens"]
        futures = [engine.add_request(n, job.prompt, job.params) for n, job in enumerate(jobs)]
        drain(engine)
        found = [future.result() for future in futures]
        assert [each.generated_tokens for each in found] == alone_once(serial, jobs)
        assert engine.stats()["prefill_tokens"] - before == len(jobs)
        assert {each.num_cached_tokens for each in found} == {length - 1}


def test_experts_meet_a_token_that_is_computed_again() -> None:
    """Such a token writes to the dummy block, and is no dummy. Break it, and it fails:
    `route.reference` takes each token that writes there for a dummy."""
    engine = make_engine(
        make_model(DUMMY_SHAPES["tiny-moe"]), block_size_tokens=4, max_requests=4, lookahead=1,
        enable_prefix_caching=True,
    )  # fmt: skip
    params, found = greedy(4, return_log_probs=True, skip_prompt_log_probs=True), []
    for number in range(3):
        future = engine.add_request(number, TEXT[:8], params)
        drain(engine)
        found.append(future.result())
    engine.close()
    cold, *warm = found
    for each in warm:
        assert (each.num_cached_tokens, each.generated_tokens) == (7, cold.generated_tokens)
        assert each.generated_log_probs == pytest.approx(cold.generated_log_probs, abs=1e-4)


def test_slots_are_begun_anew(model: torch.nn.Module, serial: DynamicInferenceEngine, lookahead):
    """Every slot had another owner, with other wishes, and first chunks begin behind 0.

    Break one of these, and it fails:

    - `PlanBuilder.build`: STARTS only where a chunk begins at 0
    - `begin_chunks.reference`: do not reset the counts where a chunk begins behind 0
    """

    def asking(number: int, length: int, tokens: int) -> Job:
        prompt = [*TEXT[:length], number % VOCABULARY]
        return Job(prompt, greedy(tokens, seed=number, **ASKED[number % len(ASKED)]))

    earlier = [asking(number, 2, 12) for number in range(len(ASKED))]
    later = [asking(11 + 3 * number, 24 + number, 20) for number in range(2 * len(ASKED))]
    jobs = [*earlier, *later]
    expected = alone_once(serial, jobs)
    engine = caching(model, lookahead=lookahead, max_requests=len(ASKED), max_tokens=40)
    assert run_at(engine, {step: [job] for step, job in enumerate(jobs)}) == expected
    # The first one's prompt is computed, of the others the end alone.
    assert engine.stats()["prefix_cache_hits"] >= 24 * (len(later) - 1)


def test_a_conversation_computes_what_is_new(model, serial, lookahead):
    """Turn after turn, answers included, also where an answer ends with a block.

    Break one of these, and it fails:

    - `PrefixCache.leaves`: enter nothing
    - `PrefixCache._held`: count a token that no step feeds
    """
    engine, prompt, kept = caching(model, lookahead=lookahead), TEXT[:9], 0
    for number, answer in itertools.product(range(4), range(4, 12)):
        before = engine.stats()["prefill_tokens"]
        job = Job(prompt, greedy(answer))
        tokens = run_at(engine, {0: [job]})[0]
        assert tokens == alone_once(serial, [job])[0], (number, answer)
        assert engine.stats()["prefill_tokens"] - before == len(prompt) - kept // 4 * 4
        kept = len(prompt) + len(tokens) - 1  # the last token's keys are written by nobody
        prompt = [*prompt, *tokens, *TEXT[number : number + 3]]


def test_answers_are_found_while_they_grow(model: torch.nn.Module, serial: DynamicInferenceEngine):
    """A second request takes what a first one has generated so far."""
    first = Job(TEXT[:6], greedy(40))
    answer = alone_once(serial, [first])[0]
    second = Job([*TEXT[:6], *answer[:30], 5], greedy(6))
    engine = caching(model, lookahead=2)
    found = run_at(engine, {0: [first], 38: [second]})
    assert found == [answer, alone_once(serial, [second])[0]]
    assert engine.stats()["prefix_cache_hits"] >= 32


def test_an_evicted_request_finds_its_own_blocks(model, serial, lookahead):
    jobs = [Job(TEXT[number : number + 20], greedy(30)) for number in (0, 20, 40)]
    expected = alone_once(serial, jobs)
    engine = caching(model, lookahead=lookahead, num_kv_blocks=24, paused_buffer_size_gb=1e-9)
    assert run_at(engine, {0: jobs}) == expected
    stats = engine.stats()
    assert stats["evictions"] > 0
    assert stats["prefix_cache_hits"] > 0


def test_more_shared_entries_than_blocks(model: torch.nn.Module, serial: DynamicInferenceEngine):
    jobs = [Job([*TEXT, number], greedy(3)) for number in range(8)]
    expected = alone_once(serial, jobs)
    engine = caching(model, num_kv_blocks=34, max_tokens=200)
    assert run_at(engine, {0: jobs[:1], 1: jobs[1:]}) == expected
    assert engine.stats()["prefix_cache_hits"] == 7 * 64


def test_salts_keep_tenants_apart(model: torch.nn.Module) -> None:
    engine = caching(model)
    for salt, hits in (("a", 0), ("b", 0), (None, 0), ("a", 39), (None, 39)):
        job = Job(TEXT[:40], replace(greedy(3), cache_salt=salt))
        before = engine.stats()["prefix_cache_hits"]
        future = engine.add_request(0, job.prompt, job.params)
        drain(engine)
        assert engine.stats()["prefix_cache_hits"] - before == hits
        assert future.result().num_cached_tokens == hits


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_hash_alone_is_not_believed(model, serial, monkeypatch, lookahead):
    """Where all blocks at one place have one hash, only blocks with the same tokens are shared, and
    only within a salt. Break `_find`: believe hashes, or forget the salt."""

    def few_hashes(tokens: Any, size: int, salt: bytes = b"", parent: bytes = b"") -> list[bytes]:
        first = int.from_bytes(parent or bytes(16)) + 1
        return [(first + place).to_bytes(16) for place in range(len(tokens) // size)]

    monkeypatch.setattr(prefix_cache, "block_hashes", few_hashes)
    prompts = [TEXT[:40], [*TEXT[:20], *TEXT[50:70]], TEXT[30:70], TEXT[:40]]
    expected = [run_at(serial, {0: [Job(prompt, greedy(12))]})[0] for prompt in prompts]
    engine = caching(model, lookahead=lookahead)
    found = []
    for salt in (None, "a"):
        for prompt, tokens in zip(prompts, expected, strict=True):
            future = engine.add_request(0, prompt, replace(greedy(12), cache_salt=salt))
            drain(engine)
            assert future.result().generated_tokens == tokens
            found.append(future.result().num_cached_tokens)
    assert found == [0, 20, 0, 39, 0, 0, 0, 0]


def test_log_probs_of_a_prompt_are_computed(model: torch.nn.Module, serial: DynamicInferenceEngine):
    """A request that wants them finds nothing, and others find what it leaves."""
    job = Job(TEXT[:40], greedy(3, return_log_probs=True))
    engine = caching(model)
    futures = []
    for number in range(2):
        futures.append(engine.add_request(number, job.prompt, job.params))
        drain(engine)
    assert engine.stats()["prefix_cache_hits"] == 0
    first, second = (future.result().prompt_log_probs for future in futures)
    assert first == second
    assert len(first) == 39
    run_at(engine, {0: [Job(TEXT[:40], greedy(3))]}, first_id=5)
    assert engine.stats()["prefix_cache_hits"] == 39


def test_random_schedules(model: torch.nn.Module, serial: DynamicInferenceEngine) -> None:
    """Pauses, evictions, aborts and ends, with drafts and without, at lookahead 0 to 3, on a device
    whose work is late."""
    seen: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        drafts = seed % 3
        schedule = sharing_schedule(seed, drafts + 1)
        plain = Schedule(schedule.jobs, {0: list(range(len(schedule.jobs)))})
        expected = [tokens for tokens, _ in run_schedule(serial, plain)]
        answers = [[*job.prompt, *tokens] for job, tokens in zip(schedule.jobs, expected)]
        config = {**schedule.config, "lookahead": seed % 4, "num_speculative_tokens": drafts}
        device = CpuDevice(Chaos(seed, 0.2, 0.001)) if seed % 2 else LateDevice()
        drafter = DRAFTERS["fickle"](answers, VOCABULARY) if drafts else None
        engine = caching(model, device=device, drafter=drafter, **config)
        try:
            found = run_schedule(engine, schedule)
            assert_all_is_back(engine)
        finally:
            engine.close()
        for number, ((tokens, aborted), want) in enumerate(zip(found, expected, strict=True)):
            assert tokens == (want[: len(tokens)] if aborted else want), (seed, number)
        stats = engine.stats()
        for name in ("pauses", "evictions", "accepted_tokens", "zombie_rows", "prefix_cache_hits",
                     "prefix_cache_evictions"):  # fmt: skip
            seen[name] += int(stats[name])
    assert seen["prefix_cache_hits"] > 200
    assert min(seen.values()) > 0, seen


def test_what_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"rollback.*enable_prefix_caching"):
        InferenceConfig(enable_prefix_caching=True, invalidation="rollback")
    with pytest.raises(ConfigurationError, match=r"mamba_gb=2.*enable_prefix_caching"):
        InferenceConfig(prefix_caching_mamba_gb=2, enable_prefix_caching=False)
    assert InferenceConfig().enable_prefix_caching
    assert not InferenceConfig(invalidation="rollback").enable_prefix_caching


@pytest.mark.parametrize("steps", range(1, 6))
def test_the_donor_goes(model, serial, lookahead, steps: int):
    """A request is aborted while steps of it are in flight and others have its blocks."""
    jobs = [Job([*TEXT[:30], number], greedy(9)) for number in range(4)]
    engine = caching(model, device=LateDevice(), lookahead=lookahead, block_size_tokens=3,
                     max_requests=4, num_kv_blocks=30, max_tokens=14)  # fmt: skip
    assert answers_without_the_donor(engine, jobs, steps) == alone_once(serial, jobs)[1:]
    assert engine.stats()["prefix_cache_hits"] > 0


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


@pytest.mark.parametrize("failing", range(6))
def test_a_failed_steps_blocks_are_not_found(model, serial, lookahead, failing: int):
    """Break `PrefixCache.failed` so that it forgets nothing, and it fails."""
    jobs = [Job([*TEXT[:30], number], greedy(5)) for number in range(6)]
    expected = alone_once(serial, jobs)
    engine = caching(model, lookahead=lookahead, max_tokens=14)
    fail_call(engine.controller, "enqueue_step", failing + 1, RuntimeError("planted"))
    futures = [engine.add_request(n, job.prompt, job.params) for n, job in enumerate(jobs)]
    drain(engine)
    ended = [future.result() for future in futures]
    assert sum(request.error is not None for request in ended) > 0
    for request, tokens in zip(ended, expected):
        assert request.error is not None or request.generated_tokens == tokens
    # Later requests find what was written, and nothing else.
    late = [engine.add_request(10 + n, job.prompt, job.params) for n, job in enumerate(jobs)]
    drain(engine)
    assert [future.result().generated_tokens for future in late] == expected


@pytest.mark.parametrize("failing", range(1, 12))
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_failed_step_feeds_no_token(model, serial, lookahead, failing: int):
    """Break `PrefixCache.failed` so that its requests still enter what they leave, and it fails."""
    answer = alone_once(serial, [Job(TEXT[:6], greedy(30))])[0]
    late = Job([*TEXT[:6], *answer[:20], 5], greedy(6))
    expected = alone_once(serial, [late])[0]
    engine = caching(model, lookahead=lookahead)
    poison_blocks(engine)
    fail_call(engine.controller, "enqueue_step", failing + 1, RuntimeError("planted"))
    future = engine.add_request(0, TEXT[:6], greedy(30))
    drain(engine)
    assert future.result().error is not None
    assert run_at(engine, {0: [late]}, first_id=1)[0] == expected


@pytest.mark.parametrize("way", ["reset", "suspend", "in flight"])
def test_what_is_forgotten(model: torch.nn.Module, serial: DynamicInferenceEngine, way: str):
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
    drain(engine)
    assert future.result().generated_tokens == expected
    assert run_at(engine, {0: [job]}, first_id=1)[0] == expected
    assert engine.stats()["prefix_cache_hits"] == 0
    assert run_at(engine, {0: [job]}, first_id=2)[0] == expected
    assert engine.stats()["prefix_cache_hits"] == 39
