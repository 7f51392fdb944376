"""Content-Length in odd forms, by itself: behind another server's HTTP parser any may come."""

import asyncio

import pytest

from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.http.exchange import Exchange


def body(length, sent=b""):
    async def receive():
        return {"type": "http.request", "body": sent}

    exchange = Exchange({}, receive, None, {b"content-length": length})
    return asyncio.run(exchange.body(1000))


@pytest.mark.parametrize("length", [b"0", b"0" * 6000, b"0" * 6000 + b"1000", b"", b"+5", b"x"])
def test_what_is_no_too_large_number_is_read(length):
    assert body(length) == b""


@pytest.mark.parametrize("length", [b"1001", b"0" * 6000 + b"1001", b"9" * 6000, b"1" + b"0" * 20])
def test_too_large_numbers(length):
    with pytest.raises(Refusal, match="more than 1000 bytes") as refused:
        body(length)
    assert refused.value.status == 413
