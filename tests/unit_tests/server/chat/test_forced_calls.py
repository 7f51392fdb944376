# ruff: noqa: E501  (tables of cases)
"""Grammars of forced calls and of structures behind thoughts, compiled by llguidance."""

import ipaddress
import json
import re
import tracemalloc
from typing import Any

import pytest

from megatron_async.errors import RequestError
from megatron_async.server.chat.answer_pieces import CallArguments, CallBegin, OfferedTool
from megatron_async.server.chat.call_formats import FORMATS
from megatron_async.server.chat.calls_reader import CallsReader
from megatron_async.text.grammar_worker import compile_grammar, make_tokenizer
from megatron_async.text.structured_output import StructuredOutput
from tests.support.served_demo import (
    CLOCK,
    THINKING,
    WEATHER,
    answered,
    asked_chat,
    demo,
    demo_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(demo_tokenizer().backend.to_str(), 49152, [2])


def accepts(tokenizer: Any, wanted: StructuredOutput | None, text: str) -> bool:
    """Whether the text is one that the grammar lets be generated, to its end."""
    assert wanted is not None
    matcher = compile_grammar(tokenizer, wanted.source())
    assert not matcher.is_error(), matcher.get_error()
    ids = [*demo_tokenizer().tokenize(text, False), 2]
    return all(matcher.consume_token(token) for token in ids)


def grammar(**body: Any) -> StructuredOutput | None:
    return asked_chat(**body).choices[0].params.structured_output


OBJECT = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}  # fmt: skip
ARGUMENTS = '{"city": "X", "days": 1}'
WEATHER_CALL, CLOCK_CALL = (
    f'{{"name": "weather", "arguments": {ARGUMENTS}}}',
    '{"name": "clock", "arguments": {}}',
)
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>".format
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>".format
FORCED = {
    "hermes": (f"<tool_call>\n{WEATHER_CALL}\n</tool_call>", f"\n<tool_call>\n{CLOCK_CALL}\n</tool_call>"),
    "llama3_json": (WEATHER_CALL.replace("arguments", "parameters"), "; " + CLOCK_CALL.replace("arguments", "parameters")),
    "mistral": (f"[TOOL_CALLS][{WEATHER_CALL}]", f", {CLOCK_CALL}]"),
    "mistral_v11": (f"[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{ARGUMENTS}", "[TOOL_CALLS]clock[CALL_ID]000000000[ARGS]{}"),
    "mistral_v13": (f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", "[TOOL_CALLS]clock[ARGS]{}"),
    "nemotron_json": (f"<TOOLCALL>[{WEATHER_CALL}]</TOOLCALL>", f", {CLOCK_CALL}]</TOOLCALL>"),
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nX\n</parameter>\n<parameter=days>\n1\n</parameter>\n</function>\n</tool_call>",
        "\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    ),
    "deepseek_v3": (BEGIN + V3("weather", ARGUMENTS) + END, "\n" + V3("clock", "{}") + END),
    "deepseek_v31": (BEGIN + V31("weather", ARGUMENTS) + END, V31("clock", "{}") + END),
}  # fmt: skip
"""A call in each form, as the model authors' templates write it, and what a second one adds to it
before the mark that ends all, if there is one."""
LAST = {"mistral": "]", "nemotron_json": "]</TOOLCALL>", "deepseek_v3": END, "deepseek_v31": END}


def offered(*tools: dict[str, Any]) -> list[OfferedTool]:
    found = [tool["function"] for tool in tools]
    return [OfferedTool(one["name"], one.get("parameters", {"type": "object"})) for one in found]


@pytest.mark.parametrize("name", FORCED)
def test_forced_calls_are_what_the_reader_reads(name: str, tokenizer: Any) -> None:
    tools = offered(WEATHER, CLOCK)
    one, more = FORCED[name]
    two = one.removesuffix(LAST.get(name, "")) + more
    for many in (True, False):
        rules = "start: calls\n" + FORMATS[name].rules(tools, many, {})
        wanted = StructuredOutput(grammar=rules)
        assert accepts(tokenizer, wanted, one)
        assert accepts(tokenizer, wanted, two) == many
        assert not accepts(tokenizer, wanted, re.sub(r"\b1\b", '"one"', one))
        assert not accepts(tokenizer, wanted, "Hello")
    reader = CallsReader(FORMATS[name], {tool.name: tool.parameters for tool in tools})
    calls = [(WEATHER["function"]["name"], '{"city": "X", "days": 1}'), ("clock", "{}")]
    pieces = [piece for call in calls for piece in (CallBegin(call[0]), CallArguments(call[1]))]
    assert reader.push(two) + reader.end() == pieces


@pytest.mark.parametrize("name", FORMATS)
def test_many_tools_can_be_forced(name: str, tokenizer: Any) -> None:
    """A chat may offer 128; here with ten parameters each."""
    properties = {f"p{i}": {"type": "integer"} for i in range(10)}
    tools = [OfferedTool(f"t{i}", {"properties": properties}) for i in range(128)]
    wanted = StructuredOutput(grammar="start: calls\n" + FORMATS[name].rules(tools, False, {}))
    call = FORMATS[name].written("t127", '{"p0": 1, "p9": 2}')
    assert accepts(tokenizer, wanted, call)
    assert not accepts(tokenizer, wanted, call.replace("t127", "t128"))


def test_forced_values_between_tags(tokenizer: Any) -> None:
    """In the form of Qwen3-Coder, values have no quotes: the grammar holds them to the schema."""
    properties = {
        "text": {"type": "string"}, "short": {"type": "string", "maxLength": 3}, "like": {"type": "string", "pattern": "^a/+b"}, "ends": {"type": "string", "pattern": r"\\/x$"}, "money": {"type": "string", "pattern": r"\d\$"},
        "one": {"enum": ["x y", "z"]}, "number": {"type": "integer", "minimum": 5}, "sure": {"$ref": "#/$defs/sure"},
        "list": {"type": "array", "items": {"type": "integer"}}, "any": {},
        "maybe": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]}, "mixed": {"enum": ["1", 2, True]}, "plain": {"type": ["boolean", "null"]}, "high": {"type": "number", "title": "x"},
    }  # fmt: skip
    schema = {
        "properties": properties,
        "required": ["one"],
        "$defs": {"sure": {"type": "boolean"}, "unit": {"enum": ["C", "F"]}},
    }
    rules = FORMATS["qwen3_coder"].rules([OfferedTool("f", schema)], False, {})
    wanted = StructuredOutput(grammar=f"start: calls\n{rules}")

    def call(**values: str) -> str:
        parts = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        return f"<tool_call>\n<function=f>\n{parts}</function>\n</tool_call>"

    good = {"text": "a\n<b>\n\n", "short": "", "like": "a//b!", "ends": r"(\/x", "money": "5$!", "one": "x y", "number": "12", "sure": "true", "list": "[1, 2]", "any": "5", "maybe": "null", "mixed": "true", "plain": "null", "high": "-0.5e3"}  # fmt: skip
    assert accepts(tokenizer, wanted, call(**good))
    assert accepts(tokenizer, wanted, call(one="z"))
    assert not accepts(tokenizer, wanted, call(text="a"))
    for key, bad in {
        "text": "</parameter>", "short": "four", "like": "ba/b", "ends": r"\/x.", "money": "5", "one": "x", "number": "4", "sure": "yes", "list": "[a]",
        "maybe": "K", "mixed": "3", "plain": "5", "high": "05",
    }.items():  # fmt: skip
        assert not accepts(tokenizer, wanted, call(**(good | {key: bad}))), key
    with pytest.raises(RequestError, match="'a>b'"):
        FORMATS["qwen3_coder"].rules([OfferedTool("f", {"properties": {"a>b": {}}})], False, {})


def test_many_references_to_much_are_refused_at_once(tokenizer: Any) -> None:
    """Each parameter would be as much work as all of what the others refer to."""
    names = [f"p{i}" for i in range(400)]
    many = {"$defs": {"b": {"anyOf": [{"type": ["integer", "string"]}] * 400}}}
    many |= {"properties": {name: {"$ref": "#/$defs/b"} for name in names}}
    rules = FORMATS["qwen3_coder"].rules
    with pytest.raises(RequestError, match="10000 alternatives"):
        rules([OfferedTool("f", many)], False, {})
    reader = CallsReader(FORMATS["qwen3_coder"], {"f": many})
    written = FORMATS["qwen3_coder"].written("f", json.dumps(dict.fromkeys(names, 1)))
    arguments = json.loads(reader.push(written)[1].text)
    assert (arguments["p0"], arguments["p399"]) == (1, "1")
    large: dict[str, Any] = {"$defs": {"b": "x" * 100_000}}
    large |= {"properties": {name: {"type": "object"} for name in names}}
    tracemalloc.start()
    with pytest.raises(RequestError, match=r"grammar has \d+ characters"):
        rules([OfferedTool("f", large)], False, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000  # not 400 copies


def test_forced_parameters_of_several_schemas(tokenizer: Any) -> None:
    parts = [
        {"properties": {"kind": {"const": "a"}, "n": {"type": "integer"}}, "required": ["kind"]},
        {"properties": {"kind": {"const": "b"}}, "required": ["kind"]},
    ]
    tag = "<parameter={}>\n{}\n</parameter>\n".format

    def accepted(schema: dict[str, Any], *pairs: tuple[str, str]) -> bool:
        rules = FORMATS["qwen3_coder"].rules([OfferedTool("f", schema)], False, {})
        wanted = StructuredOutput(grammar=f"start: calls\n{rules}")
        inside = "".join(tag(*pair) for pair in pairs)
        call = f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"
        return accepts(tokenizer, wanted, call)

    assert accepted({"anyOf": parts}, ("kind", "b"))
    assert accepted({"anyOf": parts}, ("kind", "a"), ("n", "5"))
    assert not accepted({"anyOf": parts}, ("kind", "c"))
    assert not accepted({"allOf": parts}, ("n", "5"))
    assert accepted({"additionalProperties": {"type": "integer"}}, ("x", "5"), ("y", "6"))
    assert not accepted({"additionalProperties": {"type": "integer"}}, ("x", "five"))


ADDRESSES = ("::", "::1", "1::", "1:2::3", "1:2:3:4:5:6:7:8", "1::2:3:4:5:6:7", "1::2::3", ":1", "1:2:3", "1:2:3:4:5:6:7:8:9", "12345::", "g::", "1:2:3:4:5:6:7::")  # fmt: skip


def test_forced_addresses_beside_pythons_own(tokenizer: Any) -> None:
    schema = {"properties": {"x": {"type": "string", "format": "ipv6"}}, "required": ["x"]}
    rules = FORMATS["qwen3_coder"].rules([OfferedTool("f", schema)], False, {})
    wanted = StructuredOutput(grammar=f"start: calls\n{rules}")
    for text in ADDRESSES:
        try:
            is_right = bool(ipaddress.IPv6Address(text))
        except ValueError:
            is_right = False
        call = FORMATS["qwen3_coder"].written("f", json.dumps({"x": text}))
        assert accepts(tokenizer, wanted, call) == is_right, text


def test_forced_texts_of_alternatives(tokenizer: Any) -> None:
    """Written as pydantic writes `Optional` ones. What the grammar cannot hold is refused by name."""
    limited = {"type": "string", "maxLength": 3}
    rules = FORMATS["qwen3_coder"].rules
    for one in (
        {"anyOf": [limited, {"type": "null"}]}, {"type": ["string", "null"], "maxLength": 3},
        {"allOf": [{"$ref": "#/$defs/a"}]}, {"oneOf": [limited, {"const": "none"}]},
        {"pattern": "^.{0,3}$"},
    ):  # fmt: skip
        schema = {"properties": {"x": one}, "required": ["x"], "$defs": {"a": limited}}
        wanted = StructuredOutput(
            grammar=f"start: calls\n{rules([OfferedTool('f', schema)], False, {})}"
        )
        for text, is_right in (("abc", True), ("abcd", False), ("none", "oneOf" in one)):
            call = FORMATS["qwen3_coder"].written("f", json.dumps({"x": text}))
            nullable = text == "none" and "null" in str(one)
            assert accepts(tokenizer, wanted, call) == (is_right and not nullable), (one, text)
        null = FORMATS["qwen3_coder"].written("f", '{"x": null}')
        assert accepts(tokenizer, wanted, null) == ("null" in str(one))
    for wrong, words in (
        ({"patternProperties": {"^x": {}}}, "f has patternProperties"),
        ({"properties": {}, "minProperties": 1}, "f has minProperties"),
        (
            {"properties": {"x": {"type": "string", "format": "iri"}}},
            "'x' of f has the format 'iri'",
        ),
        ({"properties": {"x": {"allOf": [limited, {"pattern": "a"}]}}}, "'x' of f has limits of a"),
        ({"allOf": [{"properties": {}}, {"if": {}}]}, "f has if"),
        ({"$ref": "#/$defs/none"}, "f has the .ref '#/.defs/none'"),
        ({"properties": {"x": {"$ref": "#/$defs/none"}}}, "'x' of f has the .ref '#/.defs/none'"),
        ({"properties": {"x": {"$ref": "#named"}}}, "'x' of f has the .ref '#named'"),
        ({"properties": {"x": {"anyOf": [{"$ref": "file:///x"}]}}}, "'x' of f has the .ref 'file"),
        ({"properties": {"x": {"type": "string", "not": {"const": "a"}}}}, "'x' of f has not"),
        (
            {"properties": {"x": {"$ref": "#/$defs/a", "maxLength": 1}}, "$defs": {"a": limited}},
            "'x' of f has maxLength beside a .ref",
        ),
        ({"properties": {"x": False}}, "'x' of f has false"),
    ):
        with pytest.raises(RequestError, match=words):
            rules([OfferedTool("f", wrong)], False, {})


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ("uri", "https://a.b/c?d=e%20#f", "a b"), ("hostname", "a-b.c", "-a.b"), ("duration", "P1DT2H", "PT"),
        ("time", "23:59:59Z", "24:00:00Z"), ("ipv4", "255.0.0.1", "256.0.0.1"), ("date", "2026-12-31", "2026-13-01"),
        ("date", "2026-11-28", "tomorrow"), ("time", "23:59:59.5Z", "noon"), ("date-time", "2026-11-28T10:00:00+01:00", "2026-11-28"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123"), ("email", "a@b.c", "a"), ("ipv4", "10.0.0.1", "10.0.0"),
    ],
)  # fmt: skip
def test_forced_formats_between_tags(tokenizer: Any, form: str, good: str, bad: str) -> None:
    schema = {"properties": {"x": {"type": "string", "format": form}}, "required": ["x"]}
    rules = FORMATS["qwen3_coder"].rules([OfferedTool("f", schema)], False, {})
    wanted = StructuredOutput(grammar=f"start: calls\n{rules}")
    call = FORMATS["qwen3_coder"].written
    assert accepts(tokenizer, wanted, call("f", json.dumps({"x": good})))
    assert not accepts(tokenizer, wanted, call("f", json.dumps({"x": bad})))


@pytest.mark.parametrize("parameters", [{"description": "x"}, {"properties": {"a": {"type": "integer"}}}, {"type": ["object", "null"]}, {"type": None}, {"$ref": "#/$defs/x", "$defs": {"x": {}}}])  # fmt: skip
def test_forced_arguments_are_an_object(tokenizer: Any, parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    wanted = grammar(tools=[tool], tool_choice="required")
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert accepts(tokenizer, wanted, call % '{"a": 1}')
    for other in ("5", "null", "[]", '"{}"'):
        assert not accepts(tokenizer, wanted, call % other)


@pytest.mark.parametrize("thinks", [False, True])
def test_tools_beside_a_format(tokenizer: Any, thinks: bool) -> None:
    """The answer is calls, or of the format."""
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    served, before = (demo(THINKING), "Hm</think>\n") if thinks else (demo(), "")
    for body in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}},
        {"structured_outputs": {"regex": r'\{"a": 1\}'}}, {"structured_outputs": {"choice": ['{"a": 1}']}},
        {"structured_outputs": {"grammar": 'start: call\ncall: "{" calls\ncalls: "\\"a\\": 1}"'}},
    ):  # fmt: skip
        asked = asked_chat(
            served, tools=[CLOCK], chat_template_kwargs={"enable_thinking": True}, **body
        )
        wanted = asked.choices[0].params.structured_output
        for good in (call, f"{call}\n{call}", '{"a": 1}'):
            assert accepts(tokenizer, wanted, before + good), (good, wanted)
        for bad in ("Hello", '{"a": 3}', call + '{"a": 1}', call.replace("clock", "other")):
            assert not accepts(tokenizer, wanted, before + bad)
        for text in (call, '{"a": 1}'):
            choice = answered(asked, before + text, served, "grammar")["choices"][0]
            calls = choice["message"].get("tool_calls", [])
            assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
            assert choice["message"]["content"] == (None if text == call else text)
            assert [one["function"]["name"] for one in calls] == ["clock"] * (text == call)
        assert not accepts(tokenizer, grammar(tools=[CLOCK], tool_choice="none", **body), call)


@pytest.mark.parametrize("name", FORCED)
def test_calls_of_strict_tools_behind_text(tokenizer: Any, name: str) -> None:
    schema = WEATHER["function"]["parameters"]
    form = FORMATS[name]
    for special in ({}, {form.marks[0]: 5}):
        rules = form.rules_behind_text([OfferedTool("weather", schema)], True, special)
        assert (
            compile_grammar(tokenizer, StructuredOutput(grammar=rules).source()).get_error() == ""
        )
    wanted = StructuredOutput(
        grammar=form.rules_behind_text([OfferedTool("weather", schema)], True, {})
    )
    call = form.written("weather", ARGUMENTS).replace("000000000", "abcDEF123")
    for text in ("", "Hello\n", f"a < b > {form.marks[0][:-1]}", "x {", call):
        assert accepts(tokenizer, wanted, text), text
    assert form.is_bare or accepts(tokenizer, wanted, f"Let me see >\n\n{call}")
    for bad in (
        call.replace("weather", "other"),
        call.replace("1", "one"),
        call[:-1],
        form.marks[0],
    ):
        assert not accepts(tokenizer, wanted, bad)
        assert form.is_bare or not accepts(tokenizer, wanted, f"So: {bad}")


def test_strict_tools_hold_free_answers() -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    wanted = grammar(tools=[CLOCK, strict])
    assert wanted is not None
    assert "FREE calls" in (wanted.grammar or "")
    assert not asked_chat(tools=[CLOCK, strict]).style.chat.plan.only_calls
    strict["function"]["strict"] = False  # type: ignore[index]
    assert grammar(tools=[CLOCK, strict]) is None


def test_choices_of_tools(tokenizer: Any) -> None:
    tools = [WEATHER, CLOCK]
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    clock = call % ("clock", "{}")
    weather = call % ("weather", '{"city": "X", "days": 1}')
    required = grammar(tools=tools, tool_choice="required")
    assert accepts(tokenizer, required, f"{clock}\n{weather}")
    single = grammar(tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert not accepts(tokenizer, single, f"{clock}\n{weather}")
    named = grammar(tools=tools, tool_choice={"type": "function", "function": {"name": "clock"}})
    assert accepts(tokenizer, named, clock)
    assert not accepts(tokenizer, named, weather)
    # Arguments that a schema does not name are none of the function's, unless it says so.
    assert not accepts(tokenizer, named, call % ("clock", '{"x": 1}'))
    free = {"function": {"name": "f", "parameters": {"properties": {}, "minProperties": 1}}}
    either = grammar(tools=[free], tool_choice="required")
    assert accepts(tokenizer, either, call % ("f", '{"x": 1}'))
    for choice in ("auto", "none", None):
        assert grammar(tools=tools, tool_choice=choice) is None


@pytest.mark.parametrize(
    ("body", "good", "bad"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}}, '{"a": 1}', '{"a": 3}'),
        ({"response_format": {"type": "json_object"}}, '{"b": []}', "[]"),
        ({"response_format": {"type": "json_object", "schema": OBJECT}}, '{"a": 1}', '{"a": 3}'),
        ({"structured_outputs": {"json": json.dumps(OBJECT)}}, '{ "a": 2}', '{"a": 3}'),
        ({"structured_outputs": {"json": OBJECT, "disable_any_whitespace": True}}, '{"a":2}', '{ "a": 2}'),
        ({"structured_outputs": {"regex": "a/b|c+"}}, "ccc", "d"),
        ({"structured_outputs": {"regex": "a/b|c+"}}, "a/b", "ab"),
        ({"structured_outputs": {"regex": r"a\\/b[/]\/"}}, r"a\/b//", "a/b//"),
        ({"structured_outputs": {"choice": ["yes", 'n"o']}}, 'n"o', "maybe"),
        ({"structured_outputs": {"grammar": 'start: "a" start?'}}, "aaa", "b"),
        ({"structured_outputs": {"grammar": 'start: wanted | "a" start\nwanted: "start }" thought\nthought: blank\nblank: /[{]/ %json {"const": "start"}\n'}}, 'astart }{"start"', "wanted }{"),
    ],
)  # fmt: skip
def test_formats_alone_and_behind_a_thought(body: dict[str, Any], good: str, bad: str, tokenizer):
    plain = grammar(**body)
    assert accepts(tokenizer, plain, good)
    assert not accepts(tokenizer, plain, bad)
    served = demo(THINKING)
    inside = asked_chat(served, chat_template_kwargs={"enable_thinking": True}, **body)
    assert inside.style.chat.starts_in_thought
    wanted = inside.choices[0].params.structured_output
    assert accepts(tokenizer, wanted, f"Let me <b>\nthink</think>\n\n{good}")
    assert not accepts(tokenizer, wanted, f"Let me think</think>\n\n{bad}")
    assert not accepts(tokenizer, wanted, good)
    outside = asked_chat(served, chat_template_kwargs={"enable_thinking": False}, **body)
    assert not outside.style.chat.starts_in_thought
    assert accepts(tokenizer, outside.choices[0].params.structured_output, good)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_forced_call_behind_a_thought(name: str, tokenizer: Any) -> None:
    """A parameter may have the name of a grammar's first rule."""
    template = THINKING + ("{# <function= <parameter= #}" if name == "qwen3_coder" else "")
    parameters = {"properties": {"start": {"type": "integer"}}, "required": ["start"]}
    tool = {"type": "function", "function": {"name": "start", "parameters": parameters}}
    asked = asked_chat(
        demo(template),
        tools=[tool],
        tool_choice="required",
        chat_template_kwargs={"enable_thinking": True},
    )
    call = FORMATS[name].written("start", '{"start": 5}')
    wanted = asked.choices[0].params.structured_output
    assert accepts(tokenizer, wanted, f"Hm <tool_call>\n</think>\n\n{call}")
    assert not accepts(tokenizer, wanted, f"Hm</think>{call.replace('start', 'wanted')}")
    message = answered(asked, f"Hm</think>\n\n{call}", demo(template))["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "start", "arguments": '{"start": 5}'}
    assert (message["content"], message["reasoning_content"]) == (None, "Hm")
