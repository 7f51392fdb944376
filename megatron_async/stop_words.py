"""Stop words: strings that end a request, found in its text whatever tokens they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_async.detokenize import IncrementalDetokenizer


class StopWordMatcher:
    """Watches the text of one request's generated tokens.

    Args:
        words: not empty, none of them empty.
        detokenize: text of token ids.
    """

    def __init__(self, words: Sequence[str], detokenize: Callable[[list[int]], str]) -> None:
        self._words = tuple(words)
        self._text = IncrementalDetokenizer(detokenize)
        self._tail = ""
        """End of the settled text in which a word may have begun."""

    def push(self, token: int) -> bool:
        """Take the next token; whether the text now contains a stop word."""
        settled = self._tail + self._text.push(token)
        found = any(word in settled for word in self._words)
        self._tail = settled[max(len(settled) - held_back(self._words), 0) :]
        return found


def held_back(words: Sequence[str]) -> int:
    """Characters at the end of a text that may turn out to be the beginning of a stop word."""
    return max(map(len, words), default=1) - 1


def cut_at_stop_word(text: str, words: Sequence[str], keep: bool) -> str:
    """`text` up to the stop word that is complete first.

    Args:
        text: of a request that a stop word ended.
        words: its stop words.
        keep: leave the stop word itself at the end.
    """
    spans = [(start + len(word), start) for word in words if (start := text.find(word)) >= 0]
    if not spans:
        return text
    end, start = min(spans)
    return text[: end if keep else start]
