"""`AnswerConnection`: what an answer needs of the connection that its request came by, and
`AsgiConnection`, the same where another's server holds the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from megatron_async.server.http.replies import Headers, Send


class AnswerConnection(Protocol):
    """A connection, of a process' own server or another's."""

    @property
    def is_gone(self) -> bool:
        """Whether nobody reads any more."""

    @property
    def unread_bytes(self) -> int:
        """Bytes of answers that wait in this process for the reader."""

    def tell_when_lost(self, call: Callable[[], None] | None) -> None:
        """Call this once when the connection is lost; None: nothing."""

    def begin_events(self, scope: Mapping[str, Any], headers: Headers, data: bytes) -> None:
        """Begin the answer of status 200 to a request, and write its first part. If the request is
        of HTTP/1.0, the answer's end is the connection's. `data` may be empty."""

    def write_chunk(self, data: bytes) -> None:
        """Write a part of an answer that has begun."""

    def cut_off(self) -> None:
        """End the connection at once."""


class AsgiConnection:
    """A connection behind an ASGI server that is not ours: a proxy's, as of Ray Serve.

    Streams are written without waiting (`write_chunk`); a task hands on what has come together,
    one message for all of it while the one before is under way."""

    def __init__(self, receive: Callable[[], Awaitable[Any]], send: Send) -> None:
        self._receive, self._send = receive, send
        self._chunks: list[bytes] = []
        self._start: dict[str, Any] | None = None
        self._unread = 0
        self._is_gone = False
        self._call: Callable[[], None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def send(self, message: Any) -> None:
        """ASGI's `send`, after all chunks that were written before."""
        while self._writing is not None and not self._is_gone:
            await asyncio.wait([self._writing])
        await self._send(message)

    def close(self) -> None:
        """The request is answered, or given up."""
        for task in (self._writing, self._watching):
            if task is not None:
                task.cancel()

    # ---- As `AnswerConnection` ---------------------------------------------------------------

    @property
    def is_gone(self) -> bool:
        """Whether nobody reads any more."""
        return self._is_gone

    @property
    def unread_bytes(self) -> int:
        """Bytes that the server in front has not taken yet."""
        return self._unread

    def tell_when_lost(self, call: Callable[[], None] | None) -> None:
        """Call this once when the connection is lost; None: nothing. From the first call on ASGI's
        `receive` is this object's: the body must be read before."""
        self._call = call
        if self._watching is None and call is not None:
            self._watching = asyncio.create_task(self._watch())

    def begin_events(self, scope: Mapping[str, Any], headers: Headers, data: bytes) -> None:
        """Begin the answer of status 200; how it ends, the server in front decides."""
        if scope["http_version"] == "1.0":
            headers = [*headers, (b"connection", b"close")]
        self._start = {"type": "http.response.start", "status": 200, "headers": headers}
        self.write_chunk(data)

    def write_chunk(self, data: bytes) -> None:
        """Write a part of an answer that has begun."""
        self._chunks.append(data)
        self._unread += len(data)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    def cut_off(self) -> None:
        """Give the connection up. ASGI cannot end it: the server in front sees an answer that does
        not go on."""
        self._lose()

    async def _write(self) -> None:
        try:
            if self._start is not None:
                start, self._start = self._start, None
                await self._send(start)
            while self._chunks and not self._is_gone:
                data = b"".join(self._chunks)
                self._chunks.clear()
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
                self._unread -= len(data)
        except Exception:  # of the server in front: the client is gone
            self._lose()
        finally:
            self._writing = None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._lose()

    def _lose(self) -> None:
        self._is_gone = True
        call, self._call = self._call, None
        if call is not None:
            call()
