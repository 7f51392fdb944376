# ruff: noqa: E501  (tables of cases)
"""Any JSON is asked or refused with an error object; nothing else is ever raised."""

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_async.server.fields import json_body as body_module
from megatron_async.server.fields.asked import Asked
from megatron_async.server.fields.json_body import Limits, check_shape, decode_body
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.request_bodies import ChatRequest, CompletionRequest
from tests.support.served_demo import asked_raw, demo

NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.integers(-3, 30), st.floats(width=64),
    st.sampled_from([0, -1, 1, 10**400, 2**63, -(2**63), 1e308, 5e-324, 49152]),
)  # fmt: skip
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from([
        "", "auto", "none", "required", "json_object", "json_schema", "text", "user", "assistant",
        "tool", "function", "image_url", "\x00", "\U0001f642", "<|im_end|>", "</think>", "a" * 300,
        "{", "(", "[a-", "start: \"a\"", "f",
    ]),
)  # fmt: skip
KEYS = st.one_of(
    st.sampled_from([
        "type", "role", "content", "text", "function", "name", "parameters", "json_schema",
        "schema", "include_usage", "regex", "choice", "grammar", "json", "json_object", "arguments",
        "tool_calls", "5", "-1", "enable_thinking", "$ref", "properties", "disable_any_whitespace",
    ]),
    st.text(max_size=4),
)  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=8,
)  # fmt: skip
FUNCTION = st.fixed_dictionaries(
    {"name": TEXTS}, optional={"parameters": VALUES, "description": TEXTS, "strict": VALUES}
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer", "x"])},
    optional={"content": st.one_of(TEXTS, VALUES), "tool_calls": VALUES, "name": TEXTS},
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(-1, 9),
    "prompt": st.one_of(TEXTS, st.lists(st.integers(-1, 49153), max_size=4), st.lists(TEXTS)),
    "messages": st.lists(MESSAGE, max_size=3),
    "tools": st.lists(st.fixed_dictionaries({"function": FUNCTION}, optional={"type": TEXTS}), max_size=3),
    "tool_choice": st.one_of(TEXTS, st.fixed_dictionaries({"function": FUNCTION})),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema"])},
        optional={"json_schema": st.fixed_dictionaries({}, optional={"schema": VALUES})},
    ),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["json", "regex", "choice", "grammar", "json_object"]),
        st.one_of(TEXTS, VALUES), max_size=2,
    ),
    "logit_bias": st.dictionaries(st.integers(-1, 49153).map(str), NUMBERS, max_size=3),
    "seed": NUMBERS, "temperature": NUMBERS, "top_p": NUMBERS, "top_k": NUMBERS,
    "stop": st.one_of(TEXTS, st.lists(TEXTS, max_size=3)),
    "chat_template_kwargs": st.dictionaries(KEYS, VALUES, max_size=2),
}  # fmt: skip


def bodies(kind: type[msgspec.Struct]) -> st.SearchStrategy[dict[str, Any]]:
    fields = {
        name: st.one_of(LIKELY[name], LIKELY[name], VALUES) if name in LIKELY else VALUES
        for name in kind.__struct_fields__
        if name != "model"
    }
    first = "prompt" if kind is CompletionRequest else "messages"
    return st.lists(st.sampled_from(sorted(fields)), max_size=5).flatmap(
        lambda names: st.fixed_dictionaries({n: fields[n] for n in {first, *names}})
    )


def asked_or_refused(kind: type, body: bytes) -> bool:
    try:
        asked = asked_raw(kind, body)
    except Refusal as refusal:
        assert 400 <= refusal.status < 500, refusal.message  # noqa: PT017
        error = json.loads(refusal.body())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return False
    assert isinstance(asked, Asked)
    assert 1 <= len(asked.choices) <= demo().limits.choices
    for choice in asked.choices:
        choice.params.validate(demo().card.vocab_size)
        assert len(asked.prompts[choice.prompt]) < demo().card.max_sequence_length
    return True


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_every_field_with_any_value(kind: type[msgspec.Struct]) -> None:
    outcomes = []
    demo().chat.prepare()

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies(kind))
    def run(body: dict[str, Any]) -> None:
        outcomes.append(asked_or_refused(kind, json.dumps(body).encode()))

    run()
    assert {True, False} == set(outcomes)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=40), st.text('{}[]":,\\u0d8n1e.-truefalse ', max_size=30)))
def test_what_is_no_json_is_refused(body: bytes | str) -> None:
    body = body.encode() if isinstance(body, str) else body
    for kind in (CompletionRequest, ChatRequest):
        asked_or_refused(kind, body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}',
        b'{"prompt": [1e5]}', b'{"prompt": "a", "temperature": NaN}', b"",
        b'{"prompt": "a", "top_p": 1e999}', b'{"prompt": "a"} {}', b'["prompt"]',
        b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_bodies_that_break_decoders(body: bytes) -> None:
    with pytest.raises(Refusal):
        asked_raw(CompletionRequest, body)


def test_depth_and_size_are_checked_before_the_body_is_read() -> None:
    limits = Limits(body_bytes=10_000, json_depth=5)
    flat = b'{"prompt": "a", "x": [' + b"[],[1]," * 1000 + b"1]}"
    assert decode_body(flat, CompletionRequest, limits).prompt == "a"
    strings = json.dumps({"prompt": '[[[["\\"{{{{' * 20}).encode()
    assert decode_body(strings, CompletionRequest, limits)
    for opening in (b"[", b'{"a":'):
        deep = b'{"prompt": "a", "x": ' + opening * 5
        with pytest.raises(Refusal, match="deep"):
            decode_body(deep, CompletionRequest, limits)
    with pytest.raises(Refusal) as caught:
        decode_body(b" " * 10_001, CompletionRequest, limits)
    assert caught.value.status == 413


ENDLESS = 10**9


def some_json(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(4 if depth else 2)
    if kind < 2:
        return "".join(draw.choices('[]{}":\\,a\n\u20ac', k=draw.randrange(9)))
    inner = [some_json(draw, depth - 1) for _ in range(draw.randrange(4))]
    return inner if kind == 2 else {f'{i}"{{\\': value for i, value in enumerate(inner)}


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value
    if isinstance(value, str):
        return 0
    return 1 + max(map(depth_of, inner), default=0)


def parts_of(value: Any) -> int:
    if isinstance(value, str):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + (len(value) if isinstance(value, dict) else 0) + sum(map(parts_of, inner))


def is_allowed(body: bytes, depth: int = ENDLESS, parts: int = ENDLESS) -> bool:
    try:
        check_shape(body, Limits(json_depth=depth, json_parts=parts))
    except Refusal:
        return False
    return True


@pytest.mark.parametrize("block_bytes", [1, 3, 1000])
def test_depth_and_parts_beside_a_walk_over_what_was_read(block_bytes: int, monkeypatch):
    monkeypatch.setattr(body_module, "_BLOCK_BYTES", block_bytes)
    draw, deep = random.Random(7), 0
    for _ in range(60):
        value = some_json(draw, 4)
        body = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
        depth, parts = depth_of(value), parts_of(value)
        assert is_allowed(body, depth, parts), body
        if parts:
            deep += 1
            assert not is_allowed(body, depth, parts - 1), body
            assert not is_allowed(body, depth - 1, parts), body
    assert deep > 10


def hostile_bodies(size: int) -> Iterator[bytes]:
    opened = b'{"prompt":' + b"[" * 200
    yield opened + b'"' + b'\\"' * (size // 2)
    yield opened + b'"' * size
    yield opened + b'"' + b"\\" * size
    yield opened + b'"' + b"[" * size
    yield b'{"a":' + b'{"":' * (size // 4)


@pytest.mark.parametrize("number", range(5))
def test_no_body_takes_more_than_linear_time(number: int) -> None:
    body = list(hostile_bodies(1 << 20))[number]
    start = time.process_time()
    is_allowed(body)
    assert time.process_time() - start < 2  # some 10 ms; a second for each 8 kB where quadratic


def test_many_parts_are_refused_before_they_are_made() -> None:
    biases = {str(token): 1 for token in range(2**18)}
    body = json.dumps({"prompt": "a", "logit_bias": biases}).encode()
    with pytest.raises(Refusal, match="members") as refused:
        decode_body(body, CompletionRequest, Limits())
    assert refused.value.status == 400
    colons = json.dumps({"prompt": ":[{" * 2**18}).encode()
    assert decode_body(colons, CompletionRequest, Limits()).prompt == ":[{" * 2**18


def test_lists_that_are_walked_have_a_limit() -> None:
    limits = Limits(messages=10)
    for kind, field, entry in (
        (ChatRequest, "messages", {"role": "user", "content": "a"}),
        (CompletionRequest, "stop", "a"),
        (CompletionRequest, "stop_token_ids", 1),
        (CompletionRequest, "bad_words", "a"),
    ):
        start = {"messages": [], "prompt": "a"}
        ten = json.dumps({**start, field: [entry] * 10}).encode()
        assert len(getattr(decode_body(ten, kind, limits), field)) == 10
        eleven = json.dumps({**start, field: [entry] * 11}).encode()
        with pytest.raises(Refusal, match=f"{field} has 11 entries, and 10 are allowed"):
            decode_body(eleven, kind, limits)
    ids = json.dumps({"prompt": [1] * 11}).encode()
    assert decode_body(ids, CompletionRequest, limits).prompt == [1] * 11
