# ruff: noqa: E501  (tables of cases)
"""Calls of tools in the answers of a chat, whole and streamed, in linear time whatever the model
writes; tools that are refused."""

import time
from typing import Any

import pytest

from megatron_async.server.chat.call_formats import FORMATS
from megatron_async.server.chat.calls_reader import CallsReader
from megatron_async.server.chat.thoughts import ThoughtReader
from megatron_async.server.fields.refusal import Refusal
from tests.support.served_demo import (
    CLOCK,
    THINKING,
    WEATHER,
    answered,
    asked_chat,
    demo,
    demo_tokenizer,
    streamed,
)


def test_calls_in_answers() -> None:
    text = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    auto = asked_chat(tools=[CLOCK])
    choice = answered(auto, f"Wait.\n{text}")["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Wait.\n"
    call = choice["message"]["tool_calls"][0]
    assert call["function"] == {"name": "clock", "arguments": "{}"}
    assert len(call["id"]) == 9
    named = asked_chat(tools=[CLOCK], tool_choice={"function": {"name": "clock"}})
    choice = answered(named, text)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] is None
    none = answered(asked_chat(tools=[CLOCK], tool_choice="none"), text)["choices"][0]
    assert none["message"]["content"] == text
    one = asked_chat(tools=[CLOCK], parallel_tool_calls=False)
    assert len(answered(one, text + text)["choices"][0]["message"]["tool_calls"]) == 1
    events = streamed(asked_chat(tools=[CLOCK], stream=True), text + text)
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls if "id" in call] == [0, 1]
    assert "".join(call["function"]["arguments"] for call in calls) == "{}{}"
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    events = streamed(
        asked_chat(tools=[CLOCK], parallel_tool_calls=False, stream=True), text + text
    )
    assert (
        sum("id" in c for e in events for c in e["choices"][0]["delta"].get("tool_calls", [])) == 1
    )


@pytest.mark.parametrize("choice", ["required", {"function": {"name": "clock"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_off_leaves_no_content(choice: Any, stream: bool) -> None:
    text = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    asked = asked_chat(tools=[CLOCK], tool_choice=choice, stream=stream)
    tokens = demo_tokenizer().tokenize(text, False)
    for count in range(len(tokens)):
        part = demo_tokenizer().detokenize(tokens[:count], False)
        if stream:
            events = streamed(asked, part, reason="length")
            deltas = [event["choices"][0]["delta"] for event in events]
            calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
            assert {delta.get("content") or "" for delta in deltas} == {""}
            reason = events[-1]["choices"][0]["finish_reason"]
        else:
            found = answered(asked, part, reason="length")["choices"][0]
            calls, reason = found["message"].get("tool_calls", ()), found["finish_reason"]
            assert not found["message"]["content"]
        assert reason == "length"
        assert bool(calls) == ("}}" in part)  # the call is whole, but for its closing mark
        assert "".join(call["function"]["arguments"] for call in calls) == "{}" * bool(calls)


def test_calls_with_several_choices_log_probs_and_stop_strings() -> None:
    text = 'So <tool_call>\n{"name": "clock"}\n</tool_call>'
    for kept in (False, True):
        asked = asked_chat(
            tools=[CLOCK],
            n=2,
            logprobs=True,
            stop="</tool_call>",
            stream=True,
            include_stop_str_in_output=kept,
        )
        choices = answered(asked, text, reason="stop_word")["choices"]
        events = streamed(asked, text, reason="stop_word")
        for choice in choices:
            message = choice["message"]
            assert message["content"] == "So "
            assert [call["function"] for call in message["tool_calls"]] == [
                {"name": "clock", "arguments": "{}"}
            ]
            assert (choice["finish_reason"], choice["stop_reason"]) == (
                "tool_calls",
                "</tool_call>",
            )
            own = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
            assert "".join(one["delta"].get("content") or "" for one in own) == "So "
            told = [
                entry for one in own for entry in (one["logprobs"] or {"content": []})["content"]
            ]
            assert told == choice["logprobs"]["content"]
            assert own[-1]["finish_reason"] == "tool_calls"


def test_tools_are_told_where_the_template_does_not() -> None:
    asked = asked_chat(
        tools=[WEATHER],
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": '{"city": "X"}'}}]},
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
        ],
    )  # fmt: skip
    text = demo_tokenizer().detokenize(asked.prompts[0], False)
    assert "Be brief.\n\nYou may call functions" in text
    assert '"description": "of a city"' in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "X"}}\n</tool_call>' in text
    assert "Result of the call: rain" in text
    known = asked_chat(demo(THINKING), tools=[WEATHER])
    text = demo_tokenizer().detokenize(known.prompts[0], False)
    assert "You may call" not in text
    assert '"name": "weather"' in text


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "code_interpreter"}]},
        {"tools": [{"function": {"name": "a b"}}]},
        {"tools": [{"function": {"name": ""}}]},
        {"tools": [CLOCK] * 129},
        {"tools": [WEATHER, CLOCK, CLOCK]},
        {"tools": [{"function": {"name": "f" * 129}}]},
        {"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]},
        {"tools": [{"function": {"name": "f", "parameters": {"type": ["string", "null"]}}}]},
        {"tools": [CLOCK], "tool_choice": {"type": "custom", "function": {"name": "clock"}}},
        {"tools": [CLOCK], "tool_choice": "always"},
        {"tools": [CLOCK], "tool_choice": {"function": {"name": "other"}}},
        {"tool_choice": "required"},
        {"tools": [CLOCK], "tool_choice": "required", "response_format": {"type": "json_object"}},
        {"tools": [{"function": {"name": "f", "parameters": {"a": "x" * 2**18}}}], "tool_choice": "required"},
        {"functions": [{"name": "f"}]},
        {"tools": [{"function": {"name": "f", "parameters": {"properties": {"a": {"minimum": 2**53 + 1}}}}}], "tool_choice": "required"},
        {"tools": [CLOCK], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        {"structured_outputs": {"regexp": "a"}},
    ],
)  # fmt: skip
def test_wrong_tools_get_400(body: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as caught:
        asked_chat(**body)
    assert caught.value.status == 400
    assert len(caught.value.body()) < 3000


def test_thoughts_in_answers() -> None:
    served = demo(THINKING)
    asked = asked_chat(served, chat_template_kwargs={"enable_thinking": True})
    message = answered(asked, "Hm.\n</think>\n\nYes.", served)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.\n", "Yes.")
    asked = asked_chat(served, include_reasoning=False)
    message = answered(asked, "<think>Hm.</think>Yes.", served)["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"] == "Yes."
    asked = asked_chat(served, stream=True)
    deltas = [e["choices"][0]["delta"] for e in streamed(asked, "<think>Hm</think>Yes", served)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes"


TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}
TOKENS = 3000


def seconds(name: str, begun: str, token: str, count: int) -> float:
    """CPU time to read an answer, token by token."""
    reader = ThoughtReader(False, CallsReader(FORMATS[name], TOOLS))
    start = time.process_time()
    reader.push(begun)
    for _ in range(count):
        reader.push(token)
    reader.end()
    return time.process_time() - start


@pytest.mark.parametrize(
    ("name", "begun", "token"),
    [
        ("hermes", "", " " * 64),
        ("hermes", "<think>", "\n" * 16),
        ("hermes", "word<tool_call>", " " * 16),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "\\"),
        ("hermes", "", '<tool_call>{"name"'),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>b</parameter>", " " * 8),
        ("llama3_json", '{"name": ', " " * 8),
        ("deepseek_v31", "<\uff5ctool\u2581calls\u2581begin\uff5c>", " " * 16),
    ],
)
def test_four_times_the_tokens_take_about_four_times_as_long(name: str, begun: str, token: str):
    once = seconds(name, begun, token, TOKENS)
    assert seconds(name, begun, token, 4 * TOKENS) < 9 * once + 0.1  # the square: 16 times
