# ruff: noqa: E501  (tables of cases)
"""Schemas, expressions and grammars: numbers are kept exactly or refused by name, and all is looked
at in linear time."""

import contextlib
import json
import random
import time
from typing import Any

import pytest

from megatron_async.errors import RequestError
from megatron_async.text import grammar_limits
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


SIZE = 2**15
"""Characters; a scan from each of them to the end takes a minute."""


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "[" * SIZE},
        {"regex": "[" * SIZE + "\\"},
        {"regex": "[^" * (SIZE // 2)},
        {"regex": "[\\" * (SIZE // 2)},
        {"regex": "\\" * SIZE},
        {"regex": "()" * (SIZE // 2)},
        {"grammar": "a" * SIZE},
        {"grammar": "a." + "1" * SIZE},
        {"grammar": "a[" * (SIZE // 2)},
        {"grammar": "a{\n" * (SIZE // 3)},
        {"grammar": "a" + " \n" * (SIZE // 2)},
        {"grammar": " \n" * (SIZE // 2)},
        {"grammar": "?!" * (SIZE // 2)},
        {"grammar": "start: " + '%json{"' * (2**18 // 7 - 1)},
        {"grammar": "start: " + '%json{"a":[' * (2**18 // 11 - 1)},
        {"json_schema": {"$ref": "#/" + "%" * SIZE}},
        {"json_schema": {"$ref": "#" + "/~1" * (SIZE // 3)}},
        {"json_schema": {"a": [1], "$ref": "#/a/" + "9" * 5000}},
        {"json_schema": {"a": [{}] * (SIZE // 4)}},
        {"choice": ["(" * (SIZE // 16)] * 16},
    ],
    ids=lambda given: next(f"{name} {str(value)[:9]}" for name, value in given.items()),
)  # fmt: skip
def test_a_hostile_text_takes_little_time(given: dict) -> None:
    start = time.process_time()
    with contextlib.suppress(RequestError):
        StructuredOutput(**given).source()
    assert time.process_time() - start < 1


def depth_by_hand(regex: str) -> int:
    """Groups inside one another, read character by character; a class without an end goes on to
    the end."""
    depth = deepest = place = 0
    while place < len(regex):
        letter = regex[place]
        place += 2 if letter == "\\" else 1
        if letter == "[":
            place += regex[place : place + 1] == "^"
            place += regex[place : place + 1] == "]"
            while place < len(regex) and regex[place] != "]":
                place += 2 if regex[place] == "\\" else 1
            place += 1
        depth += (letter == "(") - (letter == ")")
        deepest = max(deepest, depth)
    return deepest


def test_groups_are_counted_as_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)
    for _ in range(2000):
        regex = "".join(draw.choices("(()[]^\\a\n", k=draw.randrange(12)))
        deepest = depth_by_hand(regex)
        monkeypatch.setattr(grammar_limits, "MAX_REGEX_DEPTH", deepest)
        grammar_limits.check_regex(regex)
        if deepest:
            monkeypatch.setattr(grammar_limits, "MAX_REGEX_DEPTH", deepest - 1)
            with pytest.raises(RequestError, match="regex nests"):
                grammar_limits.check_regex(regex)


@pytest.mark.parametrize(
    "given",
    [
        {"json_schema": '{{"enum": [{}]}}'.format(", ".join(map(str, range(30_000))))},
        {"regex": "a?" * 2**16},
        {"grammar": "start: " + '"a" ' * 2**15},
    ],
    ids=["schema", "regex", "grammar"],
)  # fmt: skip
def test_many_answers_of_one_request_are_checked_once(given: dict) -> None:
    """The engine's thread does that for each answer, and no step begins meanwhile."""
    start = time.process_time()
    first = StructuredOutput(**given).fixed().source()
    once = time.process_time() - start
    for _ in range(128):
        assert StructuredOutput(**given).fixed().source() == first
    assert time.process_time() - start < 20 * once + 0.1
