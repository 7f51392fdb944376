"""`CallsReader`: takes calls out of a text; all that is no call stays as it was written.

A call is told when it is whole, since only then it is known to be one: a mark may be quoted, the
name may be of no tool, the JSON text may break off. Until then its text is held back. Blanks that
stand alone before, between or behind calls are dropped; blanks around words are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, override

from megatron_async.server.chat.answer_pieces import (
    Call,
    CallArguments,
    CallBegin,
    CallReader,
    Content,
    Piece,
    ReadingCalls,
)
from megatron_async.server.chat.call_text import BLANKS, BLANKS_HERE, CallText, NoCall
from megatron_async.server.chat.thoughts import overlap

if TYPE_CHECKING:
    from megatron_async.server.chat.call_formats import CallFormat


class CallsReader(CallReader):
    """Takes one choice's text apart. `is_forced`: a grammar lets nothing but calls be written; what
    is no call was cut off, and is dropped."""

    def __init__(
        self, form: CallFormat, tools: Mapping[str, Mapping[str, Any]], is_forced: bool = False
    ) -> None:
        self._form = form
        self._tools = tools
        self._is_forced = is_forced
        self._source = CallText()
        self._call: ReadingCalls | None = None
        self._settled = 0
        """Characters of the source that were told, or that a call took."""
        self._blanks = ""
        """At the beginning, or behind a call; dropped if a call or the end follows."""
        self._has_words = False
        """There was other text since the beginning, or since the newest call."""
        self._has_calls = False

    @override
    def push(self, text: str) -> list[Piece]:
        self._source.text += text
        return _joined(self._read())

    @override
    def end(self) -> list[Piece]:
        self._source.is_ended = True
        found = self._read()
        if self._blanks and not self._has_calls and not self._is_forced:
            found.append(Content(self._blanks))
        return _joined(found)

    def _read(self) -> list[Piece]:
        found: list[Piece] = []
        source = self._source
        while True:
            if self._call is None:
                start = self._begin_of_call()
                self._say(source.text[self._settled : start], found)
                self._settled = start
                if start == len(source.text) or not self._is_begun(start):
                    source.forget(start)
                    self._settled = 0
                    return found
                source.place = start
                assert self._form.read is not None, "other forms have readers of their own"
                self._call = self._form.read(source, self._tools)
            try:
                next(self._call)
                if not source.is_ended:
                    return found
            except StopIteration as end:
                self._tell(end.value, found)
                self._settled = source.place
            except NoCall:
                self._say(source.text[self._settled], found)
                self._settled += 1
            self._call = None

    def _begin_of_call(self) -> int:
        """Where a call may begin, or a part of its mark at the text's end; or the text's end."""
        text = self._source.text
        if self._form.is_bare and not self._has_words:
            blanks = BLANKS_HERE.match(text, self._settled)
            start = self._settled if blanks is None else blanks.end()
            if text.startswith("{", start) and not self._has_calls:
                return start
        found = self._form.opening.search(text, self._settled)
        if found:
            return found.start()
        if self._source.is_ended:
            return len(text)
        rest = text[max(self._settled, len(text) - self._form.longest_mark) :]
        return len(text) - max(overlap(rest, mark) for mark in self._form.marks)

    def _is_begun(self, start: int) -> bool:
        """Whether a call's mark is there, and not only a part of it."""
        text = self._source.text
        return bool(self._form.opening.match(text, start)) or (
            self._form.is_bare and text[start] == "{"
        )

    def _say(self, text: str, found: list[Piece]) -> None:
        if not text or self._is_forced:
            return
        if not self._has_words and not text.strip(BLANKS):
            self._blanks += text
            return
        text, self._blanks = self._blanks + text, ""
        self._has_words = True
        found.append(Content(text))

    def _tell(self, calls: list[Call], found: list[Piece]) -> None:
        self._has_words, self._has_calls, self._blanks = False, True, ""
        for name, arguments in calls:
            found += [CallBegin(name), CallArguments(arguments)]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """With one content for several in a row."""
    if len(pieces) < 2:
        return pieces
    found: list[Piece] = []
    for kind, group in groupby(pieces, type):
        if kind is Content:
            texts = [piece.text for piece in group if isinstance(piece, Content)]
            found.append(Content("".join(texts)))
        else:
            found += group
    return found
