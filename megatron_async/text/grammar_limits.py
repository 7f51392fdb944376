"""How large and how deep a schema, a grammar, a regular expression or a choice may be, and which
numbers a schema may have.

What is refused here is refused at once. That what is within these limits compiles is for
`text/grammar_compiler.py` to show.

Numbers of a JSON schema are kept exactly, or refused. llguidance reads all numbers as floats of 64
bits, and ranges of integers as integers of 64 bits. So a limit of 2**53 + 1 would be one of 2**53,
and the constant 9007199254740993 another number. What was found to be exact (llguidance 1.9, beside
plain arithmetic) is let through; `-0.0` becomes 0, and `minLength: 2.0`, an integer to JSON schema,
becomes 2.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from megatron_async.errors import RequestError

LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value has schemas by names, which may be names of keywords."""
NOTES = ("default", "examples", "example", "title", "description", "$comment")
"""Keywords that allow and forbid nothing."""
EXACT = 2**53
"""Integers up to here are floats, all of them."""
MOST_LIMIT, LEAST_LIMIT = 10**17, 1e-50
MOST_DECIMALS = 8
"""Decimals of `multipleOf`; with more, the library took other numbers for multiples."""
MOST_COUNT = 2**31
"""No text is so long."""


def exact_numbers(schema: Any) -> Any:
    """A copy of a schema of JSON values whose numbers the grammar library takes exactly.

    Raises:
        RequestError: it would take one for another number; the message names it.
    """
    if isinstance(schema, list):
        return [exact_numbers(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            value = {name: exact_numbers(part) for name, part in value.items()}
        elif key in ("const", "enum"):
            value = _constant(key, value)
        elif key in LIMITS:
            kinds = schema.get("type")
            kinds = kinds if isinstance(kinds, list) else [kinds]
            value = _limit(key, value, "integer" in kinds and "number" not in kinds)
        elif key in COUNTS:
            value = _count(key, value)
        elif key == "multipleOf":
            value = _number(key, value)
            if value <= 0:
                raise _refused(key, value, "it must be above 0")
            if isinstance(value, float) and Decimal(repr(value)).scaleb(MOST_DECIMALS) % 1:
                raise _refused(key, value, f"the grammar keeps {MOST_DECIMALS} decimals: round it")
        elif key not in NOTES:
            value = exact_numbers(value)
        found[key] = value
    return found


def _limit(key: str, value: Any, is_integer: bool) -> int | float:
    if key == "maximum" and value == 2**63 - 1 and is_integer and isinstance(value, int):
        return value  # the library's largest
    value = _number(key, value)
    if key.startswith("exclusive"):
        is_kept = abs(value) < EXACT
    else:
        is_kept = abs(value) <= EXACT or (abs(value) <= MOST_LIMIT and _is_shortest(value))
    if not is_kept or 0 < abs(value) < LEAST_LIMIT:
        raise _refused(key, value, "the grammar keeps limits up to 2**53 exactly: leave it out")
    return value


def _count(key: str, value: Any) -> int:
    value = _number(key, value)
    if not isinstance(value, int) or value < 0:
        raise _refused(key, value, "it must be an integer, 0 or more")
    if value > MOST_COUNT and key.startswith("min"):
        raise _refused(key, value, f"it must be at most {MOST_COUNT}")
    return min(value, MOST_COUNT)


def _constant(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_constant(key, part) for part in value]
    if isinstance(value, dict):
        return {name: _constant(key, part) for name, part in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    value = _number(key, value)
    if abs(value) > EXACT and not (abs(value) <= MOST_LIMIT and _is_shortest(value)):
        raise _refused(key, value, "the grammar keeps numbers up to 2**53: give it as a string")
    return value


def _number(key: str, value: Any) -> int | float:
    """A number, as an integer where it is one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(key, value, "it must be a number")
    if isinstance(value, int):
        return value
    if not math.isfinite(value):
        raise _refused(key, value, "it is beyond a float of 64 bits")
    if value.is_integer():
        return int(value)
    if float(f"{value:.15g}") != value:
        raise _refused(key, value, "the grammar keeps 15 digits: round it")
    return value


def _is_shortest(value: int | float) -> bool:
    """Whether a number is what a float of it is written as, with zeros behind its 17 digits."""
    return Decimal(repr(float(value))) == Decimal(value)


def _refused(key: str, value: Any, why: str) -> RequestError:
    is_huge = isinstance(value, int) and abs(value) >= 2**128
    shown = "a number of more than 128 bits" if is_huge else reprlib.repr(value)
    return RequestError(f"json_schema: {key}={shown} is not served: {why}.")


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
"""Place in a list; Python refuses to read some thousand digits."""
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
