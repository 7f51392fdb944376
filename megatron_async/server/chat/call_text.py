"""`CallText`: a text that arrives, read step by step as a call; calls that are JSON objects, and
JSON texts that keep their numbers as they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from functools import cache
from typing import Any

from megatron_async.server.chat.answer_pieces import Call
from megatron_async.server.chat.tool_types import ToolTypes

BLANKS = " \t\r\n"
MOST_BLANKS = 256
"""Between two marks that belong together: all blanks are looked at again with each that comes."""
BLANKS_HERE = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN_STRINGS = re.compile(r"[ \t\r\n0-9+\-.eEtrufalsn:,]*")
"""What JSON has outside of its strings, but for brackets."""
_ENDINGS = {"{": "}", "[": "]"}

type Step[T] = Generator[None, None, T]
"""Reads on in a `CallText`; yields where more text must come first."""


class NoCall(Exception):
    """What was taken for a call is none: it is text."""


class CallText:
    """A text as it arrives, and how far it was read as a call. Its readers raise `NoCall` where
    what they look for does not come.

    Attributes:
        text: of it, what is not settled yet.
        place: what is before it was read.
        is_ended: nothing more will come.
        types: of the parameters of tools, by the tool's name, for forms that need them.
    """

    def __init__(self) -> None:
        self.text = ""
        self.place = 0
        self.is_ended = False
        self.types: dict[str, ToolTypes] = {}
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
        """Read whichever of the marks comes next."""
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
        while (found := BLANKS_HERE.match(self.text, self.place)) is not None:
            self.place = found.end()
            if self.place < len(self.text) or self.is_ended:
                return
            yield

    def matching(self, pattern: re.Pattern[str]) -> Step[str]:
        """Read the longest match of a pattern whose matches grow with the text."""
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
        """Read up to a mark, and the mark; returns what is before it. The mark counts only where
        one of `behind` follows it, perhaps behind blanks."""
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
        """Read a JSON object; whether it is a right one, `members` finds out."""
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


KEYS = ('"name"', '"arguments"', '"parameters"', '"type"', '"id"')
"""With which a call may begin that is a JSON object."""

_HALF = re.compile("[\ud800-\udfff]")
"""Half of a character: JSON may name it, but no text that is sent may hold it."""


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_no_constant)
"""Numbers are left as they are written."""


def json_value(text: str) -> Any:
    """The value of a JSON text, with its numbers as texts; NoCall where it is no JSON."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise NoCall from error


def members(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as it is written; NoCall where it is none."""
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
    blanks = BLANKS_HERE.match(text, at)
    assert blanks is not None, "it matches nothing, too"
    return blanks.end()


def object_text(text: str) -> str:
    """A JSON object as it is written; also one inside of a JSON string, which is OpenAI's form.
    NoCall for what is none, as null and lists are."""
    if text.startswith('"'):
        text = str(json_value(text)).strip(BLANKS)
        text = _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
    if not isinstance(json_value(text), dict):
        raise NoCall
    return text


def json_call(text: CallText, tools: Mapping[str, Mapping[str, Any]]) -> Step[Call]:
    """Read a call that is a JSON object: {"name": ..., "arguments" or "parameters": {...}}. Without
    arguments they are {}, unless the object has members that may be meant for them: then it is no
    call."""
    start = text.place
    yield from text.take("{")
    yield from text.blanks()
    yield from text.take(*KEYS)  # so that other JSON texts are not held back
    text.place = start
    found = members((yield from text.json_object()))
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
