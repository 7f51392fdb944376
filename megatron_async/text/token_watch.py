"""`TokenWatch`: which sampled tokens Python code must check, for all rows of a step at once.

A token can complete a stop word only if it contains the word, or begins with a suffix of the word.
Few tokens do. So a table by token id, one row for each set of stop words, excludes nearly all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from megatron_async.text.detokenize import REPLACEMENT
from megatron_async.text.stop_words import ByteMatcher, StopWordMatcher, StopWords

NOTHING, EVERYTHING = 0, 1
"""Rows of the table for requests of which no token, and every token, is looked at."""
MOST_SETS = 64
"""Sets of stop words in the table; further ones have every token looked at."""


class TokenWatch:
    """Finds the rows of a step whose newest token can complete a stop word. Stop words are cheap if
    the engine's tokenizer tells `token_bytes`."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._was_asked = False
        # Lazily paged in by the system.
        self._table = np.zeros((2 + MOST_SETS, vocab_size), dtype=np.bool_)
        self._table[EVERYTHING] = True
        self._flat = self._table.reshape(-1)
        self._row_of: dict[tuple[str, ...], int] = {}
        """Sets of stop words, the least recently asked for first."""
        self._users: dict[int, WeakSet[ByteMatcher]] = {}
        """Row -> the unfinished requests' matchers, while which it stays as it is."""

    def is_watched(
        self, rows: NDArray[np.integer[Any]], tokens: NDArray[np.integer[Any]]
    ) -> NDArray[np.bool_]:
        """Which tokens are to be looked at, bool `[n]`, by rows of the table and tokens, int32
        `[n]` each."""
        found: NDArray[np.bool_] = self._flat.take(rows * self._vocab_size + tokens, mode="clip")
        return found

    def stop_words(
        self, words: Sequence[str], detokenize: Callable[[list[int]], str]
    ) -> tuple[StopWords, int]:
        """A matcher for one request's words, none of them empty, and the row of the table that says
        when to ask it. The first call takes a moment: all tokens are read."""
        vocabulary = self._read()
        encoded = _encoded(words)
        if vocabulary is None or encoded is None:
            return StopWordMatcher(words, detokenize), EVERYTHING
        matcher = ByteMatcher(encoded, vocabulary.pieces, detokenize)
        row = self._row(tuple(words), encoded, vocabulary)
        if row != EVERYTHING:
            self._users[row].add(matcher)
        return matcher, row

    def _read(self) -> Vocabulary | None:
        if not self._was_asked:
            tell = getattr(self._tokenizer, "token_bytes", None)
            pieces = None if tell is None else tell(self._vocab_size)
            self._vocabulary = None if pieces is None else Vocabulary(pieces)
            self._was_asked = True
        return self._vocabulary

    def _row(self, words: tuple[str, ...], encoded: list[bytes], vocabulary: Vocabulary) -> int:
        row = self._row_of.pop(words, None)
        if row is None:
            row = self._new_row()
            if row == EVERYTHING:
                return row
            self._table[row] = False
            for word in encoded:
                self._table[row, vocabulary.completing(word)] = True
        self._row_of[words] = row
        return row

    def _new_row(self) -> int:
        """An unused row: a new one, or the row of a set without requests."""
        if len(self._row_of) < MOST_SETS:
            row = 2 + len(self._row_of)
            self._users[row] = WeakSet()
            return row
        for words, row in self._row_of.items():
            if not self._users[row]:
                del self._row_of[words]
                return row
        return EVERYTHING


class Vocabulary:
    """The bytes of all tokens, by id, ready to be searched."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        order = sorted(range(len(pieces)), key=pieces.__getitem__)
        self._sorted = [pieces[token] for token in order]
        self._tokens = np.array(order, dtype=np.int64)
        self._longest = max(map(len, self._sorted), default=0)
        self._ends = np.array(list(accumulate(map(len, self._sorted))), dtype=np.int64)
        self._bytes = np.frombuffer(b"".join(self._sorted), dtype=np.uint8)

    def completing(self, word: bytes) -> NDArray[np.int64]:
        """Ids of the tokens with which a text can begin to contain `word`: they contain it, or
        begin with an end of it."""
        found = [self._containing(word)] if len(word) <= self._longest else []
        for length in range(1, min(len(word), self._longest + 1)):
            end = word[-length:]
            first = bisect_left(self._sorted, end)
            # No byte string that begins with `end` is behind this one, in a vocabulary.
            last = bisect_left(self._sorted, end + b"\xff" * 256, lo=first)
            found.append(self._tokens[first:last])
        return np.concatenate(found) if found else self._tokens[:0]

    def _containing(self, word: bytes) -> NDArray[np.int64]:
        count = max(len(self._bytes) - len(word) + 1, 0)
        places = np.flatnonzero(self._bytes[:count] == word[0])
        for offset, byte in enumerate(word[1:], 1):
            places = places[self._bytes[places + offset] == byte]
        tokens = np.searchsorted(self._ends, places, side="right")
        within = places + len(word) <= self._ends[tokens]
        return self._tokens[tokens[within]]


def _encoded(words: Sequence[str]) -> list[bytes] | None:
    """The words' bytes; None if one is not found by its bytes: a text has U+FFFD for bytes that are
    no character, and never half of a surrogate pair."""
    if any(REPLACEMENT in word for word in words):
        return None
    try:
        return [word.encode() for word in words]
    except UnicodeEncodeError:
        return None
