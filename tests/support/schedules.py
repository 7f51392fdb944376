"""Random schedules for the chaos tests: what arrives, ends and is aborted when, under which
settings. Everything follows from a seed."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_async import DynamicInferenceEngine, DynamicInferenceRequest, SamplingParams
from megatron_async.devices import Chaos, CpuDevice
from tests.support.attention_model import VOCABULARY
from tests.support.harness import TINY, Job, assert_all_is_back, make_engine

BeforeStep = Callable[[DynamicInferenceEngine], None]
MAX_STEPS = 5000
"""More than any schedule takes; beyond it an engine is stuck."""


@dataclass
class Schedule:
    """Jobs (their index is their request id), when they arrive and which are aborted when."""

    jobs: list[Job]
    arrivals: dict[int, list[int]] = field(default_factory=dict)
    aborts: dict[int, list[int]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def random_schedule(seed: int) -> Schedule:
    """Adds, ends (by length and by stop token), aborts, and a pool too small for comfort."""
    chooser = random.Random(seed)
    schedule = Schedule([random_job(chooser) for _ in range(chooser.randint(3, 9))])
    for number in range(len(schedule.jobs)):
        schedule.arrivals.setdefault(chooser.randrange(15), []).append(number)
        if chooser.random() < 0.2:
            schedule.aborts.setdefault(chooser.randrange(40), []).append(number)

    block_size = chooser.choice([1, 2, 3, 4, 8, 16])
    longest = max(job_length(job) for job in schedule.jobs)
    needed = -(-(longest - 1) // block_size)
    max_requests = chooser.randint(2, 8)
    max_tokens = max_requests + chooser.choice([0, 0, 1, 6, 60])
    chunked = chooser.random() < 0.8
    if not chunked:
        max_tokens = max(max_tokens, max(len(job.prompt) for job in schedule.jobs))
    schedule.config = {
        "lookahead": chooser.randint(1, 3),
        "block_size_tokens": block_size,
        "num_kv_blocks": needed + chooser.randint(0, 1 + needed // 2),
        "max_requests": max_requests,
        "max_tokens": max_tokens,
        "enable_chunked_prefill": chunked,
        # Far less than one block, or no limit: every pause evicts, or only a standstill does.
        "paused_buffer_size_gb": chooser.choice([1e-9, None]),
    }
    return schedule


def random_job(chooser: random.Random) -> Job:
    """A prompt and how to continue it."""
    length = chooser.choice([1, 2, 5, 12, 30])
    prompt = [chooser.randrange(TINY.vocab_size) for _ in range(length)]
    params = SamplingParams(
        temperature=chooser.choice([0.0, 0.0, 0.7, 1.3]),
        top_k=chooser.choice([0, 0, 5]),
        top_p=chooser.choice([0.0, 0.9]),
        min_p=chooser.choice([0.0, 0.0, 0.02]),
        seed=chooser.choice([None, chooser.randrange(2**63)]),
        num_tokens_to_generate=chooser.randint(1, 30),
        # Some twentieth of the vocabulary ends a request, others run to their length.
        termination_id=chooser.choice([-1, chooser.randrange(TINY.vocab_size)]),
        stop_token_ids=chooser.sample(range(TINY.vocab_size), chooser.choice([0, 6])),
    )
    return Job(prompt, params)


def job_length(job: Job) -> int:
    """Tokens of the sequence at its length limit."""
    assert job.params.num_tokens_to_generate is not None
    return len(job.prompt) + job.params.num_tokens_to_generate


def play(
    engine: DynamicInferenceEngine, schedule: Schedule, before_step: BeforeStep | None = None
) -> list[DynamicInferenceRequest]:
    """Play a schedule on an idle engine: its requests, each at its end. `before_step` does what a
    schedule does not know."""
    requests: dict[int, Any] = {}
    last_event = max([*schedule.arrivals, *schedule.aborts])
    step = 0
    while step <= last_event or engine.has_unfinished_requests():
        assert step < MAX_STEPS, "the engine is stuck"
        for number in schedule.arrivals.get(step, ()):
            job = schedule.jobs[number]
            requests[number] = engine.add_request(number, job.prompt, job.params)
        for number in schedule.aborts.get(step, ()):
            if number in requests and not requests[number].done():
                engine.abort_request(number)
        if before_step is not None:
            before_step(engine)
        engine.step_modern()
        step += 1
    ended = [requests[number].result() for number in range(len(schedule.jobs))]
    for request in ended:
        assert request.finish_reason != "error", request.error
    return ended


def run_schedule(
    engine: DynamicInferenceEngine, schedule: Schedule, before_step: BeforeStep | None = None
) -> list[tuple[list[int], bool]]:
    """`play` a schedule: for each job its tokens, and whether it was aborted before its end."""
    ended = play(engine, schedule, before_step)
    return [(request.generated_tokens, request.finish_reason == "aborted") for request in ended]


def serial_tokens(serial_engine: DynamicInferenceEngine, schedule: Schedule) -> list[list[int]]:
    """What every job of the schedule says when nothing interferes with it."""
    serial = Schedule(schedule.jobs, {0: list(range(len(schedule.jobs)))})
    return [tokens for tokens, _ in run_schedule(serial_engine, serial)]


def wrong_results(
    model: torch.nn.Module,
    serial_engine: DynamicInferenceEngine,
    seed: int,
    counts: Counter[str],
    before_step: BeforeStep | None = None,
    **config: Any,
) -> list[str]:
    """Play schedule `seed` under chaos, with `config` over the schedule's own settings, and compare
    it with its serial result (lookahead 0, no chaos, room for all): a line for each request that is
    wrong. Events are added to `counts`."""
    schedule = random_schedule(seed)
    expected = serial_tokens(serial_engine, schedule)
    device = CpuDevice(Chaos(seed, probability=0.2, max_delay_s=0.001))
    engine = make_engine(model, device=device, **{**schedule.config, **config})
    try:
        found = run_schedule(engine, schedule, before_step)
        assert_all_is_back(engine)
    finally:
        engine.close()
    stats = engine.stats()
    reasons = sum(engine.statistics.no_overlap.values())
    assert stats["overlapped_steps"] + reasons == stats["steps"]
    for key in ("pauses", "evictions", "zombie_rows", "discarded_steps", "discarded_rows"):
        counts[key] += int(stats[key])
    counts["aborted"] += sum(aborted for _, aborted in found)
    counts["overlapped"] += stats["overlap_ratio"] > 0
    return [
        f"schedule {seed}, request {number}: {tokens} instead of {want}"
        for number, ((tokens, aborted), want) in enumerate(zip(found, expected, strict=True))
        if tokens != (want[: len(tokens)] if aborted else want)
    ]


def sharing_schedule(seed: int, width: int) -> Schedule:
    """A random schedule of prompts that begin alike, in a pool as small as ever."""
    schedule, chooser = random_schedule(seed), random.Random(seed)
    texts = [[chooser.randrange(VOCABULARY) for _ in range(30)] for _ in range(2)]
    jobs = []
    for number, job in enumerate(schedule.jobs):
        length = len(job.prompt)
        same = min(length, chooser.choice([length, length - 1, length // 2]))
        prompt = chooser.choice(texts)[:same] + [token % VOCABULARY for token in job.prompt[same:]]
        jobs.append(Job(prompt, replace(job.params, seed=number)))
        params = jobs[-1].params
        params.termination_id = min(params.termination_id, VOCABULARY - 1)
        params.stop_token_ids = [token % VOCABULARY for token in params.stop_token_ids]
        if chooser.random() < 0.5:
            params.frequency_penalty = 0.9
    schedule.jobs = jobs
    schedule.config["max_tokens"] += schedule.config["max_requests"] * (width - 1)
    return schedule
