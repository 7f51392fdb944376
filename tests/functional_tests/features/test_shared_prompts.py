"""Requests whose first chunks begin behind blocks of others begin their slots anew all the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_model import VOCABULARY, AttentionModel
from drafters import DRAFTERS
from harness import Job, assert_all_is_back, greedy, make_engine, run_alone
from late_device import LateDevice
from poisoned_blocks import poison_blocks
from schedules import MAX_STEPS, Schedule, run_schedule
from shared_prompts import SharedPrompts, sharing_schedule

from megatron_async import DynamicInferenceEngine
from megatron_async.devices import Chaos, CpuDevice

SCHEDULES = 24
TEXT = [(7 * n * n + 3) % VOCABULARY for n in range(40)]
ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.1},
    {"frequency_penalty": 1.5, "presence_penalty": 0.7},
    {"logit_bias": {3: 5.0, 8: -4.0}, "temperature": 0.9},
    {"min_tokens": 7, "stop_token_ids": list(range(24))},
    {"bad_words": [[3], [5, 7], [9, 2, 4], [1, 1]], "temperature": 1.3},
    {"return_log_probs": True, "skip_prompt_log_probs": True, "frequency_penalty": 0.8},
]
"""What the slots' former owners ask for, and then, in another order, those who share."""


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AttentionModel()


@pytest.fixture(scope="module")
def serial(model: torch.nn.Module) -> Iterator[DynamicInferenceEngine]:
    """Plain decoding, with room for all, and nothing shared."""
    engine = make_engine(model, lookahead=0, max_requests=16, block_size_tokens=16)
    yield engine
    engine.close()


def asking(number: int, length: int, tokens: int) -> Job:
    """A prompt of the text's beginning and a token of its own."""
    prompt = [*TEXT[:length], number % VOCABULARY]
    return Job(prompt, greedy(tokens, seed=number, **ASKED[number % len(ASKED)]))


@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_slots_are_begun_anew(
    model: torch.nn.Module, serial: DynamicInferenceEngine, lookahead: int, remembers: bool
) -> None:
    """Every slot had another owner, with other wishes.

    Break one of these, and it fails:

    - `PlanBuilder.build`: STARTS only where a chunk begins at 0
    - `begin_chunks_reference`: do not reset the counts where a chunk begins behind 0
    """
    earlier = [asking(number, 2, 12) for number in range(len(ASKED))]
    later = [asking(11 + 3 * number, 24 + number, 20) for number in range(2 * len(ASKED))]
    expected = run_alone(serial, [*earlier, *later])
    engine = make_engine(
        model, lookahead=lookahead, max_requests=len(ASKED), block_size_tokens=4, max_tokens=40
    )
    shared = SharedPrompts(engine, remembers)
    found = run_staggered(engine, earlier, 0)
    assert shared.hits == 0
    assert found + run_staggered(engine, later, len(earlier)) == expected
    # The first one's prompt is computed, of the others the end alone.
    assert shared.hits >= 6 * (len(later) - 1)
    shared.forget_all()
    assert_all_is_back(engine)
    engine.close()


def run_staggered(engine: DynamicInferenceEngine, jobs: list[Job], first_id: int) -> list[Any]:
    """Tokens of jobs of which one arrives with every step."""
    futures: list[Any] = []
    for _ in range(MAX_STEPS):
        if len(futures) == len(jobs) and not engine.has_unfinished_requests():
            break
        if len(futures) < len(jobs):
            job = jobs[len(futures)]
            futures.append(engine.add_request(first_id + len(futures), job.prompt, job.params))
        engine.step_modern()
    assert all(future.result().error is None for future in futures)
    return [future.result().generated_tokens for future in futures]


@pytest.mark.parametrize("steps", range(1, 6))
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_the_donor_goes(
    model: torch.nn.Module, serial: DynamicInferenceEngine, lookahead: int, steps: int
) -> None:
    """It is aborted after its first chunks, with its prompt or as it decodes, when others have
    its blocks."""
    donor, *others = (asking(number, 30, 9) for number in range(4))
    expected = run_alone(serial, [donor, *others])
    engine = make_engine(model, device=LateDevice(), lookahead=lookahead, max_requests=4,
                         block_size_tokens=3, num_kv_blocks=30, max_tokens=14)  # fmt: skip
    blocks = poison_blocks(engine)
    shared = SharedPrompts(engine)
    futures = [engine.add_request(0, donor.prompt, donor.params)]
    for _ in range(steps):
        engine.step_modern()
    for number, job in enumerate(others, 1):
        futures.append(engine.add_request(number, job.prompt, job.params))
    while not shared.hits:
        engine.step_modern()
    assert engine.context.blocks.has_shared
    engine.abort_request(0)
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert [future.result().generated_tokens for future in futures[1:]] == expected[1:]
    assert_all_is_back(engine)
    blocks.check_free_blocks()
    engine.close()


@pytest.mark.parametrize("remembers", [False, True])
def test_random_schedules(
    model: torch.nn.Module, serial: DynamicInferenceEngine, remembers: bool
) -> None:
    """Pauses, evictions, aborts and ends of requests that share blocks, with drafts and without, at
    lookahead 0 to 3, on a device whose work is late. Where tokens are kept beside the keys,
    requests share generated tokens too, and have repetition penalties.

    Break one of these, and it fails:

    - `KVBlockAllocator.release`: free blocks that still have an owner
    - `Scheduler._may_admit`: do not take cached blocks without an owner from the allocatable ones
    """
    seen: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        drafts = seed % 3
        keeps = seed // 4 % 2 == 1
        schedule = sharing_schedule(seed, drafts + 1, looks_back=keeps)
        plain = Schedule(schedule.jobs, {0: list(range(len(schedule.jobs)))})
        expected = [tokens for tokens, _ in run_schedule(serial, plain)]
        answers = [[*job.prompt, *tokens] for job, tokens in zip(schedule.jobs, expected)]
        config = {**schedule.config, "lookahead": seed % 4, "num_speculative_tokens": drafts}
        device = CpuDevice(Chaos(seed, 0.2, 0.001)) if seed % 2 else LateDevice()
        drafter = DRAFTERS["fickle"](answers, VOCABULARY) if drafts else None
        engine = make_engine(model, device=device, drafter=drafter, keeps_tokens=keeps, **config)
        blocks = poison_blocks(engine)
        shared = SharedPrompts(engine, remembers, answers=keeps)
        try:
            found = run_schedule(engine, schedule)
            assert_all_is_back(engine)
            blocks.check_free_blocks()
        finally:
            engine.close()
        for number, ((tokens, aborted), want) in enumerate(zip(found, expected, strict=True)):
            assert tokens == (want[: len(tokens)] if aborted else want), (seed, number)
        stats = engine.stats()
        for name in ("pauses", "evictions", "accepted_tokens", "zombie_rows"):
            seen[name] += int(stats[name])
        seen["hits"] += shared.hits
    assert seen["hits"] > 50
    assert min(seen.values()) > 0, seen
