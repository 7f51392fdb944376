"""Stop words: strings that end a request, found in its text whatever tokens they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_async.detokenize import IncrementalDetokenizer


class StopWordMatcher:
    """Watches the text of one request's generated tokens.

    Args:
        words: not empty, none of them empty.
        detokenize: text of token ids.

    Attributes:
        counts_from: characters of the text that were there when words began to count; a word that
            is complete within them does not.
    """

    def __init__(self, words: Sequence[str], detokenize: Callable[[list[int]], str]) -> None:
        self._words = tuple(words)
        self._text = IncrementalDetokenizer(detokenize)
        self._tail = ""
        """End of the settled text in which a word may have begun."""
        self._length = 0
        self.counts_from = 0

    def push(self, token: int, counts: bool = True) -> bool:
        """Take the next token; whether it completes a stop word.

        Args:
            token: its id.
            counts: False while words do not count yet (min_tokens).
        """
        new = self._text.push(token)
        text = self._tail + new
        known = len(self._tail)
        found = any(_find(text, word, known) >= 0 for word in self._words)
        self._tail = text[max(len(text) - held_back(self._words), 0) :]
        self._length += len(new)
        if not counts:
            self.counts_from = self._length
        return found and counts


def held_back(words: Sequence[str]) -> int:
    """Characters at the end of a text that may turn out to be the beginning of a stop word."""
    return max(map(len, words), default=1) - 1


def cut_at_stop_word(text: str, words: Sequence[str], keep: bool, counts_from: int = 0) -> str:
    """`text` up to the stop word that is complete first.

    Args:
        text: of a request that a stop word ended.
        words: its stop words.
        keep: leave the stop word itself at the end.
        counts_from: see `StopWordMatcher`.
    """
    starts = [(_find(text, word, counts_from), len(word)) for word in words]
    found = [(start + length, start) for start, length in starts if start >= 0]
    if not found:
        return text
    end, start = min(found)
    return text[: end if keep else start]


def _find(text: str, word: str, behind: int) -> int:
    """Where `word` first begins, of the places where it ends behind `behind` characters; or -1."""
    return text.find(word, max(behind - len(word) + 1, 0))
