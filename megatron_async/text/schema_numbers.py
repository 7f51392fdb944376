"""Numbers of a JSON schema: they are kept exactly, or refused.

llguidance reads all numbers as floats of 64 bits, and ranges of integers as integers of 64 bits. So
a limit of 2**53 + 1 would be one of 2**53, and the constant 9007199254740993 another number. What
was found to be exact (llguidance 1.9, beside plain arithmetic) is let through; `-0.0` becomes 0,
and `minLength: 2.0`, an integer to JSON schema, becomes 2.
"""

from __future__ import annotations

import math
import reprlib
from decimal import Decimal
from typing import Any

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
"""Of `multipleOf`; with more, the library took other numbers for multiples."""
MOST_COUNT = 2**31
"""No text is so long."""


def exact_numbers(schema: Any) -> Any:
    """A copy of a schema whose numbers the grammar library takes exactly.

    Args:
        schema: JSON values.

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
