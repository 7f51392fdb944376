"""Loads that benchmarks put on an engine: steady decode, and churn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_async.errors import ConfigurationError
from megatron_async.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from megatron_async.engine.dynamic_engine import DynamicInferenceEngine

FIRST_DECODE_STEPS = 8
"""Steps in which every request decodes, before steady decode is measured."""


def greedy(num_tokens: int) -> SamplingParams:
    """Exactly `num_tokens` greedy tokens."""
    return SamplingParams(temperature=0.0, num_tokens_to_generate=num_tokens, termination_id=-1)


def prefill_steps(batch: int, prompt_tokens: int, max_tokens: int) -> int:
    """Steps in which `batch` prompts are prefilled at most, when all arrive at once."""
    return -(-batch * prompt_tokens // max(max_tokens - batch, 1)) + 1


def steady_decode_tokens(batch: int, prompt_tokens: int, max_tokens: int, steps: int) -> int:
    """Tokens that each request must be allowed so that all still decode after `steps` measured
    steps; with the prompt, a sequence's length."""
    return steps + prefill_steps(batch, prompt_tokens, max_tokens) + FIRST_DECODE_STEPS + 8


def start_steady_decode(
    engine: DynamicInferenceEngine,
    batch: int,
    prompt_tokens: int,
    steps: int,
    seed: int = 0,
    sampling: SamplingParams | Callable[[int], SamplingParams] | None = None,
) -> None:
    """Fill an idle engine with random prompts and step until all of them decode.

    Args:
        engine: with room for `batch` requests.
        batch: requests.
        prompt_tokens: length of each prompt.
        steps: that will be run in steady decode.
        seed: of the prompts.
        sampling: how tokens are chosen, for so many steps as it takes; by the request's number, or
            the same for all; None: greedily.

    Raises:
        RuntimeError: a request ended early; its error says why.
    """
    prompts = np.random.default_rng(seed)
    vocabulary = engine.controller.vocab_size
    length = steady_decode_tokens(batch, prompt_tokens, engine.context.max_tokens, steps)
    wanted = engine.statistics.generated_tokens + 2 * batch
    for request in range(batch):
        params = greedy(length)
        if sampling is not None:
            params = (sampling(request) if callable(sampling) else sampling).copy()
            params.num_tokens_to_generate, params.termination_id = length, -1
        engine.add_request(request, prompts.integers(vocabulary, size=prompt_tokens), params)
    while engine.statistics.generated_tokens < wanted or len(engine.context.waiting):
        _check_none_ended(engine.step_modern())
    for _ in range(FIRST_DECODE_STEPS):
        _check_none_ended(engine.step_modern())


class Churn:
    """Requests that end and arrive every step, the batch staying as large as it is.

    Before each step `finishes` requests arrive. Each lives for `batch / finishes` steps (one
    prefills its prompt and samples its first token, the others decode), so that from step
    `batch / finishes` on exactly as many end in each step, and each step has `batch` rows. Where
    `finishes` does not divide `batch`, some of a step's arrivals live a step longer than others.

    Args:
        engine: idle; it needs `slots` slots and a token budget of `step_tokens`.
        batch: rows of a step.
        prompt_tokens: length of each prompt.
        finishes: requests that end, and that arrive, each step.
        seed: of the prompts.

    Attributes:
        arrived, ended: requests so far.

    Raises:
        ConfigurationError: such a batch cannot be.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        batch: int,
        prompt_tokens: int,
        finishes: int,
        seed: int = 0,
    ) -> None:
        self._engine = engine
        self._prompts = np.random.default_rng(seed)
        self._prompt_tokens = prompt_tokens
        self._lifetimes = self.lifetimes(batch, finishes)
        self._params = [greedy(length) for length in self._lifetimes]
        self._is_steady = False
        self.arrived = 0
        self.ended = 0

    @staticmethod
    def lifetimes(batch: int, finishes: int) -> list[int]:
        """Steps that each of a step's arrivals lives, which is also the tokens it generates."""
        if not 1 <= finishes <= batch:
            raise ConfigurationError(
                f"finishes={finishes} must lie between 1 and the batch size {batch}: "
                "a batch of so many rows has no more requests to end."
            )
        return [batch // finishes + (lane < batch % finishes) for lane in range(finishes)]

    @staticmethod
    def slots(batch: int, finishes: int, lookahead: int) -> int:
        """Slots that an engine needs: an ended request keeps its own until its last step is
        resolved, `lookahead` steps after its successor arrived."""
        return batch + finishes * lookahead

    @staticmethod
    def step_tokens(batch: int, prompt_tokens: int, finishes: int) -> int:
        """Tokens of a step: decode rows, and the prompts of the step's arrivals."""
        return batch - finishes + finishes * prompt_tokens

    def before_step(self) -> None:
        """The step's arrivals."""
        vocabulary = self._engine.controller.vocab_size
        for params in self._params:
            prompt = self._prompts.integers(vocabulary, size=self._prompt_tokens)
            self._engine.add_request(self.arrived, prompt, params)
            self.arrived += 1

    def after_step(self, report: dict[str, Any]) -> None:
        """Count the requests that ended, and hold the load to its word once it is steady.

        Raises:
            RuntimeError: another number than `finishes` ended, or one of them failed.
        """
        ended = report["finished_request_records"]
        for request in ended:
            if request.error is not None:
                raise RuntimeError(f"request {request.request_id} failed: {request.error}")
        self.ended += len(ended)
        if self._is_steady and len(ended) != len(self._params):
            raise RuntimeError(
                f"{len(ended)} requests ended in a step where {len(self._params)} were due: the "
                "engine has too few slots, KV blocks or tokens a step for this load."
            )

    def ramp_up(self) -> None:
        """From an empty engine to the first steps in which as many requests end as arrive."""
        for _ in range(max(self._lifetimes) + self._engine.lookahead + FIRST_DECODE_STEPS):
            self.before_step()
            self.after_step(self._engine.step_modern())
        self._is_steady = True

    def drain(self) -> None:
        """Let the requests run to their ends; none arrive."""
        self._is_steady = False
        while self._engine.has_unfinished_requests():
            self.after_step(self._engine.step_modern())


def _check_none_ended(report: dict[str, Any]) -> None:
    for request in report["finished_request_records"]:
        raise RuntimeError(
            f"request {request.request_id} ended before steady decode: "
            f"{request.error or request.finish_reason}"
        )
