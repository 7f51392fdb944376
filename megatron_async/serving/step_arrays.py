"""`StepArrays`: a `StepTokens` as NumPy arrays, checked, and divided by rows without a loop over
tokens.

msgpack has no types for arrays, so they are sent as bytes, little-endian like all supported
machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_async.ops.sampling.slot_records import MAX_TOP_N
from megatron_async.serving.messages import LogProbRows, StepTokens


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The arrays of a `StepTokens`.

    Attributes:
        numbers: int64 `[rows]`.
        counts: int32 `[rows]`, 0 or more.
        tokens: int32 `[sum of counts]`.
        asking: int32 `[asking]`, rising: rows with log probs; None where no row has any.
        words: int32 `[tokens of these rows, 1 + 2 * top_n]`; see `LogProbRows`.
    """

    of_message: StepTokens
    numbers: NDArray[np.int64]
    counts: NDArray[np.int32]
    tokens: NDArray[np.int32]
    asking: NDArray[np.int32] | None = None
    words: NDArray[np.int32] | None = None
    top_n: int = 0

    @classmethod
    def of(cls, message: StepTokens) -> StepArrays:
        """The arrays of a message.

        Raises:
            ValueError: they do not fit together.
        """
        message = by_row(message)
        numbers = np.frombuffer(message.numbers, np.int64)
        counts = np.frombuffer(message.counts, np.int32)
        tokens = np.frombuffer(message.tokens, np.int32)
        fits = len(numbers) == len(counts) and _total(counts) == len(tokens)
        if message.log_probs is None:
            if not fits:
                raise ValueError("numbers, counts and tokens do not fit together")
            return cls(message, numbers, counts, tokens)
        given = message.log_probs
        asking = np.frombuffer(given.rows, np.int32)
        fits = fits and 0 <= given.top_n <= MAX_TOP_N
        if fits and len(asking):
            fits = bool(asking[0] >= 0 and asking[-1] < len(counts))
            fits = fits and bool((np.diff(asking) > 0).all())
        if not fits:
            raise ValueError("numbers, counts, tokens and log probs do not fit together")
        words = np.frombuffer(given.words, np.int32).reshape(_total(counts[asking]), -1)
        if words.shape[1] != 1 + 2 * given.top_n:
            raise ValueError("the log probs are of another shape than they say")
        return cls(message, numbers, counts, tokens, asking, words, given.top_n)

    def renamed(self, numbers: NDArray[np.int64]) -> StepTokens:
        """A message of all rows: no more than the numbers differ. `numbers`, int64 `[rows]`, are
        what the requests are called in it."""
        of = self.of_message
        return StepTokens(numbers.tobytes(), of.counts, of.tokens, of.log_probs)

    def message(self, kept: NDArray[np.bool_], numbers: NDArray[np.int64]) -> StepTokens:
        """A message of some rows. `kept` is bool `[rows]`; `numbers`, int64 `[rows]`, are what the
        requests are called in it."""
        counts = self.counts[kept]
        if _total(counts) == len(counts) == np.count_nonzero(kept) == len(self.tokens):
            tokens = self.tokens
        else:
            tokens = self.tokens[np.repeat(kept, self.counts)]
        return StepTokens(
            numbers[kept].tobytes(), counts.tobytes(), tokens.tobytes(), self._log_probs(kept)
        )

    def _log_probs(self, kept: NDArray[np.bool_]) -> LogProbRows | None:
        """The log probs of the rows that are kept, whose numbers change by that."""
        if self.asking is None or self.words is None:
            return None
        wanted = kept[self.asking]
        if not np.count_nonzero(wanted):
            return None
        places = np.cumsum(kept, dtype=np.int32) - 1
        rows = places[self.asking[wanted]].astype(np.int32)
        words = self.words[np.repeat(wanted, self.counts[self.asking])]
        return LogProbRows(rows.tobytes(), self.top_n, words.tobytes())

    def first_words(self) -> Sequence[int]:
        """Where the words of each row begin, `[rows]`; -1 for those that did not ask."""
        firsts = np.full(len(self.counts), -1, dtype=np.int64)
        if self.asking is not None:
            counts = self.counts[self.asking]
            firsts[self.asking] = np.cumsum(counts) - counts
        return firsts.tolist()


def by_row(message: StepTokens) -> StepTokens:
    """A message with the tokens row by row: its reader pays for each row.

    Raises:
        ValueError: its arrays do not fit together.
    """
    if not message.steps:
        return message
    numbers, steps = message.numbers, message.steps
    rows = len(numbers) // 8
    if not rows or len(numbers) != 8 * rows or len(message.tokens) != 4 * rows * steps:
        raise ValueError("numbers, steps and tokens do not fit together")
    tokens = np.frombuffer(message.tokens, np.int32).reshape(steps, rows).T.tobytes()
    counts = steps.to_bytes(4, "little") * rows
    return StepTokens(numbers, counts, tokens, None, message.texts, message.ends)


def _total(counts: NDArray[np.int32]) -> int:
    """Sum of counts, -1 if one of them is below 0."""
    if not len(counts):
        return 0
    return int(counts.sum(dtype=np.int64)) if counts.min() >= 0 else -1
