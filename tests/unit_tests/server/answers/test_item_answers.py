"""/v1/responses and /v1/messages: what is asked, and how answers are written."""

import json
from typing import Any

import pytest
from openai.types.responses import Response

from megatron_async.server.answers.message_writer import message_error_body
from megatron_async.server.fields.ask_messages import (
    CountTokensRequest,
    MessagesRequest,
    ask_messages,
    count_tokens,
)
from megatron_async.server.fields.ask_responses import ResponsesRequest, ask_responses
from megatron_async.server.fields.asked import Asked, Caller
from megatron_async.server.fields.json_body import decode_body
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.served_model import ServedModel
from tests.support.served_demo import (
    THINKING,
    answer_of,
    demo,
    end_of,
    log_probs_of,
    named_events,
    tokens_of,
)

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
THOUGHT = "<think>\nHm, a riddle.\n</think>\n\nIt is 4."


def response(served: ServedModel | None = None, **body: Any) -> Asked:
    body.setdefault("input", "Hi")
    served = served or demo()
    request = decode_body(json.dumps(body).encode(), ResponsesRequest, served.limits)
    return ask_responses(request, served, Caller())


def message(served: ServedModel | None = None, **body: Any) -> Asked:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50} | body
    served = served or demo()
    request = decode_body(json.dumps(body).encode(), MessagesRequest, served.limits)
    return ask_messages(request, served, Caller())


def both(
    asked: Asked, text: str, served: ServedModel | None = None, reason: str = "termination_id"
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of an answer, token by token, and the whole answer."""
    served = served or demo()
    tokens = tokens_of(text, reason == "termination_id")
    found = log_probs_of(tokens) if asked.choices[0].params.return_log_probs else None
    stream = answer_of(asked, served, is_stream=True)
    data = stream.begin()
    for i in range(len(tokens)):
        part = None if found is None else found[i : i + 1]
        data += stream.choices[0].push(tokens[i : i + 1], part, None)
    data += stream.choices[0].end(end_of(asked, reason))
    form = answer_of(asked, served, is_stream=False)
    form.choices[0].push(tokens, found)
    form.choices[0].end(end_of(asked, reason))
    return named_events(data), json.loads(form.body())


def prompt(asked: Asked, served: ServedModel | None = None) -> str:
    tokenizer = (served or demo()).tokenizer
    assert tokenizer is not None
    ids = asked.prompts[0]
    assert not isinstance(ids, str)
    return tokenizer.detokenize(list(ids), skip_special_tokens=False)


# ---- Responses -----------------------------------------------------------------------------------


def test_a_response_is_the_sum_of_its_events() -> None:
    asked = response(instructions="Be brief.", metadata={"a": "b"}, include=["x"], temperature=0.5)
    assert "system\nBe brief.<|im_end|>" in prompt(asked)
    events, body = both(asked, "Grüße, 世界")
    names = [event["type"].removeprefix("response.") for event in events]
    deltas = names.count("output_text.delta")
    assert names == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * deltas, "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert deltas > 2
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))
    assert text == Response.model_validate(body).output_text == "Grüße, 世界"
    last = Response.model_validate(events[-1]["response"])
    assert last.output_text == text
    assert body["usage"] == events[-1]["response"]["usage"]
    assert body["usage"]["output_tokens"] == len(tokens_of(text))
    assert body["metadata"] == {"a": "b"}
    assert body["temperature"] == 0.5
    assert body["store"] is False
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {events[-1]["response"]["output"][0]["id"]}


def test_a_response_that_is_cut_off_says_so() -> None:
    events, body = both(response(max_output_tokens=3), "one two three", reason="length")
    assert events[-1]["type"] == "response.incomplete"
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_response_without_a_token_has_an_empty_text() -> None:
    events, body = both(response(), "")
    assert Response.model_validate(body).output_text == ""
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message"]


def test_thoughts_and_calls_are_items() -> None:
    served = demo(THINKING)
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    events, body = both(response(served, tools=tools), THOUGHT + CALL, served)
    thought, text, call = body["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, a riddle.\n"}]
    assert text["content"][0]["text"] == "It is 4.Let me see.\n"
    assert (call["type"], call["name"]) == ("function_call", "weather")
    assert json.loads(call["arguments"]) == {"city": "Köln"}
    done = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert json.loads(done[0]["arguments"]) == {"city": "Köln"}
    parts = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(parts) == "Hm, a riddle.\n"
    reasoned = body["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert 4 <= reasoned < body["usage"]["output_tokens"] - 10
    assert [e["output_index"] for e in events if e["type"].endswith("item.added")] == [0, 1, 2]


def test_tools_as_codex_offers_them() -> None:
    """Functions in groups, which calls name, and tools that only OpenAI's servers run."""
    inner = {"type": "function", "name": "weather", "parameters": SCHEMA}
    group = {"type": "namespace", "name": "earth", "description": "x", "tools": [inner]}
    plain = {"type": "function", "name": "clock"}
    custom = {"type": "custom", "name": "patch"}
    mixed = group | {"tools": [inner, custom]}
    asked = response(tools=[plain, mixed, {"type": "web_search"}, custom, group | {"tools": []}])
    said = prompt(asked)
    assert '"earth.weather"' in said
    assert "web_search" not in said + str(asked.style.repeated["tools"])
    assert [tool["name"] for tool in asked.style.repeated["tools"]] == ["clock", "earth"]
    assert [tool["name"] for tool in asked.style.repeated["tools"][1]["tools"]] == ["weather"]
    events, body = both(asked, CALL.replace("weather", "earth.weather"))
    called = Response.model_validate(body).output[-1]
    assert (called.type, called.name, called.namespace) == ("function_call", "weather", "earth")
    named = [(e["type"], e["name"]) for e in events if "name" in e]
    assert named == [("response.function_call_arguments.done", "weather")]
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call_output", "call_id": called.call_id, "output": "sunny"},
    ]
    items.insert(1, body["output"][-1])
    assert response(tools=[group], input=items)
    _, body = both(asked, CALL.replace("weather", "patch"))
    assert [item["type"] for item in body["output"]] == ["message"]


def test_log_probs_of_a_response() -> None:
    asked = response(include=["message.output_text.logprobs"], top_logprobs=2)
    events, body = both(asked, "ab cd")
    told = body["output"][0]["content"][0]["logprobs"]
    parts = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    assert [one for part in parts for one in part] == told
    assert [len(one["top_logprobs"]) for one in told] == [2] * len(told)
    assert "".join(one["token"] for one in told) == "ab cd"


def test_items_become_messages() -> None:
    served = demo(THINKING)
    items = [
        {"role": "developer", "content": "Rules."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "T"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "B"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "user", "content": "C"},
    ]
    said = prompt(response(served, input=items, instructions="First."), served)
    assert said.startswith("<|im_start|>system\nFirst.\n\nRules.<|im_end|>\n<|im_start|>user\nA<")
    assert "assistant\nB<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>user\nC" in said


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"store": True}, "store was given"), ({"previous_response_id": "r"}, "whole conversation"),
        ({"background": True}, "background"), ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt was given"), ({"truncation": "auto"}, "truncation="),
        ({"tools": [{"type": "web_search"}]}, "'web_search'"), ({"input": []}, "empty"),
        ({"tool_choice": {"type": "mcp"}, "tools": []}, "tool_choice="),
        ({"max_output_tokens": 0}, "max_output_tokens=0"), ({"input": [{"role": 1}]}, "no role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "no images"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "arguments is missing"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "output must be"),
        ({"input": [{"role": "user", "content": [1]}]}, "part of type 'None'"),
        ({"input": [{"type": "reasoning", "content": 3}]}, "list of parts"),
    ],
)  # fmt: skip
def test_what_a_response_cannot_be_asked(body: dict[str, Any], part: str) -> None:
    with pytest.raises(Refusal, match=part):
        response(**body)


# ---- Messages ------------------------------------------------------------------------------------


def test_a_message_and_its_events() -> None:
    events, body = both(message(system=[{"type": "text", "text": "Be brief."}]), "Hello there")
    names = [event["type"] for event in events]
    deltas = names.count("content_block_delta")
    assert names == [
        "message_start", "content_block_start", *["content_block_delta"] * deltas,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert (
        "".join(e["delta"]["text"] for e in events if e["type"].endswith("_block_delta"))
        == (body["content"][0]["text"])
    )
    assert body["content"] == [{"type": "text", "text": "Hello there"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert events[-2]["usage"] == body["usage"]
    assert body["usage"]["cache_read_input_tokens"] == 1
    tokens = body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"]
    assert tokens == events[0]["message"]["usage"]["input_tokens"]


def test_why_a_message_stopped() -> None:
    asked = message(stop_sequences=["END", "three"])
    events, body = both(asked, "one two three", reason="stop_word")
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "three")
    assert body["content"][0]["text"] == "one two "
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "three"}
    assert both(message(), "one", reason="length")[1]["stop_reason"] == "max_tokens"


def test_thoughts_and_calls_are_blocks() -> None:
    served = demo(THINKING)
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    asked = message(served, tools=tools, thinking={"type": "adaptive"})
    assert prompt(asked, served).endswith("<think>\n")
    events, body = both(asked, THOUGHT.removeprefix("<think>") + CALL, served)
    thought, text, call = body["content"]
    assert thought == {"type": "thinking", "thinking": "Hm, a riddle.\n", "signature": ""}
    assert text["text"] == "It is 4.Let me see.\n"
    assert call["input"] == {"city": "Köln"}
    assert call["id"].startswith("toolu_")
    assert body["stop_reason"] == "tool_use"
    parts = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    given = "".join(part.get("partial_json", "") for part in parts)
    assert json.loads(given) == {"city": "Köln"}
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2]
    forced = message(tools=tools, tool_choice={"type": "tool", "name": "weather"})
    assert forced.choices[0].params.structured_output is not None
    assert both(forced, CALL.split("\n", 1)[1])[1]["stop_reason"] == "tool_use"


def test_blocks_become_messages() -> None:
    turns = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "T", "signature": ""}, {"type": "text", "text": "B"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "is_error": True,
             "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "C", "cache_control": {"type": "ephemeral"}},
        ]},
        {"role": "assistant", "content": "So"},
    ]  # fmt: skip
    served = demo(THINKING)
    said = prompt(message(served, messages=turns), served)
    assert "tool\nError: rain<|im_end|>\n<|im_start|>user\nC<|im_end|>" in said
    assert said.endswith("assistant\nSo")  # the answer goes on with it
    body = json.dumps({"messages": turns}).encode()
    request = decode_body(body, CountTokensRequest, served.limits)
    assert count_tokens(request, served) == len(message(served, messages=turns).prompts[0])


IMAGE = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"max_tokens": 0}, "max_tokens=0"), ({"messages": [IMAGE]}, "'image'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role='tool'"),
        ({"messages": []}, "empty"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 2000}}, "thinking.budget_tokens=2000"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens=5"),
        ({"thinking": {"type": "x"}}, "thinking.type"), ({"mcp_servers": [1]}, "mcp_servers"),
        ({"tools": [{"name": "w", "type": "web_search_20250305"}]}, "runs none"),
        ({"tools": [{"name": "w"}], "tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "x"}}}, "format.type"), ({"system": [{}]}, "system"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "input object"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "no text"),
    ],
)  # fmt: skip
def test_what_a_message_cannot_be_asked(body: dict[str, Any], part: str) -> None:
    with pytest.raises(Refusal, match=part) as refused:
        message(**body)
    told = json.loads(message_error_body(refused.value))
    assert told["type"] == "error"
    assert told["error"]["type"] == "invalid_request_error"


def test_max_tokens_must_be_given() -> None:
    with pytest.raises(Refusal, match="max_tokens"):
        decode_body(b'{"messages": []}', MessagesRequest, demo().limits)


@pytest.mark.parametrize("asked", [response, message])
def test_who_fails_late_says_so_in_the_stream(asked: Any) -> None:
    stream = answer_of(asked(), is_stream=True)
    data = stream.begin() + stream.choices[0].push(tokens_of("a b", ends=False), None, None)
    data += stream.choices[0].end(end_of(asked(), "aborted"))
    last = named_events(data)[-1]
    error = last["error"] if last["type"] == "error" else last["response"]["error"]
    assert "aborted" in error["message"]


@pytest.mark.parametrize("ask", [response, message])
def test_fields_of_vllm_that_change_a_text_are_honoured(ask: Any) -> None:
    params = ask(
        structured_outputs={"choice": ["yes", "no"]}, logit_bias={"5": -100}, bad_words=["x"],
        include_stop_str_in_output=True, **{"stop" if ask is response else "stop_sequences": ["s"]},
    ).choices[0].params  # fmt: skip
    assert params.structured_output.choice == ["yes", "no"]
    assert (params.logit_bias, params.bad_words, params.stop_words) == ({5: -100}, ["x"], ["s"])
    assert params.detokenize_stop_sequence
    schema = {"type": "json_schema", "schema": SCHEMA}
    form = {"text": {"format": schema}} if ask is response else {"output_format": schema}
    with pytest.raises(Refusal, match="give one of them"):
        ask(structured_outputs={"choice": ["yes"]}, **form)
    choice = "required" if ask is response else {"type": "any"}
    tool = {"name": "f", "type": "function"} if ask is response else {"name": "f"}
    with pytest.raises(Refusal, match="a forced tool call and a response format"):
        ask(structured_outputs={"regex": "a"}, tools=[tool], tool_choice=choice)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Write a <tool_call> tag.", "Write a <tool_call> tag.", []),
        (f"first {CALL[12:]} then ", "first  then ", ["weather"]),
        ('<tool_call>\n{"name": "weather"}\n</tool_call>\n', "", ["weather"]),
        ('<tool_call>{"name": "Bob"}</tool_call>', '<tool_call>{"name": "Bob"}</tool_call>', []),
    ],
)  # fmt: skip
def test_calls_and_content_are_the_same_at_both_endpoints(
    text: str, content: str, calls: list[str]
) -> None:
    tool = {"name": "weather", "parameters": SCHEMA, "type": "function"}
    events, body = both(response(tools=[tool]), text)
    assert Response.model_validate(body).output_text == content
    assert [one["name"] for one in body["output"] if one["type"] == "function_call"] == calls
    assert events[-1]["response"]["output"][-1].keys() == body["output"][-1].keys()
    deltas = [event["delta"] for event in events if event["type"].endswith("output_text.delta")]
    assert "".join(deltas) == content
    tool = {"name": "weather", "input_schema": SCHEMA}
    events, body = both(message(tools=[tool]), text)
    assert "".join(block.get("text", "") for block in body["content"]) == content
    assert [one["name"] for one in body["content"] if one["type"] == "tool_use"] == calls
    assert all(isinstance(one.get("input", {}), dict) for one in body["content"])
    texts = [event["delta"].get("text", "") for event in events if "delta" in event]
    assert "".join(texts) == content


def test_forced_calls_that_are_cut_off_leave_no_text() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "K'
    tool = {"name": "weather", "parameters": SCHEMA, "type": "function"}
    for choice in ("required", {"type": "function", "name": "weather"}):
        events, body = both(response(tools=[tool], tool_choice=choice), text, reason="length")
        assert Response.model_validate(body).output_text == ""
        assert body["incomplete_details"] == {"reason": "max_output_tokens"}
        assert not any(event["type"].endswith(".delta") for event in events)
    tool = {"name": "weather", "input_schema": SCHEMA}
    for given in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        events, body = both(message(tools=[tool], tool_choice=given), text, reason="length")
        assert (body["content"], body["stop_reason"]) == ([], "max_tokens")
        assert not any(event["type"] == "content_block_delta" for event in events)
