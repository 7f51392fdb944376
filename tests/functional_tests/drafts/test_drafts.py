"""Drafts cannot be seen in the output: whatever is proposed, requests say what they say alone."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine, SamplingParams
from megatron_async.devices import Chaos, CpuDevice
from megatron_async.errors import ConfigurationError
from megatron_async.lab.recorder import Recorder
from megatron_async.lab.recording import load_recording
from megatron_async.lab.replay import Replay
from tests.support.attention_model import VOCABULARY, AttentionModel
from tests.support.drafters import DRAFTERS, Fickle, Oracle
from tests.support.harness import Job, assert_all_is_back, drain, greedy, make_engine, run_at
from tests.support.late_device import LateDevice
from tests.support.poison import poison_blocks
from tests.support.schedules import Schedule, random_schedule, run_schedule, serial_tokens

SerialResults = Callable[[list[Job]], tuple[list[list[int]], list[list[int]]]]
SCHEDULES = 8
ENOUGH = 40
"""Tokens beyond any end, which the drafters know too."""


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AttentionModel()


@pytest.fixture(scope="module")
def serial(model: torch.nn.Module) -> Any:
    """Plain decoding, with room for all."""
    engine = make_engine(model, lookahead=0, max_requests=16, block_size_tokens=16)
    yield engine
    engine.close()


def with_seeds(jobs: list[Job]) -> list[Job]:
    """Each job's number is its seed, by which the drafters know it."""
    return [replace(job, params=replace(job.params, seed=i)) for i, job in enumerate(jobs)]


def answers_of(serial: DynamicInferenceEngine, jobs: list[Job]) -> list[list[int]]:
    """What each job would say if nothing ended it."""
    endless = {
        "termination_id": -1, "stop_token_ids": None, "stop_words": None, "min_tokens": 0,
    }  # fmt: skip
    answers = []
    for number, job in enumerate(jobs):
        params = replace(job.params, num_tokens_to_generate=ENOUGH, **endless)
        request = serial.generate([job.prompt], params)[0]
        assert request.error is None, (number, request.error)
        answers.append([*job.prompt, *request.generated_tokens])
    return answers


@pytest.fixture(scope="module")
def serial_results(serial: DynamicInferenceEngine) -> SerialResults:
    """For the jobs of a schedule: what they would say if nothing ended them, and what they say.
    Each schedule's are computed once for all drafters."""
    known: dict[str, tuple[list[list[int]], list[list[int]]]] = {}

    def results(jobs: list[Job]) -> tuple[list[list[int]], list[list[int]]]:
        key = repr(jobs)
        if key not in known:
            known[key] = answers_of(serial, jobs), serial_tokens(serial, Schedule(jobs))
        answers, expected = known[key]
        return [list(answer) for answer in answers], expected

    return results


def drafting_engine(
    model: torch.nn.Module, drafter: str, answers: list[list[int]], count: int, **config: Any
) -> DynamicInferenceEngine:
    chosen = DRAFTERS[drafter](answers, VOCABULARY)
    return make_engine(model, drafter=chosen, num_speculative_tokens=count, **config)


def schedule_of(seed: int, width: int) -> Schedule:
    """A random schedule whose steps have room for drafts, and whose pool is as small as ever."""
    schedule = random_schedule(seed)
    schedule.jobs = with_seeds(
        [replace(job, prompt=[token % VOCABULARY for token in job.prompt]) for job in schedule.jobs]
    )
    for job in schedule.jobs:
        job.params.termination_id = min(job.params.termination_id, VOCABULARY - 1)
        job.params.stop_token_ids = [token % VOCABULARY for token in job.params.stop_token_ids]
    config = schedule.config
    config["max_tokens"] += config["max_requests"] * (width - 1)
    return schedule


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_random_schedules(model, serial_results, drafter: str, count: int):
    """Adds, aborts, stops and limits inside rows, block borders, pauses, evictions, at lookahead 0
    to 3, on a device whose work is late.

    Break one of these, and it fails:

    - `unpack_rows`: no `limit`, so that tokens behind a limit get places
    - `store_samples`: no `room`, or `agrees` that forgets earlier drafts
    - `RequestSlots.places`: without `widths_of`
    - `book_samples`: do not stop at the first stop token
    - `Scheduler._give_surplus_back`: keep one block less
    """
    seen: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        schedule = schedule_of(seed, count + 1)
        config = {**schedule.config, "lookahead": (seed + count) % 4}
        answers, expected = serial_results(schedule.jobs)
        device = CpuDevice(Chaos(seed, 0.2, 0.001)) if seed % 2 else LateDevice()
        engine = drafting_engine(model, drafter, answers, count, device=device, **config)
        blocks = poison_blocks(engine)
        try:
            found = run_schedule(engine, schedule)
            assert_all_is_back(engine)
            blocks.check_free_blocks()
        finally:
            engine.close()
        for number, ((tokens, aborted), want) in enumerate(zip(found, expected, strict=True)):
            assert tokens == (want[: len(tokens)] if aborted else want), (seed, number)
        stats = engine.stats()
        for name in ("pauses", "evictions", "drafted_tokens", "accepted_tokens", "zombie_rows"):
            seen[name] += int(stats[name])
    assert seen["drafted_tokens"] > 100
    assert min(seen["pauses"], seen["evictions"], seen["zombie_rows"]) > 0
    if drafter == "wrong":
        assert seen["accepted_tokens"] == 0
    else:
        assert seen["accepted_tokens"] > 0


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [1, 3])
def test_right_drafts_save_steps(model, serial, lookahead, count: int):
    """Every border of a block at every offset in a row; the last row is cut by the limit."""
    jobs = with_seeds([Job([1 + n, 5, 7][: 1 + n % 3], greedy(17 + n)) for n in range(4)])
    answers = answers_of(serial, jobs)
    expected = [answer[len(job.prompt) :][: 17 + n] for n, (answer, job) in
                enumerate(zip(answers, jobs, strict=True))]  # fmt: skip
    for size in (1, 2, 3, 4, 5, 7):
        engine = drafting_engine(
            model, "oracle", answers, count, lookahead=lookahead, block_size_tokens=size,
            max_requests=4,
        )  # fmt: skip
        assert run_at(engine, {0: jobs}) == expected, size
        stats = engine.stats()
        # The first token comes with the prompt; then a row yields all it may.
        assert stats["steps"] - stats["zombie_steps"] <= 2 + -(-19 // (count + 1)) + lookahead
        assert stats["accepted_tokens"] >= stats["drafted_tokens"] * 0.6


PROCESSED = [
    {"frequency_penalty": 0.9, "presence_penalty": 0.4},
    {"repetition_penalty": 1.7, "temperature": 1.0},
    {"bad_words": [[3], [5, 7], [9, 2, 4], [1, 1]], "temperature": 1.3},
    {"logit_bias": {3: 4.0, 8: -5.0}, "min_tokens": 9, "stop_token_ids": list(range(20))},
    {"return_log_probs": True, "top_n_logprobs": 3, "temperature": 0.8, "top_k": 7},
    {"return_log_probs": True, "frequency_penalty": 1.2, "logprobs_mode": "processed"},
]


@pytest.mark.parametrize("drafter", ["oracle", "fickle"])
def test_what_requests_ask_of_sampling(model, serial, lookahead, drafter: str):
    """Penalties and bad words see the drafts before a token, and count those that are accepted;
    every accepted token has its log probs.

    Break one of these, and it fails:

    - `process_logits.reference`: do not count the drafts before
    - `_banned`: do not look at the drafts before
    - `count_tokens.reference`: count all samples (no `is_yielded`)
    - `LaunchedStep.log_probs`: the first sample's for all of a row
    """
    base = {"num_tokens_to_generate": 24, "termination_id": -1, "temperature": 0.0}
    jobs = with_seeds(
        [Job([4, 9, 2][: 1 + i % 3], SamplingParams(**(base | each))) for i, each in
         enumerate(PROCESSED)]
    )  # fmt: skip
    answers = answers_of(serial, jobs)
    plain = serial.generate([job.prompt for job in jobs], [job.params for job in jobs])
    engine = drafting_engine(
        model, drafter, answers, 3, lookahead=lookahead, block_size_tokens=4, max_requests=8,
    )  # fmt: skip
    found = engine.generate([job.prompt for job in jobs], [job.params for job in jobs])
    drain(engine)
    for number, (mine, its) in enumerate(zip(found, plain, strict=True)):
        assert mine.error is None
        assert mine.generated_tokens == its.generated_tokens, PROCESSED[number]
        assert (mine.generated_log_probs is None) == (its.generated_log_probs is None)
        if its.generated_log_probs is not None:
            assert mine.generated_log_probs == pytest.approx(its.generated_log_probs, abs=1e-4)
    assert engine.stats()["accepted_tokens"] > 20


def test_record_and_replay(tiny_model: torch.nn.Module, tmp_path: Path) -> None:
    """A recorded run with drafts plans the same steps again, without model or drafter."""
    schedule = schedule_of(5, 4)
    serial = make_engine(tiny_model, lookahead=0)
    answers = answers_of(serial, schedule.jobs)
    serial.close()
    engine = drafting_engine(tiny_model, "fickle", answers, 3, **schedule.config)
    recorder = Recorder(engine, tmp_path / "run.rec")
    run_schedule(engine, schedule)
    recorder.close()
    assert engine.stats()["accepted_tokens"] > 0
    assert Replay(load_recording(tmp_path / "run.rec")).run() == engine.stats()["steps"]


def test_refusals(model: torch.nn.Module) -> None:
    answers = [[1, 2, 3]]
    with pytest.raises(ConfigurationError, match=r"rollback.*num_speculative_tokens=2"):
        drafting_engine(model, "oracle", answers, 2, invalidation="rollback")
    with pytest.raises(ConfigurationError, match=r"num_speculative_tokens=2 needs a drafter"):
        make_engine(model, num_speculative_tokens=2)
    with pytest.raises(ConfigurationError, match=r"a drafter was given"):
        make_engine(model, drafter=Oracle(answers, VOCABULARY))
    with pytest.raises(ConfigurationError, match=r"max_tokens=16 is smaller than max_requests=8"):
        make_engine(model, drafter=Fickle(answers, VOCABULARY), num_speculative_tokens=2,
                    max_requests=8, max_tokens=16)  # fmt: skip
