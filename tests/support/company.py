"""Requests in random company: in the bit-stable mode each has the tokens and log probs, to the bit,
that it has alone. Everything follows from a seed, and lengths from the length of a part."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_async import DynamicInferenceEngine, DynamicInferenceRequest, SamplingParams
from tests.support.drafters import Fickle
from tests.support.harness import Job, assert_all_is_back
from tests.support.schedules import Schedule, play

MOST_TOKENS, MOST_DRAFTS = 4, 3
COUNTED = ("evictions", "prefix_cache_hits", "accepted_tokens", "overlapped_steps")
COMPARED: dict[str, Callable[[DynamicInferenceRequest], Any]] = {
    "tokens": lambda request: request.generated_tokens,
    "log probs": lambda request: request.generated_log_probs,
    "log probs of the prompt": lambda request: request.prompt_log_probs,
}


@dataclass
class Company:
    """What requests of one model say alone and in company, and what happened to them.

    Attributes:
        make: makes an engine of the model in the mode, of these settings.
        part: keys of a part of attention, to which lengths are chosen.
        vocabulary: of the model.
        drafts: what may draft: "ngram", "mtp", "fickle"; "": nothing does.
        tables: block tables of a request.
        counts: events of all schedules.
    """

    make: Callable[..., DynamicInferenceEngine]
    part: int
    vocabulary: int
    drafts: tuple[str, ...] = ("", "ngram", "fickle")
    tables: int = 1
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        chooser, part = random.Random(0), self.part
        self.make = partial(self.make, max_sequence_length=3 * part)
        text, other = ([chooser.randrange(self.vocabulary) for _ in range(3 * part)] for _ in "ab")
        self.prompts = [text[:length] for length in (2 * part + 11, part + 9, part, 1)]
        self.prompts += [other[: part + 9], (other[:7] * part)[: part + 3]]
        self._alone: dict[int, DynamicInferenceRequest] = {}
        self._serial: DynamicInferenceEngine | None = None

    def _params(self, number: int, tokens: int, **changes: Any) -> SamplingParams:
        """What a prompt is asked with, by its number: samples of every other one."""
        return SamplingParams(
            temperature=number % 2 * 0.8, seed=number, num_tokens_to_generate=tokens,
            termination_id=-1, return_log_probs=True, **changes,
        )  # fmt: skip

    def alone(self, number: int) -> DynamicInferenceRequest:
        """What an engine says to a prompt that serves nothing else, one step after the other."""
        if number not in self._alone:
            if self._serial is None:
                self._serial = self.make(lookahead=0, max_requests=1, enable_prefix_caching=False)
            params = self._params(number, MOST_TOKENS)
            [self._alone[number]] = self._serial.generate([self.prompts[number]], params)
        return self._alone[number]

    def differences(self, seed: int, jobs: int) -> list[str]:
        """Play a schedule: a line for each output that has other bits than alone."""
        schedule, numbers, stop = self._schedule(random.Random(seed), jobs)
        expected = [self.alone(number) for number in numbers]
        drafter = None
        if (drafts := schedule.config.get("speculative_method")) == "fickle":
            del schedule.config["speculative_method"]
            known = [(prompt, self.alone(n)) for n, prompt in enumerate(self.prompts)]
            answers = [[*prompt, *answer.generated_tokens] for prompt, answer in known]
            drafter = Fickle(answers, self.vocabulary)
        engine = self.make(drafter=drafter, **schedule.config)

        def suspend(engine: DynamicInferenceEngine) -> None:
            if engine.context.next_step == stop:
                engine.suspend(free_kv_cache=True)
                engine.resume()
                self.counts["suspended"] += 1

        ended = play(engine, schedule, suspend)
        assert_all_is_back(engine)
        engine.close()
        stats = engine.stats()
        self.counts.update({event: int(stats[event]) for event in COUNTED})
        self.counts[f"drafts: {drafts}"] += 1
        found = []
        for job, (request, answer) in enumerate(zip(ended, expected, strict=True)):
            for name, output in COMPARED.items():
                mine, alone = output(request) or [], output(answer)
                # An answer may be shorter, log probs of a prompt begin later; and an abort cuts.
                if name == "log probs of the prompt":
                    alone = alone[len(alone) - len(mine) :]
                    mine = [] if request.finish_reason == "aborted" else mine
                if mine != alone[: len(mine)]:
                    found.append(f"schedule {seed}, request {job}, prompt {numbers[job]}: {name}")
        return found

    def _schedule(
        self, chooser: random.Random, jobs: int
    ) -> tuple[Schedule, list[int], int | None]:
        """Jobs, the prompt of each, and the step before which the engine is suspended."""
        schedule, part = Schedule([]), self.part
        numbers = [chooser.randrange(len(self.prompts)) for _ in range(jobs)]
        for job, number in enumerate(numbers):
            tokens, prompt = chooser.randint(0, MOST_TOKENS), self.prompts[number]
            tokens += len(prompt) == 1 and not tokens  # a score of nothing
            given = {"prompt_log_probs_from": chooser.choice([0, 0, len(prompt) // 2])}
            if tokens and chooser.random() < 0.5:
                given = {"skip_prompt_log_probs": True}
            schedule.jobs.append(Job(prompt, self._params(number, tokens, **given)))
            schedule.arrivals.setdefault(chooser.choice([0, 0, 1, 3, 6]), []).append(job)
            if chooser.random() < 0.1:
                schedule.aborts.setdefault(chooser.randrange(2, 9), []).append(job)
        drafts = chooser.choice(self.drafts)
        count = chooser.randint(1, MOST_DRAFTS) if drafts else 0
        rows, block = chooser.randint(2, jobs), chooser.choice([16, 32])
        longest = max(map(len, self.prompts)) + MOST_TOKENS
        schedule.config = {
            "lookahead": chooser.randint(0, 2),
            "max_requests": rows,
            "max_tokens": rows * (1 + count) + chooser.choice([part // 2 - 3, part + 2, 5 * part]),
            "block_size_tokens": block,
            "num_kv_blocks": self.tables * -(-longest // block) + chooser.choice([0, 1, 40]),
            "paused_buffer_size_gb": chooser.choice([1e-9, None]),
            "enable_prefix_caching": chooser.random() < 0.7,
            "num_state_snapshots": 4,
            "prefix_caching_mamba_interval": part,
            "num_cuda_graphs": chooser.choice([0, 2]),
            "num_speculative_tokens": count,
            "speculative_method": drafts or None,
        }
        return schedule, numbers, chooser.choice([None, 4])
