"""`CallsReader`: finds calls in a text, for formats that write them as JSON behind a mark."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import override

from megatron_async.server.chat.call_object import CallObject
from megatron_async.server.chat.thoughts import overlap
from megatron_async.server.chat.tool_format import CallReader, Content, Piece

_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})\s*(?:\[ARGS\])?\s*(?=\{)")
_PART_OF_NAMED = re.compile(r"[A-Za-z0-9_.-]{0,64}\s*(?:\[[ARGS\]]{0,5})?\s*")


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The marks around calls.

    Attributes:
        opening: text before them.
        closing: text behind each; "": none.
        between: characters that may stand between calls.
        is_bare: a text that begins with a brace is a call without the opening.
        is_named: a call may be a name and its arguments.
    """

    opening: str
    closing: str = ""
    between: str = " \n\t\r"
    is_bare: bool = False
    is_named: bool = False


class CallsReader(CallReader):
    """Takes calls out of a text; what is no call stays content, blanks around calls are dropped.

    Args:
        marks: of the format.
    """

    def __init__(self, marks: CallMarks) -> None:
        self._marks = marks
        self._held = ""
        self._object: CallObject | None = None
        self._is_between = False
        self._is_first = True
        """Nothing but blanks has come."""
        self._num_calls = 0
        self._is_behind_call = False
        """Nothing but blanks has come behind a call."""

    @override
    def push(self, text: str) -> list[Piece]:
        self._held += text
        found: list[Piece] = []
        while self._held and self._step(found):
            pass
        return found

    @override
    def end(self) -> list[Piece]:
        found: list[Piece] = []
        if self._object is not None and not self._object.has_begun:
            found += _content(
                ("" if self._marks.is_bare else self._marks.opening) + "".join(self._object.raw)
            )
        elif self._object is None:
            blanks = self._marks.between if self._is_between else " \n\t\r"
            found += _content(self._held.strip(blanks) if self._num_calls else self._held)
        self._held, self._object = "", None
        return found

    def _step(self, found: list[Piece]) -> bool:
        """Read on in what is held; whether to go on."""
        if self._object is not None:
            return self._read_object(found)
        return self._read_between(found) if self._is_between else self._read_content(found)

    def _read_content(self, found: list[Piece]) -> bool:
        marks = self._marks
        begun = self._held.lstrip()
        if self._is_behind_call:
            self._held, self._is_behind_call = begun, not begun
        if marks.is_bare and self._is_first and begun.startswith("{"):
            self._held, self._is_between, self._is_first = begun, True, False
            return True
        start = self._held.find(marks.opening)
        if start >= 0:
            found += _content(self._held[:start].rstrip())
            self._held = self._held[start + len(marks.opening) :]
            self._is_between, self._is_first = True, False
            return True
        kept = self._held[: len(self._held) - overlap(self._held, marks.opening)].rstrip()
        if kept:
            found += _content(kept)
            self._is_first = False
        self._held = self._held[len(kept) :]
        return False

    def _read_between(self, found: list[Piece]) -> bool:
        marks = self._marks
        rest = self._held.lstrip(marks.between)
        if rest.startswith("{"):
            self._held, self._object = rest, CallObject()
            return True
        if marks.is_named and (named := _NAMED.match(rest)):
            self._held, self._object = rest[named.end() :], CallObject(named[1])
            return True
        if marks.closing and rest.startswith(marks.closing):
            self._held, self._is_between = rest[len(marks.closing) :], False
            self._is_behind_call = True
            return bool(self._held)
        if rest.startswith(marks.opening):
            self._held = rest[len(marks.opening) :]
            return True
        may_go_on = not rest or marks.closing.startswith(rest) or marks.opening.startswith(rest)
        if may_go_on or (marks.is_named and _PART_OF_NAMED.fullmatch(rest)):
            return False
        self._is_between = False  # it is no call after all
        if not self._num_calls:
            self._held = marks.opening + self._held
            found += _content(self._held)
            self._held = ""
        return bool(self._held)

    def _read_object(self, found: list[Piece]) -> bool:
        assert self._object is not None
        pieces, self._held = self._object.push(self._held)
        found += pieces
        if not self._object.is_complete:
            return False
        if self._object.has_begun:
            self._num_calls += 1
        else:
            found += _content("".join(self._object.raw))
            self._is_between = False
        self._object = None
        return bool(self._held)


def _content(text: str) -> list[Piece]:
    return [Content(text)] if text else []
