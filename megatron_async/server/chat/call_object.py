"""`CallObject`: one call as a JSON object, {"name": ..., "arguments": {...}}, as it arrives."""

from __future__ import annotations

import json
import re

from megatron_async.server.chat.tool_format import CallArguments, CallBegin, Piece

ARGUMENTS = ("arguments", "parameters")
BEGUN = " arguments"
"""Instead of the key, once a part of them was given."""
_PLAIN = re.compile(r'[^"\\\[\]{}:,]+')
"""Text that changes nothing inside or outside of a string but itself."""


class CallObject:
    """Reads one object; arguments are given as they arrive, as they are written.

    Args:
        name: of the function, where the object is its arguments alone.

    Attributes:
        is_complete: its last brace has come; what is pushed behind it is returned.
        has_begun: the name is known, and the call was told.
        raw: all that was read.
    """

    def __init__(self, name: str | None = None) -> None:
        self.is_complete = False
        self.has_begun = name is not None
        self.raw: list[str] = []
        self._ends_at = 0 if name is None else 1
        self._depth = self._ends_at
        self._in_string = False
        self._escaped = False
        self._part: list[str] = []
        """The key or value that is being read, at depth 1."""
        self._key = "" if name is None else ARGUMENTS[0]
        self._waiting: list[str] = []
        """Arguments that came before the name."""
        self._found: list[Piece] = [] if name is None else [CallBegin(name)]

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Take more text.

        Returns:
            what is settled, and the text behind the object.
        """
        place = 0
        while place < len(text) and not self.is_complete:
            plain = None if self._escaped else _PLAIN.match(text, place)
            piece = plain[0] if plain else text[place]
            place += len(piece)
            self._take(piece, is_plain=plain is not None)
        self.raw.append(text[:place])
        self._give_value()
        found, self._found = self._found, []
        return _joined(found), text[place:]

    def _take(self, piece: str, is_plain: bool) -> None:
        if self._in_string:
            self._part.append(piece)
            if self._escaped:
                self._escaped = False
            elif piece == "\\":
                self._escaped = True
            elif piece == '"':
                self._in_string = False
            return
        if is_plain:
            if self._depth:
                self._part.append(piece)
            return
        if piece == '"':
            self._in_string = True
        elif piece in "{[":
            self._depth += 1
            if self._depth == 1:
                return
        elif piece in "}]":
            self._depth -= 1
            if self._depth <= self._ends_at:
                if self._ends_at:
                    self._part.append(piece)
                self._end_value()
                self.is_complete = True
                return
        elif self._depth == 1 and piece == ":" and not self._key:
            self._key = _string("".join(self._part)) or "?"
            self._part = []
            return
        elif self._depth == 1 and piece == ",":
            self._end_value()
            return
        self._part.append(piece)

    def _give_value(self) -> None:
        """Arguments so far; a string of JSON must be whole before it can be read."""
        text = "".join(self._part)
        if self._key in ARGUMENTS and text.lstrip().startswith("{"):
            text, self._key = text.lstrip(), BEGUN
        if self._key != BEGUN:
            return
        # Blanks at the end may be those before the object's own brace.
        kept = text if self._in_string else text.rstrip()
        self._part = [text[len(kept) :]] if len(kept) < len(text) else []
        self._arguments(kept)

    def _end_value(self) -> None:
        text, key = "".join(self._part), self._key
        self._part, self._key = [], ""
        if key == "name":
            self._name(_string(text) or "")
        elif key == BEGUN:
            self._arguments(text.rstrip())
        elif key in ARGUMENTS:
            self._arguments(_string(text) or text.strip())

    def _name(self, name: str) -> None:
        if self.has_begun:
            return
        self.has_begun = True
        self._found.append(CallBegin(name))
        if self._waiting:
            self._found.append(CallArguments("".join(self._waiting)))
            self._waiting = []

    def _arguments(self, text: str) -> None:
        if not text:
            return
        if self.has_begun:
            self._found.append(CallArguments(text))
        else:
            self._waiting.append(text)


def _joined(pieces: list[Piece]) -> list[Piece]:
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, CallArguments) and isinstance(last, CallArguments):
            found[-1] = CallArguments(last.text + piece.text)
        else:
            found.append(piece)
    return found


def _string(text: str) -> str | None:
    """The value of a JSON string; None if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
