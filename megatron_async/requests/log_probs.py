"""Log probs of one request, stored as they arrive and converted when they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async.errors import RequestError
from megatron_async.ops.sampling.slot_records import MAX_TOP_N

Words = NDArray[np.integer[Any]]
"""int32, rows of `ops.sampling.slot_records.OUT_WORDS` words."""
Alternatives = list[tuple[int, float]]
"""Token ids and log probs, likeliest first."""


class RequestLogProbs:
    """Booked log probs of a request; an eviction does not change them.

    They take 4 bytes a token, or up to 164 with alternatives.

    Args:
        top_n: alternatives at each place, 0 for none.
        prompt_length: tokens of the prompt if its log probs are wanted, else 0.
        first: the first token of the prompt whose log prob is wanted; 0 is as 1.
    """

    def __init__(self, top_n: int, prompt_length: int, first: int = 0) -> None:
        self._top_n = top_n
        self._width = 1 + MAX_TOP_N + top_n if top_n else 1
        self._booked = bytearray()
        """The first `_width` words of each generated token."""
        self._first = max(first, 1) - 1
        self.num_prompt_missing = max(prompt_length - 1 - self._first, 0)
        """Places of the prompt that no step has delivered: the last ones."""
        self._prompt = np.zeros((self.num_prompt_missing, self._width), dtype=np.int32)
        self._wants_prompt = prompt_length > 0

    def add_generated(self, words: Words) -> None:
        """Book one generated token's words, `[OUT_WORDS]`; copied."""
        self._booked += words[: self._width].tobytes()

    def add_prompt(self, first: int, words: Words) -> None:
        """Book prompt places `first` .. (place i is the prompt's token i + 1), `[places,
        OUT_WORDS]`; copied. A place that comes again, after an eviction, is written again."""
        first -= self._first
        end = first + len(words)
        self._prompt[first:end] = words[:, : self._width]
        self.num_prompt_missing = min(self.num_prompt_missing, len(self._prompt) - end)

    def state(self) -> tuple[bytes, bytes]:
        """What is booked, of generated tokens and of the prompt's, for `restore`."""
        return bytes(self._booked), self._delivered.tobytes()

    def restore(self, generated: int, booked: bytes, prompt: bytes, vocab_size: int) -> None:
        """Take what `state` gave after so many generated tokens.

        Raises:
            RequestError: it is of another length, or an alternative is no id of the vocabulary.
        """
        size = 4 * self._width
        count, rest = divmod(len(prompt), size)
        if len(booked) != generated * size or rest or count > len(self._prompt):
            raise RequestError(
                f"the log probs of a moved request are {len(booked)} and {len(prompt)} bytes, but "
                f"{generated} tokens have {generated * size}, and its prompt at most "
                f"{len(self._prompt) * size} in steps of {size}."
            )
        if self._top_n:
            for words in np.frombuffer(booked + prompt, dtype=np.int32).reshape(-1, self._width):
                wrong = [one for one, _ in self._alternatives(words) if not 0 <= one < vocab_size]
                if wrong:
                    raise RequestError(
                        f"the log probs of a moved request have an alternative with id {wrong[0]}, "
                        f"and ids of this model are 0 to {vocab_size - 1}: it is of another model."
                    )
        self._booked = bytearray(booked)
        self._prompt[:count] = np.frombuffer(prompt, dtype=np.int32).reshape(count, self._width)
        self.num_prompt_missing = len(self._prompt) - count

    def forget_prompt(self) -> None:
        """The prompt is computed again, with other weights."""
        self.num_prompt_missing = len(self._prompt)

    def generated(self) -> list[float]:
        """Log prob of each generated token."""
        return _values(self._generated)

    def prompt(self) -> list[float] | None:
        """Log prob of each prompt token from the first wanted on, but of the very first; None if
        they were not asked for."""
        return _values(self._delivered) if self._wants_prompt else None

    def generated_top_n(self) -> list[Alternatives] | None:
        """The likeliest tokens at each generated token; None if they were not asked for."""
        return [self._alternatives(words) for words in self._generated] if self._top_n else None

    def prompt_top_n(self) -> list[Alternatives] | None:
        """The likeliest tokens at each token of `prompt`; None if not asked for."""
        if not self._wants_prompt or not self._top_n:
            return None
        return [self._alternatives(words) for words in self._delivered]

    def prompt_words(self) -> tuple[int, NDArray[np.int32]] | None:
        """Alternatives at each place of the prompt, n of them, and what was delivered: int32
        `[places, 1 + 2n]`, float32 log prob of the token, ids, their float32 log probs (-inf where
        there are fewer); None if they were not asked for."""
        if not self._wants_prompt:
            return None
        ids = np.r_[: 1 + self._top_n, 1 + MAX_TOP_N : 1 + MAX_TOP_N + self._top_n]
        return self._top_n, np.ascontiguousarray(self._delivered[:, ids], dtype=np.int32)

    @property
    def _generated(self) -> Words:
        # Of a copy: a view would keep the buffer from growing.
        return np.frombuffer(bytes(self._booked), dtype=np.int32).reshape(-1, self._width)

    @property
    def _delivered(self) -> Words:
        """All places, but for a request that ended within its prompt."""
        return self._prompt[: len(self._prompt) - self.num_prompt_missing]

    def _alternatives(self, words: Words) -> Alternatives:
        ids = words[1 : 1 + self._top_n]
        values = words[1 + MAX_TOP_N :].view(np.float32)
        possible = values > -np.inf  # filters may leave fewer
        return list(zip(ids[possible].tolist(), values[possible].tolist(), strict=True))


def _values(places: Words) -> list[float]:
    """The log probs of the tokens themselves."""
    return places[:, 0].copy().view(np.float32).tolist()  # sync-ok: NumPy
