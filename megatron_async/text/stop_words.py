"""Stop words: strings that end a request, found in its text for any division into tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, override

import numpy as np
from numpy.typing import NDArray

from megatron_async.text.detokenize import IncrementalDetokenizer, settled_text

MOST_TOKENS = 4096
"""Tokens that are looked at for a word; more than its bytes only where tokens have none."""


class StopWords(Protocol):
    """The stop words of one request. `counts_from`: characters of the text that were there when
    words began to count; a word that is complete within them does not."""

    counts_from: int

    def end_with(self, generated: NDArray[np.integer[Any]], min_tokens: int) -> bool:
        """Whether the newest of the generated tokens, int32 `[tokens]`, completes a stop word;
        words that are complete before `min_tokens` tokens do not count."""
        ...


class ByteMatcher(StopWords):
    """Stop words (UTF-8, none empty) in a text that is the bytes of its tokens in a row; it
    remembers nothing, so it need not be asked for tokens that cannot complete a word."""

    @override
    def __init__(
        self,
        words: Sequence[bytes],
        pieces: Sequence[bytes],
        detokenize: Callable[[list[int]], str],
    ) -> None:
        self._words = tuple(words)
        self._longest = max(map(len, words))
        self._pieces = pieces
        self._detokenize = detokenize
        self.counts_from = 0

    def end_with(self, generated: NDArray[np.integer[Any]], min_tokens: int) -> bool:
        if len(generated) < min_tokens:
            return False
        newest = self._pieces[generated[-1]]
        behind, wanted = [newest], self._longest - 1
        first = max(len(generated) - 1 - MOST_TOKENS, 0)
        for place in range(len(generated) - 2, first - 1, -1):
            if wanted <= 0:
                break
            behind.append(self._pieces[generated[place]])
            wanted -= len(behind[-1])
        text = b"".join(reversed(behind))
        known = len(text) - len(newest)
        found = any(text.find(word, max(known - len(word) + 1, 0)) >= 0 for word in self._words)
        if found and min_tokens > 1:
            before = generated[: min_tokens - 1].tolist()  # sync-ok: NumPy, at the end of a request
            self.counts_from = len(settled_text(self._detokenize(before)))
        return found


class StopWordMatcher(StopWords):
    """Watches the text of one request's generated tokens for words, none empty, for any tokenizer:
    it must be asked at every token."""

    def __init__(self, words: Sequence[str], detokenize: Callable[[list[int]], str]) -> None:
        self._words = tuple(words)
        self._text = IncrementalDetokenizer(detokenize)
        self._tail = ""
        """End of the settled text in which a word may have begun."""
        self._length = 0
        self.counts_from = 0

    @override
    def end_with(self, generated: NDArray[np.integer[Any]], min_tokens: int) -> bool:
        return self.push(int(generated[-1]), len(generated) >= min_tokens)

    def push(self, token: int, counts: bool = True) -> bool:
        """Take the next token; whether it completes a stop word that counts."""
        new = self._text.push(token)
        text = self._tail + new
        known = len(self._tail)
        found = any(find_word(text, word, known) >= 0 for word in self._words)
        self._tail = text[max(len(text) - held_back(self._words), 0) :]
        self._length += len(new)
        if not counts:
            self.counts_from = self._length
        return found and counts


def held_back(words: Sequence[str]) -> int:
    """Characters at the end of a text that may turn out to be the beginning of a stop word."""
    return max(map(len, words), default=1) - 1


def cut_at_stop_word(text: str, words: Sequence[str], keep: bool, counts_from: int = 0) -> str:
    """The text of a request up to the stop word that is complete first (with that word: `keep`), of
    those that count."""
    start, end = first_stop_word(text, words, counts_from)
    return text[: end if keep else start]


def first_stop_word(text: str, words: Sequence[str], counts_from: int = 0) -> tuple[int, int]:
    """Where the stop word that is complete first begins and ends; without one, both are the
    text's length. The arguments are those of `cut_at_stop_word`."""
    starts = [(find_word(text, word, counts_from), len(word)) for word in words]
    found = [(start + length, start) for start, length in starts if start >= 0]
    end, start = min(found, default=(len(text), len(text)))
    return start, end


def find_word(text: str, word: str, behind: int) -> int:
    """Where `word` first begins in a text, of the places where it ends after `behind` characters;
    -1 if there is none."""
    return text.find(word, max(behind - len(word) + 1, 0))
