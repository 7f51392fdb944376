"""The cases of `megatron-async check`: the same prompts, the *needles*, served in many ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_async.config import InferenceConfig
from megatron_async.lab.references import greedy_params
from megatron_async.llm import LLM
from megatron_async.requests.inference_request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
)
from megatron_async.requests.sampling_params import SamplingParams

TOP = 5
"""Likeliest tokens that are kept of each place, to judge a near tie."""
PAUSE_EVERY = 4
"""Steps between two pauses."""
MOST_GROUPS = 8
"""Most batches of a case: where needles are many, small batches serve only the first of them."""
MOST_ALONE = 64
"""Most needles that are served alone; others are compared with the first batch that has them."""
HAPPENED = {
    "paused": "pauses", "suspended": "times", "warm": "found", "evicted": "times",
    "drafts": "taken", "idle": "idle steps",
}  # fmt: skip
"""By case: what shows that it took place."""
COUNTED = {"drafts": "accepted_tokens", "idle": "dummy_steps"}
"""By case: what the engine counts of it."""


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


ALONE = Variant("alone", "alone")


def variants(
    options: Mapping[str, Any],
    needles: int,
    longest: int,
    methods: Sequence[str],
    shares_experts: bool,
    cases: Sequence[str],
) -> list[Variant]:
    """The ways that an engine allows, those with the same drafts one after the other.

    Args:
        options: of the engine.
        needles: how many. Where they are more than `MOST_ALONE`, the largest batch is served first
            in any case.
        longest: tokens of the longest.
        methods: of drafting, which the model has.
        shares_experts: whether replicas step together.
        cases: names; those of other cases are left out.
    """
    most, few = options["max_requests"], min(options["max_requests"], 2 * needles)
    sizes = [1 << power for power in range(1, most.bit_length())]
    budgets = sorted({few + max(longest // part, 1) for part in (2, 5, 16)}, reverse=True)
    own = options["lookahead"]
    found = [
        *(Variant("batch", f"batch {size}", size) for size in sizes),
        Variant("order", "another order", few, order=1),
        *(Variant("chunks", f"steps of {size}", few, budget=size) for size in budgets),
        *(Variant("lookahead", f"lookahead {n}", few, lookahead=n) for n in range(3) if n != own),
        Variant("paused", "paused", few),
        Variant("suspended", "suspended", few),
        Variant("evicted", "evicted", min(most, needles + 1)),
        *(Variant("drafts", f"drafts: {method}", few, method=method) for method in methods),
    ]
    if InferenceConfig(**options).enable_prefix_caching:
        found.insert(len(sizes), Variant("warm", "warm", few))
    if shares_experts:
        found.insert(len(sizes), Variant("idle", "others idle", few))
    found = [variant for variant in found if variant.case in cases]
    if needles > MOST_ALONE:
        first = Variant("batch", f"batch {max([1, *sizes])}", max([1, *sizes]))
        found = [first, *(variant for variant in found if variant != first)]
    return found


class NeedleServer:
    """Serves the needles by one `LLM`. On several ranks each makes the same calls.

    Args:
        llm: idle, with room for `max_requests` of the longest needle's length. Its buffers are made
            for the largest lookahead and budget of a step.
        needles: prompts, token ids.
        tokens: to generate for each.
        seed: of the company.
        lookahead: of variants that name none.
        on_step: called after each step with the engine's report.
    """

    def __init__(
        self,
        llm: LLM,
        needles: Sequence[list[int]],
        tokens: int,
        seed: int,
        lookahead: int,
        on_step: Callable[[dict[str, Any]], None],
    ) -> None:
        self.llm, self.needles, self.tokens = llm, needles, tokens
        self._seed, self._on_step = seed + 1000 * llm.data_parallel_rank, on_step
        self._lookahead, self._budget = lookahead, llm.engine.context.config.max_tokens
        self._count = 0

    def serve(self, variant: Variant, only: int | None = None) -> tuple[list[Answer], str]:
        """The answers of all needles that `MOST_GROUPS` batches have (alone: `MOST_ALONE`), or
        those of the group with `only` (on a rank that is not primary none); and what shows that the
        case took place, in words."""
        engine, self._count = self.llm.engine, 0
        context = engine.context
        context.config.max_tokens = variant.budget or self._budget
        context.scheduler.prefill_limit = context.config.max_tokens
        given = self._lookahead if variant.lookahead is None else variant.lookahead
        engine.loop.lookahead = given
        counter = COUNTED.get(variant.case, "")
        before = engine.stats().get(counter, 0)
        company = 1 if variant.case == "evicted" else variant.batch - variant.batch // 2
        size = max(variant.batch - company, 1)
        answers = []
        end = MOST_ALONE if variant == ALONE else MOST_GROUPS * size
        for first in range(0, len(self.needles), size):
            group = range(first, min(first + size, len(self.needles)))
            if first < end if only is None else only in group:
                answers += self._serve_group(variant, group)
        self._count += int(engine.stats().get(counter, 0) - before)
        name = HAPPENED.get(variant.case, "")
        return answers, name and (f"{self._count} {name}" if self._count else "untested")

    def _serve_group(self, variant: Variant, group: Sequence[int]) -> list[Answer]:
        draws = np.random.default_rng((self._seed, group[0], variant.batch))
        mine = greedy_params(self.tokens)
        mine.return_log_probs, mine.top_n_logprobs = True, TOP
        # Log probs of a prompt's tokens are computed, not found.
        mine.skip_prompt_log_probs = variant.case == "warm"
        if variant.method is None:
            mine.num_speculative_tokens = 0
        prompts, params = [self.needles[n] for n in group], [mine] * len(group)
        longest, vocabulary = max(map(len, prompts)), self.llm.engine.controller.vocab_size
        for number in range(variant.batch - len(group)):
            # Lengths of all magnitudes: most company is short, and costs little.
            length = int(np.exp(draws.uniform(0, np.log(longest + 1))))
            count = int(draws.integers(1, 2 * self.tokens))
            prompts.append(draws.integers(vocabulary, size=length).tolist())
            params.append(SamplingParams(
                temperature=1.0, seed=number, num_tokens_to_generate=count, termination_id=-1,
            ))  # fmt: skip
        order = np.random.default_rng((self._seed, variant.order)).permutation(len(prompts))
        if self.llm.is_primary_rank:
            self.llm.engine.reset_prefix_cache()
            self.llm.engine.group.release()
        else:  # all ranks forget before any of them goes on
            self.llm.engine.follow()
        turns, blocks = 1, self.llm.engine.context.blocks
        held = blocks.allocate(0)
        if variant.case == "evicted":
            # Those that come last are evicted first: the company, which is first, makes it.
            order = np.arange(len(prompts))[::-1]
            held = blocks.allocate(max(blocks.allocatable - self._room(prompts), 0))
        if variant.case == "warm":  # halves of the prompts are found first, then all of them
            halves = [self.needles[n][: len(self.needles[n]) // 2] or [0] for n in group]
            self._generate(halves, [greedy_params(1)] * len(halves), "")
            turns = 2
        if variant.case == "idle":
            turns = self.llm.data_parallel_size
        answers = []
        for turn in range(turns):
            is_idle = variant.case == "idle" and turn != self.llm.data_parallel_rank
            served = order[: 0 if is_idle else None]
            found = self._generate(
                [prompts[n] for n in served], [params[n] for n in served], variant.case
            )
            answers += [
                self._answer(group[place], request, variant.case)
                for place, request in zip(order, found)  # none on other ranks
                if place < len(group)
            ]
        blocks.release(held)
        return answers

    def _room(self, prompts: Sequence[list[int]]) -> int:
        """Blocks for each prompt and its first token, so that an answer which needs another block
        has somebody evicted; or for all of the longest, which then ends in any case."""
        size = self.llm.engine.context.config.block_size_tokens
        least = (max(map(len, prompts)) + 2 * self.tokens) // size + 2
        return max(least, sum(len(each) // size + 1 for each in prompts))

    def _answer(self, needle: int, request: DynamicInferenceRequest, case: str) -> Answer:
        if request.error is not None:
            raise request.error
        assert request.log_probs is not None, "they were asked for"
        if case == "warm":
            self._count += request.num_cached_tokens or 0
        if case == "evicted":
            events = [event.type for event in request.events]
            self._count += events.count(DynamicInferenceEventType.EVICT)
        top = request.log_probs.generated_top_n() or []
        prompt, log_probs = request.prompt_log_probs, request.generated_log_probs or []
        return Answer(needle, list(request.generated_tokens), log_probs, prompt, top)

    def _generate(
        self, prompts: list[list[int]], params: list[SamplingParams], case: str
    ) -> list[DynamicInferenceRequest]:
        engine = self.llm.engine
        if not self.llm.is_primary_rank:
            engine.follow()
            return []
        # Replicas that share experts pause together: at no step that one of them chooses.
        pauses = case == "paused" and not self.llm.shares_experts
        # Once a case: a GPU captures its graphs again.
        may_suspend = case == "suspended" and not self.llm.shares_experts

        def on_step(report: dict[str, Any]) -> None:
            if pauses and engine.statistics.steps % PAUSE_EVERY == 0:
                self._count += 1
                engine.pause()
                engine.unpause()
            if may_suspend and not self._count and engine.statistics.steps % PAUSE_EVERY == 0:
                self._count += 1
                engine.suspend(free_kv_cache=True)
                engine.resume()
            self._on_step(report)

        try:
            return engine.generate(prompts, params, on_step)
        finally:
            engine.group.release()
