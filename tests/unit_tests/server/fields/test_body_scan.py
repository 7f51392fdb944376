"""Bodies are looked at once before they are read: depth and number of parts, in linear time."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_async.server.fields import json_body as body_module
from megatron_async.server.fields.json_body import Limits, check_shape, decode_body
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.request_bodies import ChatRequest, CompletionRequest

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
def test_depth_and_parts_beside_a_walk_over_what_was_read(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
