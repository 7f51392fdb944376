# ruff: noqa: E501  (tables of cases)
"""Numbers of schemas beside plain arithmetic: kept exactly, or refused by name."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from megatron_async.errors import RequestError
from megatron_async.text.grammar_limits import EXACT, exact_numbers
from megatron_async.text.grammar_worker import compile_grammar, make_tokenizer
from megatron_async.text.structured_output import StructuredOutput
from tests.support.served_demo import demo_tokenizer

BIG, INF = EXACT, float("inf")
HOLDS = {
    "minimum": int.__ge__, "maximum": int.__le__, "exclusiveMinimum": int.__gt__, "exclusiveMaximum": int.__lt__,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(demo_tokenizer().backend.to_str(), 49152, [2])


def accepts(tokenizer: Any, schema: Any, text: str) -> bool:
    matcher = compile_grammar(tokenizer, StructuredOutput(json_schema=schema).source())
    assert not matcher.is_error(), matcher.get_error()
    ids = [*demo_tokenizer().tokenize(text, False), 2]
    return all(matcher.consume_token(token) for token in ids)


def is_served(schema: Any) -> bool:
    with contextlib.suppress(RequestError):
        exact_numbers(schema)
        return True
    return False


@pytest.mark.parametrize("key", HOLDS)
@pytest.mark.parametrize(
    "limit",
    [0, -7, BIG - 1, BIG, -BIG, BIG + 1, BIG + 2, BIG + 3, -BIG - 1, 10**16, 10**17, -(10**17), 10**17 + 8, 2**60, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 10**30],
)  # fmt: skip
def test_limits_of_integers(tokenizer: Any, key: str, limit: int) -> None:
    schema = {"type": "integer", key: limit}
    if not is_served(schema):
        assert abs(limit) >= EXACT
        return
    for value in range(limit - 2, limit + 3):
        assert accepts(tokenizer, schema, str(value)) == HOLDS[key](value, limit), value


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": 1.0}, "1", "0"), ({"type": "integer", "minimum": -0.0}, "0", "-1"),
        ({"type": "integer", "maximum": 2**63 - 1}, str(2**63 - 1), str(2**63)),
        ({"type": ["integer", "null"], "maximum": 2**63 - 1}, str(2**63 - 1), str(2**63)),
        ({"type": "number", "minimum": 0.1}, "0.1", "0.09999"), ({"type": "number", "maximum": 1e-7}, "0.0000001", "0.00000011"),
        ({"const": -0.0}, "0", "1"), ({"const": 1.0}, "1", "2"), ({"enum": [BIG, "a"]}, str(BIG), str(BIG + 1)), ({"enum": [0.1, 10**17]}, str(10**17), "0.2"),
        ({"type": "string", "minLength": 2.0}, '"ab"', '"a"'), ({"type": "string", "maxLength": 1.0}, '"a"', '"ab"'),
        ({"type": "string", "maxLength": 2**63}, '"a"', "1"), ({"type": "array", "items": {"type": "integer"}, "maxItems": 1.0}, "[1]", "[1,2]"),
        ({"type": "object", "properties": {"const": {"type": "integer", "minimum": 5.0}}, "required": ["const"], "additionalProperties": False}, '{"const":5}', '{"const":4}'),
        ({"type": "number", "multipleOf": 3e-8}, "0.00000006", "0.00000007"),
        ({"type": "integer", "multipleOf": 3.0, "default": BIG + 1, "examples": [{"minimum": BIG + 1}]}, "6", "7"),
    ],
)  # fmt: skip
def test_numbers_that_are_kept(tokenizer: Any, schema: Any, good: str, bad: str) -> None:
    assert accepts(tokenizer, schema, good)
    assert not accepts(tokenizer, schema, bad)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"enum": [1, BIG + 1]}, f"enum={BIG + 1}.*as a string"), ({"const": {"a": [BIG + 1]}}, f"const={BIG + 1}"), ({"const": -(2**63)}, "const=-9223372036854775808"),
        ({"const": 123456789012345.678}, "const=.*15 digits"), ({"anyOf": [{"items": {"maximum": BIG + 1}}]}, f"maximum={BIG + 1}"),
        ({"$defs": {"x": {"minimum": -BIG - 1}}}, "minimum=-9007199254740993"), ({"maximum": INF}, "maximum=inf"), ('{"const": 1e400}', "const=inf"), ({"minimum": 5e-324}, "minimum=5e-324"),
        ({"type": "number", "maximum": 1e22}, "maximum="), ({"type": ["number", "integer"], "maximum": 2**63 - 1}, "maximum="), ({"minLength": -1}, "minLength=-1"), ({"maxItems": 1.5}, "maxItems=1.5"), ({"minItems": 2**63}, "minItems="),
        ({"multipleOf": 0}, "multipleOf=0.*above 0"), ({"multipleOf": -3}, "multipleOf=-3"), ({"multipleOf": 4.16e-9}, "multipleOf=4.16e-09.*8 decimals"), ({"exclusiveMinimum": True}, "exclusiveMinimum=True.*a number"),
        ({"maximum": "5"}, "maximum='5'"), ({"minimum": None}, "minimum=None"), ({"maximum": 10**4000}, "maximum=a number of more than 128 bits"), ({"maximum": 10**5000}, "no JSON object"),
    ],
)  # fmt: skip
def test_numbers_that_are_refused_by_name(schema: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        StructuredOutput(json_schema=schema).source()
    if isinstance(schema, dict) and "no JSON" not in named and float("inf") not in schema.values():
        grammar = f'start: "%json {{" a b\na: %json {{"const": 1}}\nb: %json {json.dumps(schema)}\n'
        with pytest.raises(RequestError, match=named):
            StructuredOutput(grammar=grammar).source()


def test_a_schema_in_a_grammar_is_no_deeper_than_one_alone() -> None:
    for depth in range(600, 1200, 100):  # Python reads up to some 1000, and cannot go through them
        schema = '{"a":' * depth + "1" + "}" * depth
        with pytest.raises(RequestError, match="512 deep"):
            StructuredOutput(json_schema=schema).source()
        with pytest.raises(RequestError, match="512 deep"):
            StructuredOutput(grammar=f"start: %json {schema}").source()
