"""The cases of `megatron-async check`: the same prompts, the *needles*, served in many ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_async.config import InferenceConfig
from megatron_async.lab.references import greedy_params
from megatron_async.llm import LLM
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.sampling_params import SamplingParams

TOP = 5
"""Likeliest tokens that are kept of each place, to judge a near tie."""
PAUSE_EVERY = 4
"""Steps between two pauses."""
HAPPENED = {
    "evicted": ("evictions", "evictions"),
    "paused": ("engine_pauses", "pauses"),
    "warm": ("prefix_cache_hits", "tokens found"),
    "drafts": ("accepted_tokens", "drafts taken"),
}
"""By case: the entry of `engine.stats()` that shows whether it happened, and its name."""


@dataclass(frozen=True)
class Variant:
    """One way to serve the needles; what is not said is as when they are served alone.

    Attributes:
        case: its name in `--cases`.
        label: in the table.
        batch: requests at once, company included.
        order: of the requests in the batch, a seed.
        lookahead: None: the engine's own.
        budget: tokens of a step; None: the engine's own.
        method: where drafts come from; None: there are none.
    """

    case: str
    label: str
    batch: int = 1
    order: int = 0
    lookahead: int | None = None
    budget: int | None = None
    method: str | None = None


@dataclass(frozen=True)
class Answer:
    """What a needle was answered: tokens, their log probs, those of the prompt's tokens (None where
    they were not asked for), and the likeliest tokens at each place with their log probs."""

    needle: int
    tokens: list[int]
    log_probs: list[float]
    prompt: list[float] | None
    likeliest: list[list[tuple[int, float]]]

    @classmethod
    def of(cls, needle: int, request: DynamicInferenceRequest) -> Answer:
        """The answer of an ended request; a failed one raises its error."""
        if request.error is not None:
            raise request.error
        assert request.log_probs is not None, "they were asked for"
        top = request.log_probs.generated_top_n() or []
        prompt, log_probs = request.prompt_log_probs, request.generated_log_probs or []
        return cls(needle, list(request.generated_tokens), log_probs, prompt, top)


ALONE = Variant("alone", "alone")


def variants(
    options: Mapping[str, Any], longest: int, methods: Sequence[str], cases: Sequence[str]
) -> list[Variant]:
    """The ways that an engine allows, those with the same drafts one after the other.

    Args:
        options: of the engine.
        longest: tokens of the longest needle.
        methods: of drafting, which the model has.
        cases: names; those of other cases are left out.
    """
    most, few = options["max_requests"], min(options["max_requests"], 8)
    sizes = [1 << power for power in range(1, most.bit_length())]
    budgets = sorted({few + max(longest // part, 1) for part in (2, 5, 16)}, reverse=True)
    own = options["lookahead"]
    found = [
        *(Variant("batch", f"batch {size}", size) for size in sizes),
        Variant("order", "another order", few, order=1),
        *(Variant("chunks", f"steps of {size}", few, budget=size) for size in budgets),
        *(Variant("lookahead", f"lookahead {n}", few, lookahead=n) for n in range(3) if n != own),
        Variant("paused", "paused", few),
        Variant("evicted", "evicted", few),
        *(Variant("drafts", f"drafts: {method}", few, method=method) for method in methods),
    ]
    if InferenceConfig(**options).enable_prefix_caching:
        found.insert(len(sizes), Variant("warm", "warm", few))
    return [variant for variant in found if variant.case in cases]


class NeedleServer:
    """Serves the needles by one `LLM`. On several ranks each makes the same calls.

    Args:
        llm: idle, with room for `max_requests` of the longest needle's length.
        needles: prompts, token ids.
        tokens: to generate for each.
        seed: of the company.
        lookahead: of variants that name none; the engine is made for the largest.
        on_step: called after each step with the engine's report.
    """

    def __init__(
        self,
        llm: LLM,
        needles: Sequence[list[int]],
        tokens: int,
        seed: int,
        lookahead: int,
        on_step: Callable[[dict[str, Any]], None] = lambda report: None,
    ) -> None:
        self.llm, self.needles, self.tokens = llm, needles, tokens
        self._seed, self._on_step = seed + 1000 * llm.data_parallel_rank, on_step
        self._lookahead, self._steps, self._served = lookahead, 0, ALONE
        self._before: dict[str, int] = {}

    def serve(self, variant: Variant, only: int | None = None) -> list[Answer]:
        """The answers of all needles, or those of the group that has `only`; on a rank that is not
        primary none."""
        stats, self._served = self.llm.engine.stats(), variant
        self._before = {key: int(stats[key]) for key, _ in HAPPENED.values() if key in stats}
        count = len(self.needles) if variant.batch > 1 else 1
        size = min(count, max(variant.batch // 2, 1))
        answers = []
        with self._set(variant):
            for first in range(0, len(self.needles), size):
                group = range(first, min(first + size, len(self.needles)))
                if only is None or only in group:
                    answers += self._serve_group(variant, group)
        return answers

    def happened(self) -> str:
        """What shows that the case served last took place, in words; "" where nothing need."""
        key, name = HAPPENED.get(self._served.case, ("", ""))
        if not key:
            return ""
        count = int(self.llm.engine.stats().get(key, 0)) - self._before.get(key, 0)
        return f"{count} {name}" if count else f"no {name}: not tested"

    @contextmanager
    def _set(self, variant: Variant) -> Iterator[None]:
        """The settings of a variant, on an idle engine, whose buffers are made for all of them."""
        engine = self.llm.engine
        config, own = engine.context.config, engine.context.config.max_tokens
        given = self._lookahead if variant.lookahead is None else variant.lookahead
        config.max_tokens, engine.loop.lookahead = variant.budget or own, given
        engine.context.scheduler.prefill_limit = config.max_tokens
        try:
            yield
        finally:
            config.max_tokens = engine.context.scheduler.prefill_limit = own
            engine.loop.lookahead = self._lookahead

    def _serve_group(self, variant: Variant, group: Sequence[int]) -> list[Answer]:
        draws = np.random.default_rng((self._seed, group[0], variant.batch))
        prompts, params = [self.needles[n] for n in group], [self._params(variant)] * len(group)
        longest, vocabulary = max(map(len, prompts)), self.llm.engine.controller.vocab_size
        for number in range(variant.batch - len(group)):
            length = int(draws.integers(1, longest + 1))
            prompts.append(draws.integers(vocabulary, size=length).tolist())
            count = int(draws.integers(1, 2 * self.tokens + 1))
            params.append(SamplingParams(
                temperature=1.0, seed=number, num_tokens_to_generate=count, termination_id=-1,
            ))  # fmt: skip
        order = np.random.default_rng((self._seed, variant.order)).permutation(len(prompts))
        self._forget()
        times = 1
        if variant.case == "warm":  # halves of the prompts are found first, then all of them
            halves = [self.needles[n][: len(self.needles[n]) // 2] or [0] for n in group]
            self._generate(halves, [greedy_params(1)] * len(halves), None)
            times = 2
        answers = []
        with self._small_pool(prompts, params, variant):
            for _ in range(times):
                found = self._generate(
                    [prompts[n] for n in order], [params[n] for n in order], variant
                )
                for place, request in zip(order, found):  # none on other ranks
                    if place < len(group):
                        answers.append(Answer.of(group[place], request))
        return answers

    def _params(self, variant: Variant) -> SamplingParams:
        params = greedy_params(self.tokens)
        params.return_log_probs, params.top_n_logprobs = True, TOP
        # Log probs of a prompt's tokens are computed, not found.
        params.skip_prompt_log_probs = variant.case == "warm"
        if variant.method is None:
            params.num_speculative_tokens = 0
        return params

    def _generate(
        self, prompts: list[list[int]], params: list[SamplingParams], variant: Variant | None
    ) -> list[DynamicInferenceRequest]:
        engine, self._steps = self.llm.engine, 0
        if not self.llm.is_primary_rank:
            engine.follow()
            return []

        def on_step(report: dict[str, Any]) -> None:
            self._steps += 1
            if variant is not None and variant.case == "paused" and not self._steps % PAUSE_EVERY:
                engine.pause()
                engine.unpause()
            self._on_step(report)

        try:
            return engine.generate(prompts, params, on_step)
        finally:
            engine.group.release()

    def _forget(self) -> None:
        """Empty the prefix cache, on all ranks before any of them goes on."""
        if self.llm.is_primary_rank:
            self.llm.engine.reset_prefix_cache()
            self.llm.engine.group.release()
        else:
            self.llm.engine.follow()

    @contextmanager
    def _small_pool(
        self, prompts: list[list[int]], params: list[SamplingParams], variant: Variant
    ) -> Iterator[None]:
        """Of an eviction: all but so few blocks are taken that the prompts have room, and their
        answers have none."""
        context = self.llm.engine.context
        size, blocks = context.config.block_size_tokens, context.blocks
        lengths = [len(prompt) for prompt in prompts]
        whole = [n + (p.num_tokens_to_generate or 0) for n, p in zip(lengths, params, strict=True)]
        least = -(-max(whole) // size) + 1  # one request alone always ends
        room = max(least, sum(-(-length // size) for length in lengths))
        taken = blocks.allocatable - room if variant.case == "evicted" else 0
        held = blocks.allocate(max(taken, 0))
        try:
            yield
        finally:
            blocks.release(held)
