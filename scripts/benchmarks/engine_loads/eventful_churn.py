"""A load in which everything happens at once: arrivals, aborts, stop words, pauses, evictions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_async.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from megatron_async.engine.dynamic_engine import DynamicInferenceEngine

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
STOP_WORD = "qx"
"""Ends one generated token in 676, where letters are equally likely."""


class LetterTokenizer:
    """A letter for every token, so that dummy models have text in which stop words are found."""

    eod = None

    def tokenize(self, text: str) -> list[int]:
        """One token a letter."""
        return [LETTERS.index(letter) for letter in text]

    def detokenize(self, ids: list[int]) -> str:
        """One letter a token."""
        return "".join(LETTERS[token % len(LETTERS)] for token in ids)

    def token_bytes(self, num_tokens: int) -> list[bytes]:
        """The letter of each token."""
        return [LETTERS[token % len(LETTERS)].encode() for token in range(num_tokens)]


class EventfulChurn:
    """Random requests that keep an engine full and short of memory, and counts of what became of
    them.

    Every request has a stop word, a prompt of half to one and a half `prompt_tokens`, and a limit
    drawn likewise. Before each step the waiting line is filled up, and with probability
    `abort_rate` a random unfinished request is aborted. Give the engine (idle, with a tokenizer)
    fewer KV blocks than the requests want, and they pause and are evicted.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        prompt_tokens: int,
        num_tokens: int,
        abort_rate: float,
        seed: int = 0,
    ) -> None:
        self._engine = engine
        self._random = np.random.default_rng(seed)
        self._means = prompt_tokens, num_tokens
        self._abort_rate = abort_rate
        self._unfinished: dict[int, None] = {}
        self.arrived = self.ended = self.stopped = self.aborted = 0

    def before_step(self) -> None:
        """Arrivals, and perhaps an abort."""
        while len(self._engine.context.waiting) < 2:
            self._add()
        if self._random.random() < self._abort_rate:
            numbers = list(self._unfinished)
            self._engine.abort_request(numbers[self._random.integers(len(numbers))])
            self.aborted += 1

    def after_step(self, report: dict[str, Any]) -> None:
        """Count the requests that ended; a RuntimeError if one failed otherwise than by its
        abort."""
        for request in report["finished_request_records"]:
            del self._unfinished[request.request_id]
            if request.error is not None and request.finish_reason != "aborted":
                raise RuntimeError(f"request {request.request_id} failed: {request.error}")
            self.ended += 1
            self.stopped += request.finish_reason == "stop_word"

    def _add(self) -> None:
        prompt_tokens, num_tokens = (
            int(self._random.integers(mean // 2, mean * 3 // 2 + 1)) for mean in self._means
        )
        prompt = self._random.integers(self._engine.controller.vocab_size, size=prompt_tokens)
        params = SamplingParams(
            seed=self.arrived,
            num_tokens_to_generate=num_tokens,
            termination_id=-1,
            stop_words=[STOP_WORD],
        )
        self._engine.add_request(self.arrived, prompt, params)
        self._unfinished[self.arrived] = None
        self.arrived += 1
