"""Schedules for engines that draft, drawn by a seed: requests of every mode around the borders of
blocks, small pools, shared prefixes, aborts and stops."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron_async import DynamicInferenceEngine, SamplingParams
from megatron_async.devices import Chaos, CpuDevice
from tests.support.attention_model import VOCABULARY, AttentionModel
from tests.support.drafters import DRAFTERS
from tests.support.harness import Job, assert_all_is_back, make_engine, run_at
from tests.support.late_device import LateDevice
from tests.support.poison import poison_blocks, poison_states
from tests.support.schedules import Schedule, run_schedule

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.6},
    "filtered": {"temperature": 1.0, "top_k": 3, "top_p": 0.9},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.7},
}
"""How tokens are chosen."""
PLAIN: dict[str, Any] = {
    "top_k": 0, "top_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
}  # fmt: skip
"""What a mode does not name."""


def periodic(chooser: random.Random, length: int) -> list[int]:
    """A prompt that repeats itself."""
    period = [chooser.randrange(VOCABULARY) for _ in range(chooser.randint(1, 7))]
    return (period * length)[:length]


def drawn_jobs(chooser: random.Random, count: int, size: int) -> list[Job]:
    """Requests of every mode, with prompts that end around a block's border, some twice."""
    jobs = []
    for number in range(chooser.randint(2, 5)):
        length = max(chooser.randint(1, 5) * size - chooser.randint(0, count + 1), 1)
        sampling = MODES[chooser.choice(list(MODES))]
        params = SamplingParams(
            num_tokens_to_generate=chooser.randint(10, 60),
            termination_id=-1,
            seed=number,
            num_speculative_tokens=chooser.choice([None, None, None, 0, count - 1]),
            **sampling,
        )
        known = bool(jobs) and chooser.random() < 0.4
        prompt = chooser.choice(jobs).prompt if known else periodic(chooser, length)
        jobs.append(Job(prompt, params))
    return jobs


def undrafted(job: Job) -> Job:
    """A job for an engine without drafts."""
    return Job(job.prompt, replace(job.params, num_speculative_tokens=None))


def with_stops(
    chooser: random.Random, jobs: list[Job], answers: list[list[int]]
) -> tuple[list[Job], list[list[int]]]:
    """Some of the requests end by a token of their answers, wherever in a row that comes."""
    stopping, expected = [], []
    for job, answer in zip(jobs, answers, strict=True):
        if chooser.random() < 0.3:
            stop = chooser.choice(answer)
            job = Job(job.prompt, replace(job.params, stop_token_ids=[stop]))
            answer = answer[: answer.index(stop) + 1]
        stopping.append(job)
        expected.append(answer)
    return stopping, expected


class DrawnSchedules:
    """Plays them on engines that draft, beside serial ones that do not; `seen` adds up the counters
    of all engines, and "aborted" requests."""

    def __init__(self, models: Mapping[str, AttentionModel]) -> None:
        self._models = models
        self._serials = {
            name: make_engine(model, lookahead=0, max_requests=8, device=LateDevice())
            for name, model in models.items()
        }
        self.seen: Counter[str] = Counter()

    def close(self) -> None:
        """The serial engines' end."""
        for engine in self._serials.values():
            engine.close()

    def play(
        self,
        seed: int,
        name: str,
        method: str,
        count: int,
        lookahead: int,
        watch_of: Callable[[DynamicInferenceEngine], Any] = type,
        mode: str | None = None,
        expect: Callable[[list[list[int]]], None] | None = None,
    ) -> Any:
        """Play the schedule that `seed` draws, on the model `name`, with `method` "ngram", "mtp" or
        a name in `DRAFTERS`; its tokens must be those of plain decoding. `mode` says how tokens are
        chosen (None: drawn for each request); `expect` is told all prompts with their answers.
        Returns the watch that `watch_of` made on the drafts."""
        chooser = random.Random(seed)
        size = chooser.choice([1, 3, 4, 8])
        jobs = drawn_jobs(chooser, count, size)
        if mode is not None:
            jobs = [
                Job(job.prompt, replace(job.params, **{**PLAIN, **MODES[mode]})) for job in jobs
            ]
        # Together: in float64 company changes no token, and each step serves them all.
        plain = run_at(self._serials[name], {0: [undrafted(job) for job in jobs]})
        known = [[*job.prompt, *answer] for job, answer in zip(jobs, plain, strict=True)]
        if expect is not None:
            expect(known)
        jobs, expected = with_stops(chooser, jobs, plain)
        schedule = Schedule(jobs)
        for number in range(len(jobs)):
            schedule.arrivals.setdefault(chooser.randrange(8), []).append(number)
            if chooser.random() < 0.15:
                schedule.aborts.setdefault(chooser.randrange(25), []).append(number)
        max_requests = chooser.randint(1, 4)
        settings: dict[str, Any] = {
            "max_requests": max_requests,
            "max_tokens": max_requests * (count + 1) + chooser.choice([0, 1, 9, 60]),
            "num_kv_blocks": -(-max(map(len, known)) // size) + chooser.randint(0, 4),
            "paused_buffer_size_gb": chooser.choice([None, 1e-9]),
            "enable_prefix_caching": chooser.random() < 0.7,
        }
        if method in DRAFTERS:
            settings["drafter"] = DRAFTERS[method](known, VOCABULARY)
        else:
            settings["speculative_method"] = method
        if method == "mtp":
            settings["draft_vocab_size"] = chooser.choice([None, None, 12])
        engine = make_engine(
            self._models[name], block_size_tokens=size, lookahead=lookahead,
            device=CpuDevice(Chaos(seed, 0.2, 0.001)) if seed % 3 else LateDevice(),
            num_speculative_tokens=count, **settings,
        )  # fmt: skip
        blocks = poison_blocks(engine)
        poison_states(engine)
        watch = watch_of(engine)
        try:
            found = run_schedule(engine, schedule)
            assert_all_is_back(engine)
            engine.reset_prefix_cache()
            blocks.check_free_blocks()
        finally:
            engine.close()
        for number, ((tokens, aborted), want) in enumerate(zip(found, expected, strict=True)):
            assert tokens == (want[: len(tokens)] if aborted else want), (seed, number)
        self.seen.update({name: int(value) for name, value in engine.stats().items()})
        self.seen["aborted"] += sum(aborted for _, aborted in found)
        return watch
