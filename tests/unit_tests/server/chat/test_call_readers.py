# ruff: noqa: E501  (tables of cases)
"""Readers of calls: all forms, whole and cut at every character."""

import json
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.errors import ConfigurationError
from megatron_async.server.chat.answer_pieces import (
    CallArguments,
    CallBegin,
    CallReader,
    Content,
    Piece,
    Thought,
)
from megatron_async.server.chat.call_formats import FORMATS, format_of_template
from megatron_async.server.chat.calls_reader import CallsReader
from megatron_async.server.chat.thoughts import ThoughtReader

BY_MARKS = [name for name, form in FORMATS.items() if form.marks]
Found = tuple[str, str, list[tuple[str, str]]]
TOOLS: dict[str, dict[str, Any]] = {
    "f": {"type": "object", "properties": {}},
    "g": {"type": "object", "properties": {}},
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "high": {"type": "number"},
            "sure": {"type": "boolean"}, "nothing": {"type": "null"}, "at": {"$ref": "#/$defs/place"},
            "all": {"type": "array", "items": {"type": "integer"}}, "maybe": {"type": ["integer", "null"]},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "unit": {"enum": ["1", 2]},
            "fixed": {"const": 3}, "untyped": {"description": "x"}, "nullable": {"type": "boolean", "nullable": True},
            "unit_or_none": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]}, "itself": {"$ref": "#/$defs/itself"},
        },
        "$defs": {
            "place": {"type": "object"}, "unit": {"enum": ["1", "null"]},
            "itself": {"anyOf": [{"$ref": "#/$defs/itself"}, {"allOf": [{"$ref": "#/$defs/itself"}]}, {"type": "integer"}]},
        },
    },
}  # fmt: skip


def reader(name: str, is_forced: bool = False) -> CallsReader:
    return CallsReader(FORMATS[name], TOOLS, is_forced)


def read(reader: CallReader, parts: list[str]) -> Found:
    """Thoughts, content, and calls with their arguments."""
    pieces: list[Piece] = []
    for part in parts:
        pieces += reader.push(part)
    pieces += reader.end()
    thoughts = content = ""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        match piece:
            case Thought(text):
                thoughts += text
            case Content(text):
                content += text
            case CallBegin(name):
                calls.append((name, ""))
            case CallArguments(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return thoughts, content, calls


def read_anyhow(name: str, text: str, is_forced: bool = False) -> Found:
    """What a text is read as; the same however it is cut."""
    whole = read(reader(name, is_forced), [text])
    assert read(reader(name, is_forced), list(text)) == whole
    for cut in range(len(text) + 1):
        assert read(reader(name, is_forced), [text[:cut], text[cut:]]) == whole, text[:cut]
    return whole


ARGUMENTS = '{"city": "Köln }]\\" {</tool_call>", "days": [1, {"a": null}], "x": {}}'
WEATHER = ("weather", ARGUMENTS)
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
HERMES_F = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
XML_CALL = ("weather", '{"city": "Köln", "days": 3}')
XML_F = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
F = ("f", "{}")
CASES = [
    ("hermes", HERMES, "", [WEATHER]),
    ("hermes", f"Let me see.\n\n{HERMES}\n{HERMES}\n", "Let me see.\n\n", [WEATHER, WEATHER]),
    ("hermes", f"first {HERMES_F} then {HERMES_F} last\n", "first  then  last\n", [F, F]),
    ("hermes", f"\n\n{HERMES}\nDone <b>", "\nDone <b>", [WEATHER]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1e400, "i": 9007199254740993}}</tool_call>', "", [("f", '{"n": 1e400, "i": 9007199254740993}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud83d\"}"}</tool_call>', "", [("f", r'{"a": "\ud83d"}')]),
    ("hermes", '<tool_call>\n{"name": "f"}\n{"name": "g"}\n</tool_call>', "", [F, ("g", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}', "", [F]),
    ("hermes", '<tool_call>{"name": "f"}\n</tool_', "", [F]),
    ("hermes", '<tool_call>{"name": "f"}<tool_call>{"name": "g"}</tool_call>', "", [F, ("g", "{}")]),
    ("hermes", f"Write a <tool_call> tag: {HERMES_F}", "Write a <tool_call> tag: ", [F]),
    ("hermes", f"<tool_call><tool_call>{HERMES_F}", "<tool_call><tool_call>", [F]),
    ("nemotron_json", f'So:\n\n<TOOLCALL>[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "f"}}]</TOOLCALL>\n', "So:\n\n", [WEATHER, F]),
    ("llama3_json", f'{{"name": "weather", "parameters": {ARGUMENTS}}}', "", [WEATHER]),
    ("llama3_json", '\n{"type": "function", "name": "f", "parameters": {}}', "", [F]),
    ("llama3_json", '{"name": "f"}', "", [F]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}', "", [F, ("g", '{"a": 1}')]),
    ("llama3_json", '{"name": "f", "parameters": {}} and more', " and more", [F]),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "Bob"}', '; {"name": "Bob"}', [F]),
    ("llama3_json", 'Hello <|python_tag|>{"name": "f", "arguments": {}}', "Hello ", [F]),
    ("mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]', "", [WEATHER]),
    ("mistral", 'Text [TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcDEF123"}, {"name": "g", "arguments": {"a": 1}}]', "Text ", [F, ("g", '{"a": 1}')]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", "", [WEATHER]),
    ("mistral", '[TOOL_CALLS] {"name": "f"} so', " so", [F]),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{ARGUMENTS}[TOOL_CALLS]f[CALL_ID]000000000[ARGS]{{}}", "", [WEATHER, F]),
    ("mistral", '[TOOL_CALLS]f{"a": {"b": 1}}[TOOL_CALLS]g{}', "", [("f", '{"a": {"b": 1}}'), ("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]Bob[ARGS]{}', "[TOOL_CALLS]Bob[ARGS]{}", [F]),
    ("qwen3_coder", XML, "", [XML_CALL]),
    ("qwen3_coder", XML.replace("\n", "\r\n"), "", [XML_CALL]),
    ("qwen3_coder", f"I look.\n{XML}\n{XML_F}", "I look.\n", [XML_CALL, F]),
    ("qwen3_coder", XML.removeprefix("<tool_call>\n"), "", [XML_CALL]),
    ("qwen3_coder", XML.removesuffix("\n</tool_call>"), "", [XML_CALL]),
    ("qwen3_coder", "<function=f>\n</function> so", " so", [F]),
    ("qwen3_coder", "<tool_call><function=f></function><function=g></function></tool_call>", "", [F, ("g", "{}")]),
    ("deepseek_v3", DEEPSEEK.format(V3.format("weather", ARGUMENTS) + "\n" + V3.format("f", "{}")), "", [WEATHER, F]),
    ("deepseek_v3", "So. " + DEEPSEEK.format(V31.format("weather", ARGUMENTS)), "So. ", [WEATHER]),
    ("deepseek_v31", DEEPSEEK.format(V31.format("weather", ARGUMENTS) + V31.format("f", "{}")), "", [WEATHER, F]),
    ("deepseek_v31", V31.format("f", "{}"), "", [F]),
]  # fmt: skip
NO_CALLS = [
    ("hermes", text) for text in (
        "Write a <tool_call> tag like this.", "a < b and <tool_ x", "plain  \n text \n", "\n", "<tool_call>", "",
        '<tool_call>{"no": "call"}', '<tool_call>\n{"name": "Bob", "arguments": {}}\n</tool_call>',
        '<tool_call>{"name": "f", "arguments": null}</tool_call>', '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', '<tool_call>{"name": "f", "arguments": "null"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>', '<tool_call>{"name": "f", "city": "X"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', '<tool_call>{"name": "f", "arguments": {"a": 1',
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        "<tool_call>{'name': 'f'}</tool_call>", '<tool_call>{"name": "f"}]</tool_call>', '<tool_call>{"name": "f"} or so</tool_call>',
        '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
        "<tool_call>\n<function=f>\n</function>\n</tool_call>", '{"name": "f", "arguments": {}}',
    )
] + [
    ("llama3_json", text) for text in (
        '{"name": "Bob", "age": 4}', '{"name": "f", "age": 4}', 'Hello {"name": "f"}', '{"answer": 42}', "{", "{ not JSON }",
        '<|python_tag|>print("f")', '{"name": "f", "parameters": {"a": 1}', '[{"name": "f", "parameters": {}}]',
    )
] + [
    ("mistral", text) for text in (
        "[TOOL_CALLS]", "[TOOL_CALLS][]", '[TOOL_CALLS][{"name": "f", "arguments": {}}', '[TOOL_CALLS][{"name": "f"}, {"name": "Bob"}]',
        "[TOOL_CALLS]f", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]null", "[TOOL_CALLS]f[CALL_ID]abcDEF123", "the mark [TOOL_CALLS] begins calls",
    )
] + [
    ("nemotron_json", text) for text in ('<TOOLCALL>[{"name": "f"}]', '<TOOLCALL>{"name": "Bob"}</TOOLCALL>', "<TOOLCALL>")
    if text != '<TOOLCALL>[{"name": "f"}]'
] + [
    ("qwen3_coder", text) for text in (
        "<tool_call>\n<function=Bob>\n</function>\n</tool_call>", HERMES, "Use <function=f> so.", "<tool_call> <function=f>",
        XML.removesuffix("</parameter>\n</function>\n</tool_call>"), XML.replace("</function>", ""), XML.replace("</parameter>", ""),
    )
] + [
    ("deepseek_v3", text) for text in (
        DEEPSEEK.format(""), DEEPSEEK.format(V3.format("Bob", "{}")), DEEPSEEK.format(V3.format("f", "[]")),
        V3.format("f", '{"a": }'), "<｜tool▁calls▁begin｜> begins calls", V3.format("f", "{}")[:-25],
    )
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_found_however_the_text_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read_anyhow(name, text) == ("", content, calls)
    assert all(isinstance(json.loads(arguments.encode()), dict) for _, arguments in calls)


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_a_text_that_is_no_call_is_left_as_it_is(name: str, text: str) -> None:
    assert read_anyhow(name, text) == ("", text, [])
    around = f" before \n{text}\nbehind "
    assert read_anyhow(name, around) == ("", around, [])


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("city", "5", "5"), ("city", "null", "null"), ("city", "two\n\nlines\n", "two\n\nlines\n"), ("city", "", ""),
        ("city", "</parameter> is a <b>tag</b>", "</parameter> is a <b>tag</b>"), ("city", '"q" \\', '"q" \\'), ("city", " x ", " x "),
        ("days", "5", 5), ("days", " -7\n", -7), ("days", "5.0", 5), ("days", "5.5", "5.5"), ("days", "five", "five"),
        ("days", "9007199254740993", 9007199254740993), ("days", "True", "True"), ("high", "5", 5), ("high", "0.25", 0.25),
        ("high", "1e3", 1000.0), ("high", "NaN", "NaN"), ("sure", "true", True), ("sure", "False", False), ("sure", "yes", "yes"),
        ("nothing", "None", None), ("nothing", "null", None), ("at", '{"a": [1,\n 2]}', {"a": [1, 2]}), ("at", "here", "here"),
        ("all", "[1, 2]", [1, 2]), ("all", "(1, 2)", "(1, 2)"), ("maybe", "null", None), ("maybe", "4", 4), ("either", "4", 4),
        ("either", "four", "four"), ("unit", "1", "1"), ("unit", "2", 2), ("fixed", "3", 3), ("untyped", "5", "5"), ("unknown", "{}", "{}"),
        ("nullable", "none", None), ("unit_or_none", "1", "1"), ("unit_or_none", "null", "null"), ("unit_or_none", "None", None), ("itself", "5", 5), ("nullable", "TRUE", True),
    ],
)  # fmt: skip
def test_values_have_the_types_of_the_schema(key: str, written: str, value: Any) -> None:
    text = f"<tool_call>\n<function=weather>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    ((name, arguments),) = read_anyhow("qwen3_coder", text)[2]
    assert (name, json.loads(arguments)) == ("weather", {key: value})
    assert type(json.loads(arguments)[key]) is type(value)


@pytest.mark.parametrize("kind", ["anyOf", "oneOf", "allOf"])
def test_types_of_parameters_of_several_schemas(kind: str) -> None:
    parts = [
        {"properties": {"a": {"type": "integer"}}},
        {"properties": {"a": {"type": "null"}, "b": {"type": "number"}}},
    ]
    tools = {"f": {kind: parts, "additionalProperties": {"type": "boolean"}}}
    values = {"a": "5", "b": "0.5", "c": "true", "d": "x"}
    text = FORMATS["qwen3_coder"].written("f", json.dumps(values))
    found = read(CallsReader(FORMATS["qwen3_coder"], tools), [text])[2][0][1]
    assert json.loads(found) == {"a": 5, "b": 0.5, "c": True, "d": "x"}


@pytest.mark.parametrize("name", BY_MARKS)
def test_what_is_written_is_read(name: str) -> None:
    text = FORMATS[name].written("weather", '{"city": "X", "days": 3}')
    assert read_anyhow(name, text) == ("", "", [("weather", '{"city": "X", "days": 3}')])
    for cut in range(len(text)):
        assert read_anyhow(name, text[:cut], is_forced=True)[1] == ""


def test_a_call_is_told_as_soon_as_it_is_whole() -> None:
    one = reader("hermes")
    assert one.push('So <tool_call>{"name": "f", "arguments": {"a"') == [Content("So ")]
    assert one.push(": 1}}\n") == []
    assert one.push("</tool_call>") == [CallBegin("f"), CallArguments('{"a": 1}')]
    assert one.push("\nso <") == [Content("\nso ")]


def test_other_json_is_not_held_back() -> None:
    one = reader("llama3_json")
    assert one.push('\n{"a') == []
    assert one.push("nswer") == [Content('\n{"answer')]
    assert one.push('": {"name": 1') == [Content('": {"name": 1')]


@settings(max_examples=150, deadline=None)
@given(
    st.text('<tool_call>/{}[]":,\\nameTOOL_CALLSfunction= ', max_size=60),
    st.sampled_from(BY_MARKS),
    st.data(),
)
def test_readers_take_any_text(text: str, name: str, data: st.DataObject) -> None:
    whole = read(reader(name), [text])
    if not whole[2]:
        assert whole[1] == text
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    parts = [text[a:b] for a, b in pairwise([0, *places, len(text)])]
    assert read(reader(name), parts) == whole


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"'), ("hermes", "<tool_call>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>"), ("qwen3_coder", "<function=f><parameter=a></parameter>"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{"), ("deepseek_v3", "<｜tool▁call▁begin｜>"), ("deepseek_v3", V31.format("f", "{")[:-10]),
        ("llama3_json", '{"name":'), ("llama3_json", "<|python_tag|>"),
    ],
)  # fmt: skip
def test_many_marks_take_time_that_grows_with_the_text(name: str, part: str) -> None:
    """Counted: lines of the reader that run."""

    def lines(times: int) -> int:
        count = 0

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        one, text = reader(name), part * times
        sys.settrace(trace)
        try:
            read(one, [text])
        finally:
            sys.settrace(None)
        return count

    assert lines(80) < 2.5 * lines(40)


@pytest.mark.parametrize(
    ("inside", "text", "thoughts", "content"),
    [
        (True, "I think\nso.\n</think>\n\nYes.", "I think\nso.\n", "Yes."),
        (False, "<think>\nHm</think>Yes", "Hm", "Yes"),
        (False, "\n<think>Hm</think>Yes", "Hm", "Yes"),
        (False, "No thought </think> here", "", "No thought </think> here"),
        (False, "<thin", "", "<thin"),
        (False, "", "", ""),
        (True, "never ends </thin", "never ends </thin", ""),
        (True, "</think>", "", ""),
        (True, "a</think>b</think>c <think>", "a", "b</think>c <think>"),
    ],
)
def test_thoughts(inside: bool, text: str, thoughts: str, content: str) -> None:
    for cut in range(len(text) + 1):
        assert read(ThoughtReader(inside, None), [text[:cut], text[cut:]])[:2] == (
            thoughts,
            content,
        )
    assert read(ThoughtReader(inside, None), list(text))[:2] == (thoughts, content)


def test_a_call_behind_a_thought() -> None:
    text = f"<think>\nuse <tool_call> now</think>\n\n{HERMES}"
    found = read(ThoughtReader(False, reader("hermes")), list(text))
    assert found == ("use <tool_call> now", "", [WEATHER])


@pytest.mark.parametrize(
    ("template", "name", "found"),
    [
        ("... <tool_call> ...", None, "hermes"), ("nothing", None, "hermes"), ("[TOOL_CALLS] [", None, "mistral"),
        ("[TOOL_CALLS]{{name}}[ARGS]", None, "mistral_v13"), ("[TOOL_CALLS][CALL_ID][ARGS]", None, "mistral_v11"),
        ('{{ {"name": 1, "parameters": 2} }} ipython', None, "llama3_json"), ("<tool_call>'<function=' + x '<parameter='", None, "qwen3_coder"),
        ("'<｜tool▁calls▁begin｜>' ```json", None, "deepseek_v3"), ("<｜tool▁calls▁begin｜>", None, "deepseek_v31"),
        ("<TOOLCALL>[", None, "nemotron_json"), ("<tool_call>", "mistral", "mistral"), ("[TOOL_CALLS][CALL_ID][ARGS]", "mistral", "mistral_v11"),
        ("", "qwen3-coder", "qwen3_coder"), ("", "nemotron-v3", "qwen3_coder"), ("", "deepseek-r1", "deepseek_v3"), ("", "qwen3-coder-tool", "qwen3_coder"),
        ("", "qwen3_coder", "qwen3_coder"), ("", "qwen25", "hermes"), ("", "Hermes", "hermes"), ("", "deepseek_v31", "deepseek_v31"), ("", "llama3", "llama3_json"),
        ("", "gpt-oss", "harmony"), ("", "openai", "harmony"), ("<|channel|>'analysis'<|message|>", None, "harmony"),
    ],
)  # fmt: skip
def test_the_format_is_that_of_the_template_or_of_the_name(
    template: str, name: str | None, found: str
) -> None:
    assert format_of_template(template, name).name == found


def test_an_unknown_format_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'x'.*use one of qwen3_coder, hermes, mistral"):
        format_of_template("", "x")
