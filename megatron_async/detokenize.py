"""Text of tokens that arrive one by one.

Texts of tokens do not simply add up: a character may be spread over several byte tokens, and some
tokenizers drop a space at the beginning of what they decode. So the newest tokens are decoded
together with some before them, and what is new at the end of that text counts, but for a character
that the next token may still complete.
"""

from __future__ import annotations

from collections.abc import Callable

REPLACEMENT = "\ufffd"
"""What decoders put where bytes are no whole character (yet)."""
MOST_UNFINISHED = 3
"""A UTF-8 character has four bytes at most, so three may wait for their last."""
CONTEXT = 8
"""Tokens that are decoded again as context; twice as many are kept before they are cut."""


class IncrementalDetokenizer:
    """The text of one request's generated tokens, piece by piece.

    Args:
        detokenize: text of token ids.
    """

    def __init__(self, detokenize: Callable[[list[int]], str | None]) -> None:
        self._detokenize = detokenize
        self._window: list[int] = []
        self._num_returned = 0
        """Characters of the window's text that were returned."""

    def push(self, token: int) -> str:
        """Take the next token; return the text that is settled by it, perhaps none."""
        self._window.append(token)
        text = self._detokenize(self._window) or ""
        settled = settled_text(text)
        new = settled[self._num_returned :]
        self._num_returned = max(self._num_returned, len(settled))
        if len(self._window) > 2 * CONTEXT:
            del self._window[:-CONTEXT]
            unreturned = len(text) - self._num_returned
            self._num_returned = len(self._detokenize(self._window) or "") - unreturned
        return new


def settled_text(text: str) -> str:
    """The text of some tokens without the end of it that a next token may still complete."""
    whole = text.rstrip(REPLACEMENT)
    return text[: max(len(whole), len(text) - MOST_UNFINISHED)]
