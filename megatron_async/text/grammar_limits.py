"""How large and how deep a schema, a grammar, a regular expression or a choice may be.

What is refused here is refused at once. That what is within these limits compiles is for
`text/grammar_checker.py` to show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from megatron_async.errors import RequestError

MAX_CHARACTERS = 2**18
"""Most characters of a schema as JSON text, a grammar, a regular expression, or all texts of a
choice."""
MAX_CHOICES = 10_000
"""Texts of a choice."""
MAX_SCHEMA_DEPTH = 512
"""Objects and lists of a JSON schema inside one another, where what a `$ref` names counts as inside
of the reference. Compiling takes up to 10 KB of stack for each."""
MAX_RULES = 500
"""Rules and terminals of a grammar; a chain of them takes stack as a schema's depth does."""
MAX_WIDTH = 500
"""Optional properties and alternatives (anyOf, oneOf, allOf) of one value, those of its
alternatives included. Each is up to 6 of the items that the library follows at once
(`grammar_worker.MAX_ITEMS`), and a mask takes 2 ms with so many."""
MAX_REGEX_DEPTH = 64
"""Groups of a regular expression inside one another; the library takes 80 repeated ones."""

_RULE = re.compile(
    r"^[ \t]*[?!]*[A-Za-z_]\w*(?:\.-?\d+)?(?:\[[^\]\n]*\])?(?:\{[^}\n]*\})?\s*:", re.MULTILINE
)
_PLACE = re.compile(r"[0-9]{1,9}")
"""Of a list; Python refuses to read some thousand digits."""
_NO_GROUP = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z)", re.DOTALL)
"""An escaped character, or a class of characters. A class without an end goes to the end of the
text: else each of many opening brackets would be read to there."""


def check_size(name: str, characters: int) -> None:
    """Raise RequestError if a text is too long."""
    if characters > MAX_CHARACTERS:
        raise RequestError(
            f"{name} has {characters} characters, and {MAX_CHARACTERS} are allowed: make it "
            "shorter."
        )


def check_choice(texts: list[Any]) -> None:
    """Raise RequestError if there are too many texts."""
    if len(texts) > MAX_CHOICES:
        raise RequestError(
            f"choice has {len(texts)} texts, and {MAX_CHOICES} are allowed: give fewer."
        )


def check_regex(regex: str) -> None:
    """Raise RequestError if groups are nested too deeply."""
    depth = deepest = 0
    for letter in _NO_GROUP.sub("", regex):
        depth += (letter == "(") - (letter == ")")
        deepest = max(deepest, depth)
    if deepest > MAX_REGEX_DEPTH:
        raise RequestError(
            f"regex nests groups {deepest} deep, and {MAX_REGEX_DEPTH} are allowed: nest them less "
            "deeply."
        )


def check_grammar(grammar: str) -> None:
    """Raise RequestError if there are too many rules."""
    rules = len(_RULE.findall(grammar))
    if rules > MAX_RULES:
        raise RequestError(
            f"grammar has {rules} rules and terminals, and {MAX_RULES} are allowed: join some of "
            "them."
        )


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise RequestError if a JSON schema is nested too deeply.

    Each definition is followed once, from where it is met first, which is how it is compiled; so a
    schema may refer to itself.
    """
    followed: set[str] = set()
    to_visit: list[tuple[Any, int]] = [(schema, 1)]
    while to_visit:
        value, depth = to_visit.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise RequestError(
                f"json_schema is nested more than {MAX_SCHEMA_DEPTH} deep, counting what each $ref "
                "names as inside of it: nest it less deeply, or chain fewer references."
            )
        parts = value.values() if isinstance(value, dict) else value
        to_visit += [(part, depth + 1) for part in parts if isinstance(part, dict | list)]
        target = value.get("$ref") if isinstance(value, dict) else None
        if isinstance(target, str) and target not in followed:
            followed.add(target)
            found = resolve(schema, target)
            if isinstance(found, dict | list):
                to_visit.append((found, depth + 1))


def check_width(schema: Mapping[str, Any]) -> None:
    """Raise RequestError if the text of a JSON schema, which `check_schema` has let through, may go
    on in too many ways: the library would give up where it comes there."""
    widths: dict[int, int] = {}
    opened: set[int] = set()
    to_visit: list[tuple[Any, list[Any] | None]] = [(schema, None)]
    while to_visit:
        value, parts = to_visit.pop()
        if parts is not None:  # all that it is made of was visited
            width = _own_width(value) + sum(widths.get(id(part), 0) for part in parts)
            widths[id(value)] = width
            if width > MAX_WIDTH:
                raise RequestError(
                    f"json_schema has a value with {width} optional properties and alternatives, "
                    f"and {MAX_WIDTH} are allowed: name properties as required, or give fewer."
                )
        elif id(value) not in opened and isinstance(value, dict | list):
            opened.add(id(value))
            inner = list(value)
            if isinstance(value, dict):
                parts = [*_alternatives(value), resolve(schema, str(value.get("$ref")))]
                to_visit.append((value, parts))
                inner = [*value.values(), *parts]
            to_visit += [(part, None) for part in inner]


def _own_width(schema: Mapping[str, Any]) -> int:
    named, required = schema.get("properties"), schema.get("required")
    names = required if isinstance(required, list) else []
    names = [name for name in names if isinstance(name, str)]
    optional = named.keys() - names if isinstance(named, dict) else ()
    return len(optional) + len(_alternatives(schema))


def _alternatives(schema: Mapping[str, Any]) -> list[Any]:
    lists = [schema.get(key) for key in ("anyOf", "oneOf", "allOf")]
    return [part for parts in lists if isinstance(parts, list) for part in parts]


def resolve(schema: Any, target: str) -> Any:
    """The target of a reference within the schema; None if there is none."""
    if target != "#" and not target.startswith("#/"):
        return None
    for key in unquote(target[1:]).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and _PLACE.fullmatch(key) and int(key) < len(schema):
            schema = schema[int(key)]
        elif isinstance(schema, dict) and key in schema:
            schema = schema[key]
        else:
            return None
    return schema
