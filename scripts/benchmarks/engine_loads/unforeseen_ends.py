"""A load in which a chosen share of the rows ends in each step, by tokens nobody can foresee.

Samples depend on seed and position alone. So the answer to a prompt is recorded once and known from
then on. A request that shall end with its n-th token gets this token as its termination id. For the
engine, the termination id is a stop token like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_async.errors import ConfigurationError
from megatron_async.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from megatron_async.engines.dynamic_engine import DynamicInferenceEngine

TEMPERATURE = 100.0
"""Every token is about as likely as any other, so the recorded one comes for the first time, and
comes again in a batch of another size, whose logits differ in their last bits."""


class UnforeseenEnds:
    """Keeps `batch` requests unfinished; whoever ends is followed by the next at once.

    Args:
        engine: idle, with room for `batch` requests of `prompt_tokens + length` tokens.
        batch: requests, hence rows of a step.
        prompt_tokens: length of each prompt.
        length: most tokens of a request; it ends there at the latest, as the engine can foresee.
        seed: of prompts and lifetimes.

    Attributes:
        ended: requests that ended so far.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        batch: int,
        prompt_tokens: int,
        length: int,
        seed: int = 0,
    ) -> None:
        self._engine = engine
        self._length = length
        self._random = np.random.default_rng(seed)
        vocabulary = engine.controller.vocab_size
        self._prompts = self._random.integers(vocabulary, size=(batch, prompt_tokens))
        self._rate = 0.0
        self._arrived = 0
        self.ended = 0
        recorded = engine.generate(
            list(self._prompts), [self._params(number, -1) for number in range(batch)]
        )
        self._recorded = [request.generated_tokens for request in recorded]

    def _params(self, number: int, termination_id: int) -> SamplingParams:
        return SamplingParams(
            temperature=TEMPERATURE,
            seed=number,
            termination_id=termination_id,
            num_tokens_to_generate=self._length,
        )

    def _lifetimes(self, count: int) -> NDArray[np.int64]:
        # Geometric: in every step each row ends with the same probability, however old it is.
        if self._rate == 0:
            return np.full(count, self._length + 1)
        return self._random.geometric(self._rate, count)

    def _add(self, count: int) -> None:
        for lifetime in self._lifetimes(count):
            number = self._arrived % len(self._prompts)
            tokens = self._recorded[number]
            termination_id = tokens[lifetime - 1] if lifetime <= len(tokens) else -1
            params = self._params(number, termination_id)
            self._engine.add_request(self._arrived, self._prompts[number], params)
            self._arrived += 1

    def start(self, rate: float) -> None:
        """Fill an idle engine.

        Args:
            rate: probability with which a row ends in a step, 0 to 1.

        Raises:
            ConfigurationError: it is no probability.
        """
        if not 0 <= rate <= 1:
            raise ConfigurationError(f"a rate of ends of {rate} must lie between 0 and 1.")
        self._rate = rate
        self._add(len(self._prompts))

    def step(self) -> None:
        """One step of the engine, and the arrivals in place of those who ended.

        Raises:
            RuntimeError: a request failed; the message says why.
        """
        self._follow(self._engine.step_modern())

    def _follow(self, report: dict[str, Any]) -> None:
        ended = report["finished_request_records"]
        for request in ended:
            if request.error is not None:
                raise RuntimeError(f"request {request.request_id} failed: {request.error}")
        self.ended += len(ended)
        self._add(len(ended))

    def stop(self) -> None:
        """Abort who is left and empty the engine."""
        for number in range(self._arrived):
            if number in self._engine.requests:
                self._engine.abort_request(number)
        while self._engine.has_unfinished_requests():
            self._engine.step_modern()
