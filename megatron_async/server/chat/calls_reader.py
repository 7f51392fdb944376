"""`CallsReader`: takes calls out of a text; all that is no call stays as it was written.

A call is told when it is whole, since only then it is known to be one: a mark may be quoted, the
name may be of no tool, the JSON text may break off. Until then its text is held back. Blanks that
stand alone before, between or behind calls are dropped; blanks around words are not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from functools import cache
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
from megatron_async.server.chat.thoughts import overlap

if TYPE_CHECKING:
    from megatron_async.server.chat.call_formats import CallFormat

BLANKS = " \t\r\n"
MOST_BLANKS = 256
"""Between two marks that belong together: all blanks are looked at again with each that comes."""
_BLANKS = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN_STRINGS = re.compile(r"[ \t\r\n0-9+\-.eEtrufalsn:,]*")
"""What JSON has outside of its strings, but for brackets."""
_ENDINGS = {"{": "}", "[": "]"}

type Step[T] = Generator[None, None, T]
"""Reads on in a `CallText`; yields where more text must come first."""


class NoCall(Exception):
    """What was taken for a call is none: it is text."""


class CallText:
    """A text as it arrives, and how far it was read as a call.

    Attributes:
        text: of it, what is not settled yet.
        place: what is before it was read.
        is_ended: nothing more will come.
    """

    def __init__(self) -> None:
        self.text = ""
        self.place = 0
        self.is_ended = False
        self._absent: dict[re.Pattern[str], int] = {}
        """Pattern -> where it was looked for in vain, in a text that has ended."""

    def forget(self, until: int) -> None:
        """Drop text that is settled."""
        self.text, self.place = self.text[until:], 0

    def next_is(self, *marks: str) -> Step[str]:
        """Which of the marks comes next, "" if none does; nothing is read."""
        while True:
            for mark in marks:
                if self.text.startswith(mark, self.place):
                    return mark
            rest = self.text[self.place : self.place + max(map(len, marks))]
            if self.is_ended or not any(mark.startswith(rest) for mark in marks):
                return ""
            yield

    def take(self, *marks: str) -> Step[str]:
        """Read whichever of the marks comes next.

        Raises:
            NoCall: none does.
        """
        mark = yield from self.next_is(*marks)
        if not mark:
            raise NoCall
        self.place += len(mark)
        return mark

    def closes(self, mark: str, *others: str) -> Step[bool]:
        """Whether a call ends here: by its closing mark, which is read; by another mark, which is
        not; or since the text ends here or inside of the mark."""
        found = yield from self.next_is(mark, *others)
        if not found and self.is_ended and mark.startswith(self.text[self.place :]):
            self.place = len(self.text)
            return True
        self.place += len(mark) if found == mark else 0
        return bool(found)

    def blanks(self) -> Step[None]:
        """Read blanks, perhaps none; each of them once, however they arrive."""
        while (found := _BLANKS.match(self.text, self.place)) is not None:
            self.place = found.end()
            if self.place < len(self.text) or self.is_ended:
                return
            yield

    def matching(self, pattern: re.Pattern[str]) -> Step[str]:
        """Read the longest match of a pattern whose matches grow with the text.

        Raises:
            NoCall: there is none here.
        """
        while True:
            found = pattern.match(self.text, self.place)
            end = self.place if found is None else found.end()
            if end < len(self.text) or self.is_ended:
                break
            yield
        if found is None:
            raise NoCall
        self.place = end
        return found[0]

    def until(self, mark: str, *behind: str) -> Step[str]:
        """Read up to a mark, and the mark; returns what is before it.

        Args:
            mark: to be read.
            behind: it counts only where one of these follows it, perhaps behind blanks.

        Raises:
            NoCall: it does not come.
        """
        pattern = _pattern(mark, behind)
        start = searched = self.place
        if start >= self._absent.get(pattern, start + 1):
            raise NoCall  # to look for it again and again would take the square of the length
        while not (found := pattern.search(self.text, searched)):
            last = self.text.rfind(mark, searched)
            rest = self.text[last + len(mark) :][: MOST_BLANKS + 1].lstrip(BLANKS)
            is_open = len(self.text) - last - len(mark) <= MOST_BLANKS + len(rest)
            if last < 0 or not is_open or not any(text.startswith(rest) for text in behind):
                last = len(self.text) - len(mark) + 1
            searched = max(searched, last)
            if self.is_ended:
                self._absent[pattern] = min(start, self._absent.get(pattern, start))
                raise NoCall
            yield
        self.place = found.end()
        return self.text[start : found.start()]

    def json_object(self) -> Step[str]:
        """Read a JSON object; whether it is a right one, `members` finds out.

        Raises:
            NoCall: none begins here, or it has what JSON has not, or does not end.
        """
        if not (yield from self.next_is("{")):
            raise NoCall
        start = at = self.place
        expected: list[str] = []
        in_string = False
        while True:
            while at < len(self.text):
                pattern = _IN_STRING if in_string else _BETWEEN_STRINGS
                found = pattern.match(self.text, at)
                assert found is not None, "it matches nothing, too"
                at = found.end()
                letter = self.text[at : at + 1]
                if not letter or (letter == "\\" and at + 1 == len(self.text)):
                    break
                at += 2 if in_string and letter == "\\" else 1
                if letter == '"':
                    in_string = not in_string
                elif in_string:
                    continue
                elif letter in _ENDINGS:
                    expected.append(_ENDINGS[letter])
                elif letter != expected.pop():
                    raise NoCall
                if not expected:
                    self.place = at
                    return self.text[start:at]
            if self.is_ended:
                raise NoCall
            yield


@cache
def _pattern(mark: str, behind: tuple[str, ...]) -> re.Pattern[str]:
    if not behind:
        return re.compile(re.escape(mark))
    follows = "|".join(map(re.escape, behind))
    return re.compile(f"{re.escape(mark)}[{BLANKS}]{{0,{MOST_BLANKS}}}(?={follows})")


class CallsReader(CallReader):
    """Takes one choice's text apart.

    Args:
        form: how calls are written.
        tools: those that may be called: name -> JSON schema of the arguments.
        is_forced: a grammar lets nothing but calls be written: what is no call was cut off, and is
            dropped.
    """

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
            blanks = _BLANKS.match(text, self._settled)
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


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_no_constant)
"""Numbers are left as they are written."""


def json_value(text: str) -> Any:
    """The value of a JSON text, with its numbers as texts.

    Raises:
        NoCall: it is no JSON.
    """
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise NoCall from error


def members(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as it is written.

    Raises:
        NoCall: it is no JSON object.
    """
    if not isinstance(json_value(text), dict):
        raise NoCall
    found: dict[str, str] = {}
    at = _after_blanks(text, 0) + 1
    while text[at := _after_blanks(text, at)] != "}":
        key, at = _DECODER.raw_decode(text, _after_blanks(text, at + (text[at] == ",")))
        at = _after_blanks(text, _after_blanks(text, at) + 1)
        _, end = _DECODER.raw_decode(text, at)
        found[key], at = text[at:end], end
    return found


def _after_blanks(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    assert blanks is not None, "it matches nothing, too"
    return blanks.end()


def object_text(text: str) -> str:
    """A JSON object as it is written; also one inside of a JSON string, which is OpenAI's form.

    Raises:
        NoCall: it is none, as null and lists are.
    """
    if text.startswith('"'):
        text = str(json_value(text)).strip(BLANKS)
    if not isinstance(json_value(text), dict):
        raise NoCall
    return text


def json_call(text: str, tools: Mapping[str, Mapping[str, Any]]) -> Call:
    """The call that a JSON object is: {"name": ..., "arguments" or "parameters": {...}}.

    Raises:
        NoCall: it is none, or no tool has this name, or its arguments are no object. Without
            arguments they are {}, unless the object has members that may be meant for them.
    """
    found = members(text)
    name = found.get("name", "")
    name = str(json_value(name)) if name.startswith('"') else ""
    if name not in tools:
        raise NoCall
    given = found.get("arguments", found.get("parameters"))
    if given is None:
        if found.keys() - {"name", "id", "type"}:
            raise NoCall
        return Call(name, "{}")
    return Call(name, object_text(given))
