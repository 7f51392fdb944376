"""Schemas, grammars, expressions and choices compile at their limits, and are refused beyond."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megatron_async import StructuredOutput
from megatron_async.errors import RequestError
from megatron_async.text import grammar_limits
from megatron_async.text.grammar_compiler import GrammarCompiler
from megatron_async.text.grammar_limits import (
    MAX_CHARACTERS,
    MAX_CHOICES,
    MAX_REGEX_DEPTH,
    MAX_RULES,
    MAX_SCHEMA_DEPTH,
    MAX_WIDTH,
)
from tests.support.letter_tokenizers import make_ascii_tokenizer


def chained_schema(links: int) -> StructuredOutput:
    names: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(links)}
    names[f"d{links}"] = {"type": "integer"}
    return StructuredOutput(json_schema={"$defs": names, "$ref": "#/$defs/d0"})


def chained_objects(depth: int) -> StructuredOutput:
    """Each link is three objects: the schema, its properties, the reference."""
    links = (depth - 3) // 3
    names: dict[str, Any] = {
        f"d{i}": {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}},
            "required": ["a"],
            "additionalProperties": False,
        }
        for i in range(links)
    }
    names[f"d{links}"] = {"type": "integer"}
    return StructuredOutput(json_schema={"$defs": names, "$ref": "#/$defs/d0"})


def chained_rules(count: int) -> StructuredOutput:
    rules = [f'r{i}: "a" (r{i + 1} "b")* "c"' for i in range(count - 2)]
    return StructuredOutput(grammar="\n".join(["start: r0", *rules, f'r{count - 2}: "a"']))


def nested_regex(depth: int) -> StructuredOutput:
    return StructuredOutput(regex="(" * depth + r"a\([(]" + "b)*" * depth)


def choices(count: int) -> StructuredOutput:
    return StructuredOutput(choice=[f"option {i}" for i in range(count)])


def long_regex(characters: int) -> StructuredOutput:
    return StructuredOutput(regex="ab" * (characters // 2) + "a" * (characters % 2))


def long_schema(characters: int) -> StructuredOutput:
    text = '{"type": "string", "description": ""}'
    return StructuredOutput(
        json_schema=text.replace('""', '"' + "x" * (characters - len(text)) + '"')
    )


def long_grammar(characters: int) -> StructuredOutput:
    text = 'start: "a" // '
    return StructuredOutput(grammar=text + "x" * (characters - len(text)))


def long_choice(characters: int) -> StructuredOutput:
    return StructuredOutput(choice=["a" * (characters - 5), "b" * 5])


def optional(count: int) -> StructuredOutput:
    """Properties of one object, some of them by way of alternatives."""
    names = {f"k{i}": {"type": "integer"} for i in range(count - 101)}
    other = {"type": "object", "properties": {f"o{i}": {} for i in range(99)}}
    own = {"type": "object", "properties": {**names, "r": {}}, "required": ["r", "r"]}
    return StructuredOutput(
        json_schema={
            "$defs": {"other": other, "b": {"anyOf": [{"$ref": "#/$defs/b"}, own]}},
            "properties": {"a": {"anyOf": [{"$ref": "#/$defs/other"}, own]}},
            "required": ["a"],
        }
    )


KINDS = [
    # With the outermost object and the last definition, a chain is as deep as it has links plus 2.
    (lambda size: chained_schema(size - 2), MAX_SCHEMA_DEPTH, "json_schema.*more than 512 deep"),
    (chained_rules, MAX_RULES, "grammar has 501 rules.*500 are allowed"),
    (optional, MAX_WIDTH, "a value with 501 optional properties and alternatives, and 500"),
    (nested_regex, MAX_REGEX_DEPTH, "regex nests groups 65 deep, and 64 are allowed"),
    (choices, MAX_CHOICES, "choice has 10001 texts, and 10000 are allowed"),
    (long_schema, MAX_CHARACTERS, "json_schema has 262145 characters, and 262144 are allowed"),
    (long_regex, MAX_CHARACTERS, "regex has 262145 characters"),
    (long_grammar, MAX_CHARACTERS, "grammar has 262145 characters"),
    (long_choice, MAX_CHARACTERS, "choice has 262145 characters"),
]


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(make_ascii_tokenizer(), 128)
    made.limit_s = 60.0
    yield made
    made.close()


@pytest.mark.parametrize(("make", "limit", "message"), KINDS)
def test_at_the_limit_and_beyond(make: Any, limit: int, message: str, compiler: GrammarCompiler):
    compiler.start(compiler.begin(make(limit)).result())
    with pytest.raises(RequestError, match=message):
        make(limit + 1).source()


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {f"k{i}": {} for i in range(MAX_WIDTH)}}, '{"k499": 1'),
        ({"anyOf": [{"type": "array", "items": {"const": i}} for i in range(MAX_WIDTH)]}, "[499]"),
        (
            {"anyOf": [{"properties": {f"k{i}": {}}} for i in range(MAX_WIDTH // 2)]},
            '{"k249": 1',
        ),
    ],
)  # fmt: skip
def test_the_widest_schema_is_followed(schema: dict[str, Any], text: str, compiler):
    grammar = compiler.start(compiler.begin(StructuredOutput(json_schema=schema)).result())
    mask = np.zeros(4, np.int32)
    for token in make_ascii_tokenizer().tokenize(text):
        grammar.mask(mask)
        assert mask[token // 32] >> token % 32 & 1, grammar.failure
        grammar.accept(token)


def test_the_width_of_schemas_that_refer_to_much_takes_linear_time() -> None:
    names = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(200)}
    with pytest.raises(RequestError, match="optional properties and alternatives"):
        grammar_limits.check_width({"$defs": names})
    loop: dict[str, Any] = {
        "required": [[]],
        "anyOf": [{"$ref": "#"}, {"properties": {str(i): {} for i in range(MAX_WIDTH)}}],
    }
    with pytest.raises(RequestError, match=f"with {MAX_WIDTH + 2} optional"):
        grammar_limits.check_width(loop)


def test_the_deepest_schema_of_objects_compiles(compiler: GrammarCompiler) -> None:
    compiler.start(compiler.begin(chained_objects(MAX_SCHEMA_DEPTH)).result())


def test_a_schema_may_refer_to_itself_and_a_text_may_look_like_a_rule() -> None:
    grammar_limits.check_schema({"items": {"$ref": "#"}, "not": {"$ref": "#/items"}})
    grammar_limits.check_schema({"$ref": "#/nowhere/0", "anyOf": [{"$ref": "other.json"}]})
    grammar_limits.check_schema({"a/b": [{"$ref": "#/a~1b/0"}], "$ref": "#/a~1b"})
    grammar_limits.check_regex(r"\(" * 500 + "[(]" * 500)
    grammar_limits.check_grammar('start: "a: b: c:"\n' * 200)


@pytest.mark.parametrize("as_text", [False, True])
def test_what_python_cannot_nest_is_refused_with_its_name(as_text: bool) -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    text = '{"items":' * 20_000 + "{}" + "}" * 20_000
    with pytest.raises(RequestError, match="json_schema is nested") as failure:
        StructuredOutput(json_schema=text if as_text else deep).source()
    assert len(str(failure.value)) < 500
    while deep:  # or Python would free it recursively
        deep = deep.pop("items")


def test_long_values_are_not_repeated_in_messages() -> None:
    for wanted in (
        StructuredOutput(choice=["a" * 10_000, 5]),
        StructuredOutput(json_schema="[" + "1," * 10_000),
        StructuredOutput(regex=["a"] * 10_000),
    ):
        with pytest.raises(RequestError) as failure:
            wanted.source()
        assert len(str(failure.value)) < 500


def test_chains_that_crash_the_library_or_never_end_are_told(monkeypatch):
    monkeypatch.setattr(grammar_limits, "MAX_SCHEMA_DEPTH", 10**9)
    monkeypatch.setattr(grammar_limits, "MAX_RULES", 10**9)
    compiler = GrammarCompiler(make_ascii_tokenizer(), 128)
    compiler.limit_s = 0.5
    endless = StructuredOutput(json_schema={"type": "integer", "multipleOf": 9999991})
    jobs = [compiler.begin(each) for each in (chained_schema(5000), chained_rules(9000), endless)]
    for job, message in zip(jobs, ("SIG", "SIG", "longer than 0.5 s of CPU time"), strict=True):
        with pytest.raises(RequestError, match=message):
            job.result()
    assert compiler.begin(endless) is jobs[2]  # not tried again
    compiler.limit_s = 60.0
    compiler.start(compiler.begin(StructuredOutput(regex="[ab]+")).result())
    compiler.close()


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"json_schema": {"$ref": "#"}}, "it allows no text"),
        ({"grammar": 'start: %json {"not": {}}'}, r"at 1\(8\): failed .*: Unimplemented keys.*"),
        ({"regex": "a("}, r"at 1\(8\): invalid .* parse error: a\( error: unclosed group"),
    ],
)  # fmt: skip
def test_what_does_not_compile_is_told_in_one_line(wanted: dict[str, Any], told: str, compiler):
    """Break `_in_one_line`: return the error as it is."""
    with pytest.raises(RequestError) as caught:
        compiler.begin(StructuredOutput(**wanted)).result()
    assert re.fullmatch(rf"structured_output cannot be compiled: {told}\.", str(caught.value))
