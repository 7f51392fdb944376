"""Log probs of one request, kept as they arrive and put into words when asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async.ops.slot_records import MAX_TOP_N

Words = NDArray[np.integer[Any]]
"""int32, rows of `ops.slot_records.OUT_WORDS` words."""
Alternatives = list[tuple[int, float]]
"""Token ids and log probs, likeliest first."""


class RequestLogProbs:
    """What has been booked of a request's log probs; an eviction leaves it as it is.

    Args:
        top_n: alternatives at each place, 0 for none.
        prompt_length: tokens of the prompt if its log probs are wanted, else 0.
    """

    def __init__(self, top_n: int, prompt_length: int) -> None:
        self._top_n = top_n
        self._generated: list[Words] = []
        self.num_prompt_missing = max(prompt_length - 1, 0)
        """Places of the prompt that no step has delivered."""
        self._prompt = np.zeros((self.num_prompt_missing, 1 + 2 * MAX_TOP_N), dtype=np.int32)
        self._wants_prompt = prompt_length > 0

    def add_generated(self, words: Words) -> None:
        """Book one generated token's words, `[OUT_WORDS]`; kept, not copied."""
        self._generated.append(words)

    def add_prompt(self, first: int, words: Words) -> None:
        """Book prompt places `first` .. (place i is the prompt's token i + 1), `[places,
        OUT_WORDS]`; copied. A place that comes again, after an eviction, is written again."""
        end = min(first + len(words), len(self._prompt))
        self._prompt[first:end] = words[: max(end - first, 0)]
        self.num_prompt_missing = min(self.num_prompt_missing, len(self._prompt) - end)

    def generated(self) -> list[float]:
        """Log prob of each generated token."""
        return [float(words[:1].view(np.float32)[0]) for words in self._generated]

    def prompt(self) -> list[float] | None:
        """Log prob of each prompt token but the first; None if they were not asked for."""
        if not self._wants_prompt:
            return None
        return self._delivered[:, 0].copy().view(np.float32).tolist()  # sync-ok: NumPy

    def generated_top_n(self) -> list[Alternatives] | None:
        """The likeliest tokens at each generated token; None if they were not asked for."""
        return [self._alternatives(words) for words in self._generated] if self._top_n else None

    def prompt_top_n(self) -> list[Alternatives] | None:
        """The likeliest tokens at each prompt token but the first; None if not asked for."""
        if not self._wants_prompt or not self._top_n:
            return None
        return [self._alternatives(words) for words in self._delivered]

    @property
    def _delivered(self) -> Words:
        """All places, but for a request that ended within its prompt."""
        return self._prompt[: len(self._prompt) - self.num_prompt_missing]

    def _alternatives(self, words: Words) -> Alternatives:
        ids = words[1 : 1 + self._top_n]
        values = words[1 + MAX_TOP_N : 1 + MAX_TOP_N + self._top_n].view(np.float32)
        possible = values > -np.inf  # filters may leave fewer
        return list(zip(ids[possible].tolist(), values[possible].tolist(), strict=True))
