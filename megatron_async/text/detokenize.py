"""Text of tokens that arrive one by one.

The texts of single tokens cannot simply be joined: a character may consist of several byte tokens,
and some tokenizers drop a space at the beginning of a decoded text. So the newest tokens are
decoded together with some earlier ones. The new end of this text is returned, except for characters
that later bytes may change. Tokenizers with byte fallback (Llama 2, Mixtral) decode a run of byte
tokens as a whole: one incomplete character turns the whole run into replacement characters until it
is complete. So replacement characters are returned only once another character follows.

If a text is the bytes of its tokens one after another, all this is one look-up a token.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

REPLACEMENT = "\ufffd"
"""The character that decoders write for bytes that are no complete character (yet)."""
CONTEXT = 8
"""Tokens that are decoded again as context; twice as many are kept before they are cut."""
LONGEST_CHARACTER = 4
"""Bytes of a UTF-8 character."""
LONGEST_WINDOW = 64
"""Tokens that are kept while they end in bytes that are no character; these never will be one."""


class IncrementalDetokenizer:
    """The text of one request's generated tokens, piece by piece, by a function from token ids to
    text."""

    def __init__(self, detokenize: Callable[[list[int]], str | None]) -> None:
        self._detokenize = detokenize
        self._window: list[int] = []
        self._num_returned = 0
        """Characters of the window's text that were returned."""

    def push(self, token: int) -> str:
        """Take the next token; return the text that is settled by it, perhaps none."""
        self._window.append(token)
        text = self._text(self._window)
        is_hopeless = len(self._window) >= LONGEST_WINDOW
        settled = text if is_hopeless else settled_text(text)
        new = settled[self._num_returned :]
        self._num_returned = max(self._num_returned, len(settled))
        if is_hopeless or (len(self._window) > 2 * CONTEXT and len(settled) == len(text)):
            self._shorten(text, is_hopeless)
        return new

    def push_all(self, tokens: Sequence[int]) -> str:
        """Take the next tokens; return the text that is settled by them, as `push` does one by one,
        at the cost of one."""
        if len(tokens) > 1:
            window = [*self._window, *tokens]
            text = self._text(window)
            if not text.endswith(REPLACEMENT):
                new, self._window, self._num_returned = (
                    text[self._num_returned :], window, len(text),
                )  # fmt: skip
                if len(window) > 2 * CONTEXT:
                    self._shorten(text, is_hopeless=False)
                return new
        return "".join(map(self.push, tokens))

    def _shorten(self, text: str, is_hopeless: bool) -> None:
        """Cut the window's front off, all of whose text was returned; not inside a character."""
        for kept in range(CONTEXT, CONTEXT + LONGEST_CHARACTER):
            rest = self._text(self._window[-kept:])
            if text.endswith(rest) or is_hopeless:
                self._window = self._window[-kept:]
                self._num_returned = len(rest)
                return

    def _text(self, tokens: list[int]) -> str:
        return self._detokenize(tokens) or ""


class ByteDetokenizer:
    """The text of one request's generated tokens, where texts are the bytes of their tokens, by id;
    but for `marks`, tokens that a character stands for which no bytes can give (id -> it)."""

    def __init__(self, pieces: Mapping[int, bytes], marks: Mapping[int, str] | None = None) -> None:
        self._pieces = pieces
        self._marks = marks or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_inside = False
        """Whether the decoder keeps the beginning of a character."""

    def push_all(self, tokens: Sequence[int]) -> str:
        """Take the next tokens; return the text that no later token changes: all but an incomplete
        character at its end."""
        if self._marks and not self._marks.keys().isdisjoint(tokens):
            return "".join(
                self.push_all(list(run)) if mark is None else self.finish() + mark * len(list(run))
                for mark, run in groupby(tokens, self._marks.get)
            )
        data = b"".join(map(self._pieces.__getitem__, tokens))
        if not self._is_inside:
            try:
                return data.decode()  # nearly always: as fast as it gets
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._is_inside = self._decoder.getstate()[0] != b""
        return text

    def finish(self) -> str:
        """The replacement for an incomplete character at the very end, or before a mark."""
        self._is_inside = False
        return self._decoder.decode(b"", final=True)


def settled_text(text: str) -> str:
    """The text of some tokens without the end of it that a next token may still change."""
    return text.rstrip(REPLACEMENT)
