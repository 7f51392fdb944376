"""A load of equal requests that arrive by the step: all are prefilled, then all decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron_async.profiling.workloads import greedy

if TYPE_CHECKING:
    from megatron_async.engines.dynamic_engine import DynamicInferenceEngine
    from megatron_async.requests.inference_request import DynamicInferenceRequest


class EqualTrace:
    """Requests of equal lengths, added to an engine by the step.

    Args:
        engine: idle.
        requests: how many.
        prompt_tokens: length of each prompt; their tokens are random.
        output_tokens: that each generates, greedily.
        every: steps from one arrival to the next; 0: all arrive before the first step.
        seed: of the prompts.

    Attributes:
        ended: requests that have ended.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        requests: int,
        prompt_tokens: int,
        output_tokens: int,
        every: int,
        seed: int = 0,
    ) -> None:
        self._engine = engine
        random = np.random.default_rng(seed)
        self._prompts = random.integers(
            engine.controller.vocab_size, size=(requests, prompt_tokens), dtype=np.int32
        )
        self._params = greedy(output_tokens)
        self._every = every
        self._steps = self._added = 0
        self._to_prefill = engine.statistics.prefill_tokens + self._prompts.size
        self.ended: list[DynamicInferenceRequest] = []

    @property
    def is_prefilling(self) -> bool:
        """Whether some prompt token is not launched yet."""
        return self._engine.statistics.prefill_tokens < self._to_prefill

    def step(self) -> int:
        """The arrivals that are due, then a step.

        Returns:
            rows of the step that was launched.

        Raises:
            RuntimeError: a request failed; the message says why.
        """
        due = self._steps // self._every + 1 if self._every else len(self._prompts)
        for number in range(self._added, min(due, len(self._prompts))):
            self._engine.add_request(number, self._prompts[number], self._params)
            self._added += 1
        self._steps += 1
        rows = self._engine.statistics.rows
        for request in self._engine.step_modern()["finished_request_records"]:
            if request.error is not None:
                raise RuntimeError(f"request {request.request_id} failed: {request.error}")
            self.ended.append(request)
        return self._engine.statistics.rows - rows

    def finish(self) -> None:
        """Step until all have ended."""
        while len(self.ended) < len(self._prompts):
            self.step()
