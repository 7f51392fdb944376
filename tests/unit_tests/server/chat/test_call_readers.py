# ruff: noqa: E501  (tables of cases)
from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.errors import ConfigurationError
from megatron_async.server.chat.thoughts import ThoughtReader
from megatron_async.server.chat.tool_format import (
    CallArguments,
    CallBegin,
    CallReader,
    Content,
    Piece,
    Thought,
)
from megatron_async.server.chat.tool_formats import FORMATS, format_of_template

Found = tuple[str, str, list[tuple[str, str]]]


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


ARGUMENTS = '{"city": "Köln }]\\" {", "days": [1, {"a": null}], "x": {}}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CASES = [
    ("hermes", HERMES, "", [("weather", ARGUMENTS)]),
    ("hermes", f"Let me see.\n\n{HERMES}\n{HERMES}", "Let me see.", [("weather", ARGUMENTS)] * 2),
    ("hermes", f"{HERMES}\nDone <b>", "Done <b>", [("weather", ARGUMENTS)]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", "a < b and <tool_ x", "a < b and <tool_ x", []),
    ("hermes", "plain  \n text \n", "plain  \n text \n", []),
    ("hermes", "<tool_call> no call", "<tool_call> no call", []),
    ("hermes", '<tool_call>{"no": "call"}', '{"no": "call"}', []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("llama3_json", f'{{"name": "weather", "parameters": {ARGUMENTS}}}', "", [("weather", ARGUMENTS)]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}', "",
     [("f", "{}"), ("g", '{"a": 1}')]),
    ("llama3_json", 'Hello {"name": "f"}', 'Hello {"name": "f"}', []),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]', "", [("weather", ARGUMENTS)]),
    ("mistral", 'Text [TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]', "Text",
     [("f", "{}"), ("g", '{"a": 1}')]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", "", [("weather", ARGUMENTS)]),
    ("mistral", '[TOOL_CALLS]f{"a": {"b": 1}}[TOOL_CALLS]g{}', "", [("f", '{"a": {"b": 1}}'), ("g", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_calls_are_found_however_the_text_is_divided(
    name: str, text: str, content: str, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    ends = [0, *places, len(text)]
    parts = [text[a:b] for a, b in pairwise(ends)]
    assert read(FORMATS[name].reader(), parts) == ("", content, calls)
    assert read(FORMATS[name].reader(), list(text)) == ("", content, calls)


def test_arguments_are_told_as_they_arrive() -> None:
    reader = FORMATS["hermes"].reader()
    assert reader.push('<tool_call>{"name": "f", "arguments": {"a"') == [
        CallBegin("f"), CallArguments('{"a"'),
    ]  # fmt: skip
    assert reader.push(': "some te') == [CallArguments(': "some te')]
    assert reader.push('xt  "}') == [CallArguments('xt  "}')]
    assert reader.push("}</tool_call>") == []


@settings(max_examples=150, deadline=None)
@given(st.text('<tool_call>/{}[]":,\\nameTOOL_CALLS ', max_size=60), st.sampled_from(list(FORMATS)))
def test_readers_take_any_text(text: str, name: str) -> None:
    whole = read(FORMATS[name].reader(), [text])
    assert read(FORMATS[name].reader(), list(text)) == whole
    if not whole[2] and FORMATS[name].reader().push(text) == [Content(text)]:
        assert whole[1] == text


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
    found = read(ThoughtReader(False, FORMATS["hermes"].reader()), list(text))
    assert found == ("use <tool_call> now", "", [("weather", ARGUMENTS)])


def test_the_format_is_that_of_the_template_or_of_the_name() -> None:
    assert format_of_template("... <tool_call> ...").name == "hermes"
    assert format_of_template("... [TOOL_CALLS] ...").name == "mistral"
    assert format_of_template('{{ {"name": 1, "parameters": 2} }} ipython').name == "llama3_json"
    assert format_of_template("nothing").name == "hermes"
    assert format_of_template("<tool_call>", "mistral").name == "mistral"
    with pytest.raises(ConfigurationError, match="hermes, llama3_json, mistral"):
        format_of_template("", "other")
    assert json.loads(FORMATS["llama3_json"].written("f", "{}"))["name"] == "f"
