"""Calls that are JSON objects, and JSON texts that keep their numbers as they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from megatron_async.server.chat.answer_pieces import Call
from megatron_async.server.chat.call_text import BLANKS, BLANKS_HERE, CallText, NoCall, Step

KEYS = ('"name"', '"arguments"', '"parameters"', '"type"', '"id"')
"""With which a call may begin that is a JSON object."""

_HALF = re.compile("[\ud800-\udfff]")
"""Half of a character: JSON may name it, but no text that is sent may hold it."""


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
    blanks = BLANKS_HERE.match(text, at)
    assert blanks is not None, "it matches nothing, too"
    return blanks.end()


def object_text(text: str) -> str:
    """A JSON object as it is written; also one inside of a JSON string, which is OpenAI's form.

    Raises:
        NoCall: it is none, as null and lists are.
    """
    if text.startswith('"'):
        text = str(json_value(text)).strip(BLANKS)
        text = _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
    if not isinstance(json_value(text), dict):
        raise NoCall
    return text


def json_call(text: CallText, tools: Mapping[str, Mapping[str, Any]]) -> Step[Call]:
    """Read a call that is a JSON object: {"name": ..., "arguments" or "parameters": {...}}.

    Raises:
        NoCall: it is none, or no tool has this name, or its arguments are no object. Without
            arguments they are {}, unless the object has members that may be meant for them.
    """
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
