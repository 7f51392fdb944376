import json
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from megatron_async.server.fields.refusal import Refusal, refusal_of
from tests.support.served_demo import (
    answer_of,
    answered,
    asked_chat,
    asked_completion,
    demo,
    end_of,
    events_of,
    log_probs_of,
    streamed,
    tokens_of,
)

TEXT = ' Grüße "q" \n\\ 世界 🙂 </s>'


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [c for e in events for c in e["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=30), st.integers(1, 5), st.booleans())
def test_streams_are_the_whole_answer(text: str, each: int, one_each: bool) -> None:
    asked = asked_completion(prompt="Hello", stream=True)
    answer = answer_of(asked, one_event_a_token=one_each)
    tokens, data = tokens_of(text), b""
    for i in range(0, len(tokens), each):
        data += answer.choices[0].push(tokens[i : i + each])
    events = events_of(data + answer.choices[0].end(end_of(asked)))
    expected = demo().tokenizer.detokenize(tokens)  # type: ignore[union-attr]
    assert text_of(events) == expected
    assert answered(asked, text)["choices"][0]["text"] == expected
    assert answered(asked_chat(), text)["choices"][0]["message"]["content"] == expected


def test_events_of_a_completion() -> None:
    events = streamed(asked_completion(prompt="Hello", stream=True), TEXT)
    assert text_of(events) == TEXT
    Completion.model_validate(events[-1])  # its type has no null, which OpenAI sends before
    for event in events:
        assert event["object"] == "text_completion"
        assert "usage" not in event
    assert [e["choices"][0]["finish_reason"] for e in events[-2:]] == [None, "stop"]
    assert len({event["id"] for event in events}) == 1


def test_events_of_a_chat_begin_with_the_role() -> None:
    events = streamed(asked_chat(stream=True, n=2), TEXT)
    assert [event["choices"][0]["delta"] for event in events[:2]] == [
        {"role": "assistant", "content": ""}] * 2  # fmt: skip
    assert [event["choices"][0]["index"] for event in events[:2]] == [0, 1]
    for index in (0, 1):
        assert text_of(events, index) == TEXT
    for event in events:
        ChatCompletionChunk.model_validate(event)


def test_usage_is_the_last_event_and_null_before() -> None:
    options = {"include_usage": True}
    asked = asked_chat(stream=True, n=2, stream_options=options)
    *events, last = streamed(asked, "abc def")
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    prompt, generated = len(asked.prompts[0]), 2 * len(tokens_of("abc def"))
    assert last["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": generated,
        "total_tokens": prompt + generated, "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = streamed(
        asked_completion(prompt="a", stream=True, stream_options=options), "b c d"
    )
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 4


def test_one_event_a_token_or_joined() -> None:
    asked = asked_completion(prompt="a", stream=True)
    for one_each, expected in ((True, 4), (False, 1)):
        formatter = answer_of(asked, one_event_a_token=one_each).choices[0]
        data = formatter.push(tokens_of(" b c d e", ends=False))
        assert data.count(b"\n\n") == expected


def test_plain_events_are_those_that_an_encoder_writes() -> None:
    asked = asked_chat(stream=True, stream_options={"include_usage": True})
    formatter = answer_of(asked, is_stream=True).choices[0]
    style = asked.style
    choice = {"index": 0, "delta": {"content": " b"}, "logprobs": None, "finish_reason": None}
    event = {
        "id": style.id, "object": "chat.completion.chunk", "created": style.created,
        "model": style.model, "choices": [choice], "usage": None,
    }  # fmt: skip
    expected = b"data: " + msgspec.json.encode(event) + b"\n\n"
    assert formatter.push(tokens_of(" b", ends=False)) == expected


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("length", "length"),
        ("stop_word", "stop"),
        ("grammar", "stop"),
        ("aborted", "abort"),
        ("stale", "stale"),
    ],
)
def test_finish_reasons(reason: str, told: str) -> None:
    asked = asked_completion(prompt="a", stop="zz", stream=True)
    assert streamed(asked, "b", reason=reason)[-1]["choices"][0]["finish_reason"] == told
    assert answered(asked, "b", reason=reason)["choices"][0]["finish_reason"] == told


def test_stop_words_are_cut_and_never_told() -> None:
    asked = asked_completion(prompt="a", stop=["END", "\n\n"], stream=True)
    for each in (1, 2, 9):
        events = streamed(asked, " b c END", each=each, reason="stop_word")
        assert text_of(events) == " b c "
    kept = asked_completion(prompt="a", stop="END", include_stop_str_in_output=True)
    assert answered(kept, " b END", reason="stop_word")["choices"][0]["text"] == " b END"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "reason", "told"),
    [
        ({"stop": ["END", "x"]}, "b x", "stop_word", "x"),
        ({"stop": "END"}, "b END", "stop_word", "END"),
        ({"stop": "END", "include_stop_str_in_output": True}, "b END", "stop_word", "END"),
        ({"stop_token_ids": [tokens_of("b")[0]]}, "b", "stop_token", tokens_of("b")[0]),
        ({"stop": "END"}, "b", "termination_id", None),
        ({"stop": "END"}, "b", "length", None),
        ({}, "b<|endoftext|>", "stop_token", None),  # an end token of the model's
        ({"ignore_eos": True, "stop_token_ids": [0]}, "b<|endoftext|>", "stop_token", 0),
    ],
)
def test_stop_reasons_are_vllms(
    chat: bool, fields: dict[str, Any], text: str, reason: str, told: Any
) -> None:
    fields = fields | {"max_tokens": 9}
    asked = asked_chat(**fields) if chat else asked_completion(prompt="a", **fields)
    assert answered(asked, text, reason=reason)["choices"][0]["stop_reason"] == told
    events = streamed(asked, text, reason=reason)
    assert events[-1]["choices"][0]["stop_reason"] == told
    without = demo().__class__.of(
        msgspec.structs.replace(demo().card, tokenizer_json=None, replica_makes_text=True)
    )
    word = told if isinstance(told, str) else None
    answer = answer_of(
        asked, without, is_stream=True
    )  # its replica makes the text, and tells the word
    data = answer.choices[0].push(tokens_of(text, ends=False))
    data += answer.choices[0].end(end_of(asked, reason, stop_word=word))
    assert events_of(data)[-1]["choices"][0]["stop_reason"] == told


def test_special_tokens_are_left_out_or_kept() -> None:
    text = "<|im_start|>a"
    assert answered(asked_completion(prompt="a"), text)["choices"][0]["text"] == "a"
    kept = asked_completion(prompt="a", skip_special_tokens=False, stream=True)
    assert answered(kept, text)["choices"][0]["text"] == text
    assert text_of(streamed(kept, text)) == text


def test_log_probs_of_a_completion() -> None:
    asked = asked_completion(prompt="Hello there", echo=True, logprobs=1, max_tokens=4)
    choice = answered(asked, " é🙂", reason="length")["choices"][0]
    found = choice["logprobs"]
    assert choice["text"] == "Hello there é🙂"
    # The emoji is two tokens, neither of which is a text.
    assert found["tokens"] == ["Hello", " there", " é", "bytes:\\xf0\\x9f", "bytes:\\x99\\x82"]
    assert found["token_logprobs"] == [None, -1, -1, -1.5, -2]
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][1] == {" there": -1}
    assert found["text_offset"] == [0, 5, 11, 13, 14]
    by_id = asked_completion(prompt="a", logprobs=0, return_tokens_as_token_ids=True)
    found = answered(by_id, " b", reason="length")["choices"][0]["logprobs"]
    assert found["tokens"] == [f"token_id:{tokens_of(' b')[0]}"]
    assert found["top_logprobs"] == [{f"token_id:{tokens_of(' b')[0]}": -1.0}]


def test_a_streams_log_probs_are_those_of_the_whole_answer() -> None:
    for extra in ({}, {"echo": True}):
        asked = asked_completion(prompt="Hello there", logprobs=2, stream=True, **extra)
        events = streamed(asked, TEXT)
        expected = answered(asked, TEXT)["choices"][0]
        found = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
        for key, values in expected["logprobs"].items():
            assert [value for one in found for value in one[key]] == values, key
        assert text_of(events) == expected["text"]
    chat = asked_chat(logprobs=True, top_logprobs=2, stream=True)
    found = [e["choices"][0]["logprobs"] for e in streamed(chat, TEXT)]
    content = [entry for one in found if one for entry in one["content"]]
    assert content == answered(chat, TEXT)["choices"][0]["logprobs"]["content"]
    data = b"".join(bytes(entry["bytes"]) for entry in content[:-1])
    assert data.decode() == TEXT  # the real bytes; behind them is the token of the end
    assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"]


def test_scoring_tells_the_prompt_alone() -> None:
    """What lm-eval asks for: echo, log probs and no token."""
    asked = asked_completion(prompt=[[9906, 1354, 11]], echo=True, logprobs=1, max_tokens=0)
    assert asked.choices[0].params.is_score
    found = answered(asked, "", reason="length")
    choice = found["choices"][0]
    assert choice["text"] == demo().tokenizer.detokenize([9906, 1354, 11])  # type: ignore[union-attr]
    assert choice["logprobs"]["token_logprobs"] == [None, -1, -1.5]
    assert found["usage"]["completion_tokens"] == 0
    asked = asked_completion(prompt=[9906, 1354], echo=True, logprobs=1, max_tokens=0, stream=True)
    events = streamed(asked, "", reason="length")
    assert events[0]["choices"][0]["logprobs"]["token_logprobs"] == [None, -1]
    found = answered(asked_completion(prompt=[9906, 1354], prompt_logprobs=0, max_tokens=0), "")
    assert found["choices"][0]["text"] == ""
    assert [None if at is None else [*at] for at in found["choices"][0]["prompt_logprobs"]] == [
        None, ["1354"],
    ]  # fmt: skip


def test_numbers_that_json_does_not_have() -> None:
    asked = asked_completion(prompt="a", logprobs=2)
    answer = answer_of(asked, is_stream=False)
    log_probs = log_probs_of(tokens_of(" b", ends=False))
    log_probs.chosen[:] = -np.inf
    assert log_probs.top is not None
    log_probs.top[:] = [[-0.5, -np.inf]]
    answer.choices[0].push(tokens_of(" b", ends=False), log_probs)
    answer.choices[0].end(end_of(asked, "length"))
    found = json.loads(answer.body())["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [-9999.0]
    assert found["top_logprobs"] == [{" b": -0.5}]


def test_token_ids_and_prompt_log_probs() -> None:
    asked = asked_completion(prompt=[9906, 1354], return_token_ids=True, prompt_logprobs=1)
    choice = answered(asked, " b")["choices"][0]
    assert choice["token_ids"] == tokens_of(" b")
    assert choice["prompt_token_ids"] == [9906, 1354]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second["1354"]["logprob"] == -1
    asked = asked_chat(return_token_ids=True, stream=True)
    events = streamed(asked, TEXT)
    ids = [token for e in events for token in e["choices"][0].get("token_ids", [])]
    assert ids == tokens_of(TEXT)
    chat = answered(asked_chat(prompt_logprobs=0), " b")
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize("ask", [asked_chat, partial(asked_completion, prompt="Hello")])
def test_versions_of_weights_are_told_at_the_end(ask: Any) -> None:
    told = {"weight_versions": [("a", 0, 2), (2, 2, 5)], "kv_versions": [("a", 0, 9)]}
    in_json = {
        "weight_versions": [
            {"version": "a", "start": 0, "end": 2}, {"version": 2, "start": 2, "end": 5},
        ],
        "kv_versions": [{"version": "a", "start": 0, "end": 9}],
    }  # fmt: skip
    for is_stream in (False, True):
        asked = ask(return_weight_versions=True, stream=is_stream)
        answer = answer_of(asked, is_stream=is_stream)
        answer.choices[0].push(tokens_of(TEXT))
        data = answer.choices[0].end(end_of(asked, "weight_update", **told))
        last = events_of(data)[-1] if is_stream else json.loads(answer.body())
        choice = last["choices"][0]
        assert {name: choice[name] for name in in_json} == in_json
        assert choice["finish_reason"] == "abort"
    assert "weight_versions" not in str(answered(ask(), TEXT))


def test_answers_are_what_openais_client_reads() -> None:
    chat = answered(asked_chat(logprobs=True, top_logprobs=1, n=2), TEXT)
    ChatCompletion.model_validate(chat)
    completion = answered(asked_completion(prompt=["a", "b"], n=2, logprobs=1), TEXT)
    Completion.model_validate(completion)
    assert [choice["index"] for choice in completion["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("kind", "status"),
    [("RequestError", 400), ("SequenceTooLong", 400), ("Overloaded", 503), ("ReplicaLost", 503),
     ("CoordinatorLost", 503), ("StepFailed", 500), ("SomethingElse", 500)],
)  # fmt: skip
def test_failures(kind: str, status: int) -> None:
    asked = asked_completion(prompt="a", n=2, stream=True)
    failed = end_of(asked, "error", failure=(kind, "the reason"))
    answer = answer_of(asked, is_stream=False)
    answer.choices[1].end(failed)
    with pytest.raises(Refusal) as caught:
        answer.body()
    assert caught.value.status == status
    assert ("the reason" in caught.value.message) == (status != 500)  # whose it is is not known
    assert (caught.value.retry_after_s is not None) == (status == 503)
    stream = answer_of(asked, is_stream=True)
    data = stream.choices[0].push(tokens_of(" b", ends=False)) + stream.choices[0].end(failed)
    assert not data.endswith(b"data: [DONE]\n\n")  # the other choice goes on
    data += stream.choices[1].end(end_of(asked))
    *_, error, last = events_of(data)
    assert error["error"]["type"] == refusal_of(kind, "").kind
    assert last["choices"][0]["finish_reason"] == "stop"


def test_texts_of_the_replica() -> None:
    asked = asked_completion(prompt="a", stream=True)
    demo_texts = demo()
    msgspec.structs.force_setattr(asked.style, "keeps_special_tokens", False)
    without = demo_texts.__class__.of(
        msgspec.structs.replace(demo_texts.card, tokenizer_json=None, replica_makes_text=True)
    )
    answer = answer_of(asked, without, is_stream=True)
    data = answer.choices[0].push(tokens_of(" b", ends=False))
    data += answer.choices[0].push([], None, " Text")
    events = events_of(data + answer.choices[0].end(end_of(asked)))
    assert text_of(events) == " Text"
