"""Answers of known length, and errors, as ASGI messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from megatron_async.server.fields.refusal import Refusal

Send = Callable[[Any], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]
JSON = b"application/json"
EVENTS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events back
)
"""Headers of a stream."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def reply(
    send: Send, body: bytes, status: int = 200, content_type: bytes = JSON, headers: Headers = ()
) -> None:
    """A whole answer."""
    length = b"%d" % len(body)
    all_headers = [(b"content-type", content_type), (b"content-length", length), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


async def reply_json(send: Send, value: Any, status: int = 200, headers: Headers = ()) -> None:
    """A whole answer, of what msgspec can encode."""
    await reply(send, msgspec.json.encode(value), status, headers=headers)


async def refuse(
    send: Send, refusal: Refusal, error_body: Callable[[Refusal], bytes] = Refusal.body
) -> None:
    """An error object with its status, written by `error_body`; one that may be tried again says
    when."""
    more: list[tuple[bytes, bytes]] = []
    if refusal.retry_after_s is not None:
        more.append((b"retry-after", b"%d" % refusal.retry_after_s))
    if refusal.status == 401:
        more.append((b"www-authenticate", b"Bearer"))
    await reply(send, error_body(refusal), refusal.status, headers=more)
