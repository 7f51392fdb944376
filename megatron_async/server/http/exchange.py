"""`Exchange`: one HTTP request and the means to answer it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from megatron_async.requests.traces import read_traceparent
from megatron_async.server.chat.template_renderer import TakesLong
from megatron_async.server.fields.ask import is_quick
from megatron_async.server.fields.asked import NOBODY, Caller
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.http.answer_connection import AnswerConnection
from megatron_async.server.http.replies import EVENTS, JSON, ClientGone, Headers, Send

if TYPE_CHECKING:
    from megatron_async.server.http.request_log import RequestNote
    from megatron_async.server.tracing import RequestTrace


class Exchange:
    """One HTTP request. Of equal headers the last one counts; `told` are further headers of the
    answer, whatever it is. The caller is set once it is known."""

    def __init__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Send,
        headers: Mapping[bytes, bytes],
        told: Headers = (),
    ) -> None:
        self.scope, self.headers = scope, headers
        self._receive, self._send, self._told = receive, send, told
        self._has_begun = False
        self.caller: Caller = NOBODY
        self.trace: RequestTrace | None = None
        self.note: RequestNote | None = None

    @property
    def connection(self) -> AnswerConnection:
        """The connection that the request came by."""
        found: AnswerConnection = self.scope["state"]["connection"]
        return found

    @property
    def traceparent(self) -> str:
        """The trace of this request: of its span, or without spans the caller's; "" for none."""
        if self.trace is not None:
            return self.trace.traceparent
        header = self.headers.get(b"traceparent")
        return "" if header is None else read_traceparent(header.decode("latin-1").strip())

    async def send(self, message: Any) -> None:
        """ASGI's `send`; an answer that has begun is not begun again.

        Raises:
            ClientGone: an error behind the beginning of an answer: the connection ends.
        """
        if message["type"] == "http.response.start":
            self._begin(message["status"])
            if self._told:
                message = {**message, "headers": [*message["headers"], *self._told]}
        await self._send(message)

    def begin_events(self, data: bytes) -> None:
        """Begin an answer of events without waiting for anything; further ones go to the
        `connection`, and ASGI's last message ends the answer.

        Raises:
            ClientGone: an answer has begun.
        """
        self._begin(200)
        headers = [*EVENTS, *self._told] if self._told else EVENTS
        self.connection.begin_events(self.scope, headers, data)

    def _begin(self, status: int) -> None:
        if self._has_begun:
            raise ClientGone
        self._has_begun = True
        if self.note is not None:
            self.note.status = status

    async def body(self, most: int) -> bytes:
        """The whole body of the request.

        Only what says that it is JSON: a page of another site can make a browser send any other
        type without asking (`no-cors`), also to a server on this host that has no key.

        Raises:
            Refusal: 413, it has more than `most` bytes; 415, it has another type.
            ClientGone: the client went before its end.
        """
        length = self.headers.get(b"content-length", b"0")
        digits = length.lstrip(b"0")  # of which Python reads some thousand only
        if length.isdigit() and (len(digits) > 20 or int(digits or b"0") > most):
            raise self._too_long(most)
        parts, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise self._too_long(most)
            if not message.get("more_body", False):
                break
        kind = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if size and kind != JSON:
            shown = kind[:60].decode("latin-1") or "missing"
            raise Refusal(
                f"the Content-Type is {shown}, and must be application/json.", 415,
                code="unsupported_media_type",
            )  # fmt: skip
        return b"".join(parts)

    def _too_long(self, most: int) -> Refusal:
        return Refusal(
            f"the body has more than {most} bytes: send less in one request.", 413,
            code="request_too_large",
        )  # fmt: skip


async def read_body[T](body: bytes, read: Callable[[], T]) -> T:
    """What `read` returns or raises; a thread costs a quick body more than it takes. `read` may be
    called a second time, if it raises `TakesLong` at the first."""
    if is_quick(body):
        try:
            return read()
        except TakesLong:  # the model's chat template, for this chat
            pass
    return await asyncio.to_thread(read)
