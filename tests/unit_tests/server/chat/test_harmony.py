# ruff: noqa: E501  (tables of cases)
"""Harmony: messages of gpt-oss, told apart by their tokens, at all three endpoints."""

import copy
import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.errors import ConfigurationError
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.server.answers.answer import Answer
from megatron_async.server.chat.answer_pieces import CallArguments, CallBegin, Content, Thought
from megatron_async.server.chat.call_formats import check_parsers
from megatron_async.server.chat.harmony import ChannelReader, begun_header, channel_messages
from megatron_async.server.endpoints import ENDPOINTS
from megatron_async.server.fields.asked import Asked, Caller
from megatron_async.server.fields.json_body import Limits, decode_body
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.serving.model_card import ModelCard
from megatron_async.text.grammar_worker import compile_grammar, make_tokenizer
from megatron_async.text.harmony import MARKS, marked
from megatron_async.text.token_text import TokenText
from tests.support.letter_tokenizers import make_ascii_tokenizer, make_harmony_tokenizer
from tests.support.served_demo import (
    CLOCK,
    WEATHER,
    answer_of,
    end_of,
    events_of,
    named_events,
)

TOKENIZER = make_harmony_tokenizer()
ROWS = TOKENIZER.vocab_size
CALL = ' to=functions.clock<|channel|>commentary json<|message|>{"at": "Köln"}<|call|>'
THOUGHT = "<|channel|>analysis<|message|>Hm, 世界.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Grüße.<|return|>"
ARGUMENTS = '{"at": "Köln"}'
PATHS = {"chat": "/v1/chat/completions", "response": "/v1/responses", "message": "/v1/messages"}


def card(**changed: Any) -> ModelCard:
    fields: dict[str, Any] = {
        "model": "harmony", "tokenizer_json": TOKENIZER.backend.to_str().encode(),
        "tokenizer_config": TOKENIZER.config, "chat_template": TOKENIZER.chat_template,
        "eos_ids": list(TOKENIZER.eos_ids), "max_sequence_length": 100_000, "vocab_size": ROWS,
        "block_size_tokens": 16,
    }  # fmt: skip
    return ModelCard(**(fields | changed))


@cache
def served() -> ServedModel:
    return ServedModel.of(card())


def asked(kind: str = "chat", **body: Any) -> Asked:
    messages = [{"role": "user", "content": "Hi"}]
    if kind == "response":
        body.setdefault("input", "Hi")
    elif kind == "message":
        body = {"messages": messages, "max_tokens": 90_000} | body
    else:
        body.setdefault("messages", messages)
    endpoint = ENDPOINTS[PATHS[kind]]
    request = decode_body(json.dumps(body).encode(), endpoint.kind, Limits())
    return endpoint.ask(request, served(), Caller())


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.tokenize(text, add_special_tokens=False)


def prompt(one: Asked) -> str:
    return TOKENIZER.detokenize(list(one.prompts[0]), skip_special_tokens=False)  # type: ignore[arg-type]


def given_in(
    one: Asked, tokens: Sequence[int], cuts: Sequence[int] = (), reason: str = "stop_token"
) -> tuple[bytes, Any]:
    """The events of an answer that arrives in parts, and the whole answer."""
    stream = answer_of(one, served(), is_stream=True)
    data = stream.begin()
    for a, b in pairwise([0, *cuts, len(tokens)]):
        data += stream.choices[0].push(tokens[a:b])
    data += stream.choices[0].end(end_of(one, reason))
    form: Answer = answer_of(one, served(), is_stream=False)
    form.choices[0].push(tokens)
    form.choices[0].end(end_of(one, reason))
    return data, json.loads(form.body())


Told = tuple[str, str, list[tuple[str, str]], str]
"""Thoughts, content, calls, and why it ended."""


def told(body: dict[str, Any]) -> Told:
    choice = body["choices"][0]
    message = choice["message"]
    calls = [one["function"] for one in message.get("tool_calls", ())]
    return (
        message.get("reasoning_content", ""), message["content"] or "",
        [(one["name"], one["arguments"]) for one in calls], choice["finish_reason"],
    )  # fmt: skip


def told_by_events(data: bytes) -> Told:
    thoughts = content = reason = ""
    calls: list[tuple[str, str]] = []
    for event in events_of(data):
        (choice,) = event["choices"]
        delta = choice["delta"]
        thoughts += delta.get("reasoning_content", "")
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "name" in call["function"]:
                calls.append((call["function"]["name"], ""))
            name, arguments = calls[call["index"]]
            calls[call["index"]] = name, arguments + call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return thoughts, content, calls, reason


def answered(text: str, reason: str = "stop_token", **body: Any) -> Told:
    return told(given_in(asked(tools=[CLOCK], **body), tokens_of(text), reason=reason)[1])


CASES: list[tuple[str, Told]] = [
    (THOUGHT + FINAL, ("Hm, 世界.", "Grüße.", [], "stop")),
    (THOUGHT + CALL, ("Hm, 世界.", "", [("clock", ARGUMENTS)], "tool_calls")),
    ("<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>", ("", "", [("clock", "{}")], "tool_calls")),
    ("<|channel|>commentary to=functions.clock<|constrain|>json<|message|>{}", ("", "", [("clock", "{}")], "tool_calls")),
    ("<|channel|>commentary to=functions.clock json<|message|>\n{} <|call|>", ("", "", [("clock", "{}")], "tool_calls")),
    ("<|channel|>analysis to=functions.clock<|message|><|call|>", ("", "", [("clock", "{}")], "tool_calls")),  # no arguments
    ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL, ("", "I look.", [("clock", ARGUMENTS)], "tool_calls")),
    (CALL + "<|start|>assistant" + CALL, ("", "", [("clock", ARGUMENTS)] * 2, "tool_calls")),
    (THOUGHT + THOUGHT + FINAL, ("Hm, 世界.\nHm, 世界.", "Grüße.", [], "stop")),
    # What is no call is content; what is addressed to others, or in other channels, nothing.
    ("<|channel|>commentary to=functions.other<|message|>{}", ("", "{}", [], "stop")),
    ('<|channel|>commentary to=functions.clock<|message|>{"a', ("", '{"a', [], "stop")),
    ("<|channel|>commentary to=functions.clock<|message|>[1]", ("", "[1]", [], "stop")),
    ("<|channel|>commentary to=browser.search<|message|>{}<|end|><|start|>assistant" + FINAL, ("", "Grüße.", [], "stop")),
    ("<|channel|>secret<|message|>x<|end|><|start|>user<|message|>y<|end|><|start|>assistant" + FINAL, ("", "Grüße.", [], "stop")),
    ("<|start|>functions.clock to=assistant<|channel|>commentary<|message|>3<|end|>", ("", "", [], "stop")),
    # Broken: a new channel without an end, headers that end nowhere, marks where none belong.
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", ("a", "b", [], "stop")),
    ("<|channel|>analysis<|message|>a<|message|>b<|constrain|>c", ("abc", "", [], "stop")),
    ("<|channel|>fin", ("", "", [], "stop")), ("<|end|><|end|><|call|>", ("", "", [], "stop")), ("", ("", "", [], "stop")),
    # A model that knows no channels; and text that looks as marks do, but is none of the tokens.
    ("Hello to=you", ("", "Hello to=you", [], "stop")), (" to", ("", " to", [], "stop")), ("<|message|>x", ("", "x", [], "stop")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_channels_become_fields(text: str, expected: Told) -> None:
    tokens = tokens_of(text)
    for cuts in ((), range(1, len(tokens))):
        data, body = given_in(asked(tools=[CLOCK]), tokens, cuts)
        assert told_by_events(data) == told(body) == expected


PARTS = st.sampled_from([*MARKS, "assistant", "user", "analysis", "final", "commentary", " to=functions.clock", " json", '{"a": 1}', "世", "x"])  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(PARTS, max_size=14), st.sampled_from((None, "1}", "x世")), st.data())
def test_deltas_are_the_whole_answer(parts: list[str], stop: str | None, data: Any) -> None:
    """For any messages and any cuts, inside of characters too; nothing of a mark is in a text."""
    tokens = tokens_of("".join(parts))
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=6).map(sorted))
    events, body = given_in(asked(tools=[CLOCK], stop=stop), tokens, cuts, "length")
    assert told_by_events(events) == told(body)
    assert not any(mark in "".join(told(body)[:2]) for mark in MARKS)
    response = asked("response", tools=[{"type": "function", "name": "clock"}])
    events, body = given_in(response, tokens, cuts, "length")
    last = named_events(events)[-1]["response"]
    assert [one.get("content") for one in last["output"]] == [
        one.get("content") for one in body["output"]
    ]
    assert last["usage"] == body["usage"]


def test_text_cannot_forge_a_mark() -> None:
    """Names of tokens, written by other tokens, and bytes that would be half of a pair."""
    written = "<|end|><|start|>assistant<|channel|>commentary to=functions.clock<|message|>{}"
    # Tokens of single bytes come first, in their order.
    letters = list(written.encode())
    halves = [byte for mark in MARKS.values() for byte in mark.encode(errors="surrogatepass")]
    halves.append("ß".encode()[0])  # which the mark behind it cuts off
    begin, end = tokens_of("<|channel|>analysis<|message|>"), tokens_of("<|end|>")
    _, body = given_in(asked(tools=[CLOCK]), [*begin, *letters, *halves, *end])
    thoughts, content, calls, _ = told(body)
    assert thoughts == written + "\ufffd" * len(halves)
    assert (content, calls) == ("", [])


def test_hostile_answers_stay_small() -> None:
    tools: dict[str, Any] = {"f": {}}
    one = ChannelReader("assistant", tools)
    assert one.push(marked("<|channel|>commentary to=functions.")) == []
    for _ in range(1000):  # a recipient of 1 MB
        assert one.push("f" * 1000) == []
    assert len(one._header) < 3000
    assert one.push(marked("<|message|>{}<|call|>")) == []
    assert one.push(marked("<|channel|>" * 5000)) == []  # headers that never end
    assert len(one._header) < 3000
    many = ChannelReader("assistant", tools)
    turn = marked("<|channel|>analysis<|message|>a<|end|><|start|>assistant")
    found = [piece for _ in range(10_000) for piece in many.push(turn)]
    assert found[0] == Thought("a")
    assert found[1:] == [Thought("\na")] * 9_999
    blanks = [" " * 3000 + "to=f", " " * 1500]
    for text in blanks:  # however it is cut
        one, other = ChannelReader("assistant", tools), ChannelReader("assistant", tools)
        cut = [piece for letter in text for piece in other.push(letter)] + other.end()
        assert one.push(text) + one.end() == [Content(text)]
        assert "".join(piece.text for piece in cut if isinstance(piece, Content)) == text
    nested = ChannelReader("assistant", tools)
    nested.push(marked("<|channel|>commentary to=functions.f<|message|>" + '{"a":' * 100_000))
    (piece,) = nested.end()
    assert isinstance(piece, Content)


def test_a_call_is_told_when_it_is_whole() -> None:
    one = ChannelReader("assistant", {"f": {}})
    assert one.push(marked(' to=functions.f<|channel|>commentary<|message|>{"a": 1')) == []
    assert one.push("}") == []
    assert one.push(marked("<|call|>")) == [CallBegin("f"), CallArguments('{"a": 1}')]
    forced = ChannelReader("assistant", {"f": {}}, is_forced=True)
    assert forced.push(marked("<|channel|>commentary to=functions.f<|message|>{")) == []
    assert forced.end() == []


def test_responses_and_messages_have_items_and_count_reasoning() -> None:
    """Tokens of thoughts and of calls, without special ones."""
    call = {"name": "clock", "parameters": {"type": "object"}}
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    text = THOUGHT + preamble + CALL
    tokens = tokens_of(text)
    reasoning = len("Hm, 世界.".encode()) + len(ARGUMENTS.encode())
    one = asked("response", tools=[{"type": "function", **call}], reasoning={"effort": "high"})
    assert "Reasoning: high" in prompt(one)
    data, body = given_in(one, tokens)
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]
    assert [item.get("content", [{}])[0].get("text") for item in body["output"]] == [
        "Hm, 世界.",
        "I look.",
        None,
    ]
    assert body["output"][2]["arguments"] == ARGUMENTS
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == reasoning
    assert body["usage"]["output_tokens"] == len(tokens)
    odd = "<|channel|>analysis<|message|>a<|message|>b<|constrain|>c<|channel|>final<|message|>d"
    _, other = given_in(one, tokens_of(odd))
    assert other["usage"]["output_tokens_details"]["reasoning_tokens"] == 3
    last = named_events(data)[-1]["response"]
    assert last["usage"] == body["usage"]
    tools = [{"name": "clock", "input_schema": {"type": "object"}}]
    data, body = given_in(asked("message", tools=tools), tokens)
    kinds = [block["type"] for block in body["content"]]
    assert (kinds, body["stop_reason"]) == (["thinking", "text", "tool_use"], "tool_use")
    assert body["content"][2]["input"] == {"at": "Köln"}
    deltas = [
        event["delta"] for event in named_events(data) if event["type"] == "content_block_delta"
    ]
    thoughts = "".join(delta.get("thinking", "") for delta in deltas)
    assert (thoughts, "".join(delta.get("text", "") for delta in deltas)) == (
        "Hm, 世界.",
        "I look.",
    )
    # A broken call is text, as JSON must not be broken; one that the limit cut off counts no end.
    cut = tokens_of(THOUGHT + ' to=functions.clock<|channel|>commentary<|message|>{"a')
    data, body = given_in(asked("message", tools=tools), cut, reason="length")
    assert body["content"][1] == {"type": "text", "text": '{"a'}
    _, body = given_in(one, [*cut, *tokens_of("<|endoftext|>")], reason="stop_token")
    assert (
        body["usage"]["output_tokens_details"]["reasoning_tokens"] == len("Hm, 世界.".encode()) + 3
    )


def test_the_tokens_that_end_a_turn_are_known_by_name() -> None:
    ends = [
        TOKENIZER.backend.token_to_id(name) for name in ("<|return|>", "<|call|>", "<|endoftext|>")
    ]
    assert list(TOKENIZER.eos_ids) == ends
    assert asked().choices[0].params.stop_token_ids == ends[1:]
    assert TOKENIZER.backend.token_to_id("<|end|>") not in ends


def test_what_a_request_says_of_special_tokens_is_honoured() -> None:
    text = "<|channel|>final<|message|>a<|reserved|>b"
    assert answered(text)[1] == "ab"
    assert answered(text, skip_special_tokens=False)[1] == "a<|reserved|>b"
    assert answered(FINAL, include_stop_str_in_output=True)[1] == "Grüße."
    _, body = given_in(asked(include_reasoning=False), tokens_of(THOUGHT + FINAL))
    assert told(body)[:2] == ("", "Grüße.")


def test_efforts_are_the_templates() -> None:
    assert "Reasoning: medium" in prompt(asked())
    assert "Reasoning: low" in prompt(asked(reasoning_effort="low"))
    for body in (
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"reasoning_effort": ["low"]}},
    ):
        with pytest.raises(Refusal, match=r'reasoning_effort=.*"low", "medium" or "high"'):
            asked(**body)
    with pytest.raises(Refusal, match=r"output_config\.effort='max'"):
        asked("message", output_config={"effort": "max"})


def call_of(number: str, name: str = "f") -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}}


def test_thoughts_of_the_open_turn_are_kept() -> None:
    """Earlier ones are dropped; a message has one call, and its result."""
    old = {"role": "assistant", "content": "Yes.", "reasoning_content": "old"}
    calls = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "new",
        "tool_calls": [call_of("1"), call_of("2", "g")],
    }
    results = [{"role": "tool", "tool_call_id": number, "content": number} for number in ("2", "1")]
    user = {"role": "user", "content": "Hi"}
    text = prompt(asked(messages=[user, old, user, calls, *results]))
    assert "old" not in text
    assert text.endswith(
        "<|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>new\nI look.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"1"<|end|>'
        '<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        '<|start|>functions.g to=assistant<|channel|>commentary<|message|>"2"<|end|>'
        "<|start|>assistant"
    )
    # The turn has ended.
    assert "new" not in prompt(asked(messages=[user, calls, *results, old, user]))
    # The same as items of Responses.
    items = [
        {"role": "user", "content": "Hi"}, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "new"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'}, {"type": "function_call_output", "call_id": "1", "output": "1"},
    ]  # fmt: skip
    assert "analysis<|message|>new<|end|>" in prompt(asked("response", input=items))


def test_results_are_looked_at_once() -> None:
    """However many calls a message has."""
    count = 0

    class Counted(dict[str, Any]):
        def get(self, *names: Any) -> Any:
            nonlocal count
            count += 1
            return super().get(*names)

    calls = [call_of(str(number)) for number in range(100)]
    results = [Counted(role="tool", tool_call_id=str(n), content="") for n in range(100)]
    found = channel_messages(
        [{"role": "assistant", "content": "", "tool_calls": calls}, *results], False
    )
    assert [one["role"] for one in found] == ["assistant", "tool"] * 100
    assert count == 100


def test_tokenizers_that_decode_several_tokens_give_the_same_text() -> None:
    view = served().text_with_channels[0]
    other = copy.copy(view)
    other.byte_pieces = None
    texts = []
    for one in (view, other):
        text = TokenText(one, SamplingParams())
        parts = [text.push([token]) for token in tokens_of(THOUGHT + CALL + FINAL)]
        texts.append("".join(parts) + text.end("stop_token"))
    assert texts[0] == texts[1] == marked(THOUGHT + CALL + FINAL.removesuffix("<|return|>"))


def test_an_answer_goes_on_where_the_prompt_ends() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "It is", "reasoning_content": "so"},
    ]
    one = asked(messages=messages, continue_final_message=True)
    assert prompt(one).endswith("so<|end|><|start|>assistant<|channel|>final<|message|>It is")
    tokens = tokens_of(" 4.<|return|>")
    data, body = given_in(one, tokens, range(1, len(tokens)))
    assert told_by_events(data) == told(body) == ("", " 4.", [], "stop")
    for text, begun in (
        ("<|start|>user<|message|>x<|end|>", ""), ("x", ""), ("<|start|>assistant", "assistant"),
        ("<|start|>a<|channel|>analysis<|message|>x", marked("a<|channel|>analysis<|message|>")),
    ):  # fmt: skip
        assert begun_header(text) == begun


# ---- Grammars ------------------------------------------------------------------------------------


@cache
def library_tokenizer() -> Any:
    return make_tokenizer(TOKENIZER.backend.to_str(), ROWS, list(TOKENIZER.eos_ids))


def accepts(one: Asked, text: str, end: str = "<|return|>") -> bool:
    wanted = one.choices[0].params.structured_output
    assert wanted is not None
    matcher = compile_grammar(library_tokenizer(), wanted.source())
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(token) for token in tokens_of(text + end))


def test_a_format_holds_the_final_message_alone() -> None:
    one = asked(structured_outputs={"choice": ["yes", "no"]})
    for good in (
        "<|channel|>final<|message|>yes",
        THOUGHT + "<|channel|>final <|constrain|>json<|message|>no",
        THOUGHT * 2 + "<|channel|>final json<|message|>no",
    ):
        assert accepts(one, good)
    for bad in (
        "yes",
        "<|channel|>final<|message|>maybe",
        "<|channel|>analysis<|message|>yes",
        CALL.removesuffix("<|call|>"),
    ):
        assert not accepts(one, bad)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is: "}]
    inside = asked(
        messages=messages, continue_final_message=True, structured_outputs={"choice": ["yes", "no"]}
    )
    assert accepts(inside, "yes")
    assert not accepts(inside, "<|channel|>final<|message|>yes")


@pytest.mark.parametrize("begun", ["<|channel|>analysis", "<|channel|>analysis<|message|>Well"])
def test_a_template_may_begin_the_thought(begun: str) -> None:
    model = ServedModel.of(
        card(chat_template="{{ messages[0].content }}<|start|>assistant" + begun)
    )
    endpoint = ENDPOINTS[PATHS["chat"]]
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "structured_outputs": {"choice": ["yes"]},
    }
    one = endpoint.ask(
        decode_body(json.dumps(body).encode(), endpoint.kind, Limits()), model, Caller()
    )
    model.chat.close()
    rest = ("" if "message" in begun else "<|message|>") + "a<|end|><|start|>assistant"
    assert accepts(one, rest + "<|channel|>final<|message|>yes")
    assert not accepts(one, "<|channel|>final<|message|>yes")
    assert told(given_in(one, tokens_of(rest + FINAL))[1])[:2] == ("a", "Grüße.")


def test_calls_are_held_to_their_tools() -> None:
    weather = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "X", "days": 1}'
    clock = "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}"
    final = "<|channel|>final<|message|>Hello"
    required = asked(tools=[WEATHER, CLOCK], tool_choice="required")
    both = f"{weather}<|end|><|start|>assistant{clock}"
    for good in (weather, clock, THOUGHT + clock, both):
        assert accepts(required, good, "<|call|>")
    for bad in (final, weather.replace("1", '"one"'), clock.replace("clock", "other")):
        assert not accepts(required, bad)
    assert not accepts(
        asked(tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False), both
    )
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    free = asked(tools=[strict])
    assert accepts(free, THOUGHT + final)
    assert accepts(free, weather)
    assert not accepts(free, weather.replace("1", '"one"'))
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    assert accepts(free, preamble + weather)
    either = asked(tools=[WEATHER], structured_outputs={"choice": ["yes", "no"]})
    assert accepts(either, weather)
    assert accepts(either, THOUGHT + "<|channel|>final<|message|>no")
    assert not accepts(either, final)
    assert not accepts(
        either, preamble + "<|channel|>final<|message|>no"
    )  # it would be content, too
    forced = answered(THOUGHT + clock, tool_choice="required")
    assert forced == ("Hm, 世界.", "", [("clock", "{}")], "tool_calls")


# ---- Which chats are of harmony ------------------------------------------------------------------


def test_harmony_is_chosen_by_tokens_and_template_or_by_name(caplog: Any) -> None:
    def reads_channels(**options: Any) -> bool:
        return bool(ServedModel.of(card(**options.pop("card", {})), **options).chat.marks)

    assert reads_channels()
    assert reads_channels(as_megatron=True)
    assert reads_channels(card={"chat_template": "{{ messages }}"})
    assert not reads_channels(card={"chat_template": "<tool_call>"})
    assert reads_channels(card={"chat_template": "<tool_call>"}, tool_parser="openai")
    assert reads_channels(card={"chat_template": "<tool_call>"}, reasoning_parser="openai_gptoss")
    assert not reads_channels(tool_parser="hermes")
    other = ServedModel.of(card(), reasoning_parser="deepseek_r1").chat
    assert (other.marks, other.tool_format.name) == ({}, "hermes")
    without = {"tokenizer_json": make_ascii_tokenizer().backend.to_str().encode(), "eos_ids": [127]}
    assert not reads_channels(card=without)
    with pytest.raises(ConfigurationError, match=r"gpt-oss.*exclude each other"):
        check_parsers("hermes", "gpt-oss")
    with pytest.raises(ConfigurationError, match=r"no reasoning parser 'x'"):
        check_parsers(None, "x")
    with pytest.raises(ConfigurationError, match=r"'gpt-oss' needs .* no <\|start\|>"):
        reads_channels(card=without, tool_parser="gpt-oss")
    served().chat.prepare()
    assert "--tool-parser" not in caplog.text
