"""Stop words: strings that end a request, found in its text whatever tokens they are made of.

Tokens arrive one by one, and their texts do not simply add up: a character may be spread over
several byte tokens, and some tokenizers drop a space at the beginning of what they decode. So a
window of tokens is decoded with and without the newest, and their difference counts once it ends
with a whole character (as in Hugging Face's text-generation-inference, "prefix" and "read" offset).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What decoders put where bytes are no whole character (yet)."""
LONGEST_CHARACTER = 4
"""Bytes of a UTF-8 character, and so tokens that it is spread over at most."""


class StopWordMatcher:
    """Watches the text of one request's generated tokens.

    Args:
        words: not empty, none of them empty.
        detokenize: text of token ids.
    """

    def __init__(self, words: Sequence[str], detokenize: Callable[[list[int]], str]) -> None:
        self._words = tuple(words)
        self._detokenize = detokenize
        self._kept = max(map(len, words)) - 1
        self._tail = ""
        self._window: list[int] = []
        self._read = 0
        """Tokens of the window whose text is in the tail."""

    def push(self, token: int) -> bool:
        """Take the next token; whether the text now contains a stop word."""
        self._window.append(token)
        before = self._detokenize(self._window[: self._read])
        text = self._detokenize(self._window)
        is_whole = not text.endswith(REPLACEMENT)
        unread = len(self._window) - self._read
        new = text[len(before) :]
        if not is_whole and unread < LONGEST_CHARACTER:
            return self._is_in(self._tail + new.rstrip(REPLACEMENT))
        found = self._is_in(self._tail + new)
        self._tail = (self._tail + new)[-self._kept :] if self._kept else ""
        # The tokens just read stay as context for the next ones; those before them go.
        del self._window[: self._read]
        self._read = len(self._window)
        return found

    def _is_in(self, text: str) -> bool:
        return any(word in text for word in self._words)


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
