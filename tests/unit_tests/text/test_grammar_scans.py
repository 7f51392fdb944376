"""Expressions, grammars and schemas are looked at in linear time, whatever is in them."""

from __future__ import annotations

import contextlib
import random
import time

import pytest

from megatron_async.errors import RequestError
from megatron_async.text import grammar_limits
from megatron_async.text.structured_output import StructuredOutput

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
