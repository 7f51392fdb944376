"""`HttpConnections`: requests over connections that are kept, as the clients of OpenAI's protocol
keep them (`openai` by httpx's pool). Answers are kept as they come, and taken apart later."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
TAIL = len(LAST_CHUNK)


@dataclass(frozen=True)
class Answer:
    """What came back: pieces, and when, in seconds from `arrival`, of the monotonic clock."""

    arrival: float
    pieces: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


class HttpConnections:
    """Connections to one server; on one event loop.

    Args:
        host: its name.
        port: its port.
        keeps: use a connection again when its answer is whole; False: each request opens one.
    """

    def __init__(self, host: str, port: int, keeps: bool = True) -> None:
        self._host, self._port, self._keeps = host, port, keeps
        self._idle: list[_Connection] = []

    async def ask(self, request: bytes, arrival: float) -> Answer:
        """Send a request, and wait for all of its answer.

        Args:
            request: head and body.
            arrival: from when its times count, of the monotonic clock.

        Returns:
            what came until the answer's end, or until the server ended the connection.

        Raises:
            OSError: no connection can be made.
        """
        loop = asyncio.get_running_loop()
        while self._idle:
            kept = self._idle.pop()
            if (answer := await kept.ask(request, arrival)).pieces:
                return answer
            # The server had given the idle connection up: nothing was answered.
        _, made = await loop.create_connection(
            lambda: _Connection(self._is_free, self._is_lost), self._host, self._port
        )
        return await made.ask(request, arrival)

    def close(self) -> None:
        """End all that are idle."""
        for connection in list(self._idle):
            connection.close()

    def _is_free(self, connection: _Connection) -> None:
        if self._keeps:
            self._idle.append(connection)
        else:
            connection.close()

    def _is_lost(self, connection: _Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)


class _Connection(asyncio.Protocol):
    """One, with one answer at a time."""

    def __init__(
        self, is_free: Callable[[_Connection], None], is_lost: Callable[[_Connection], None]
    ) -> None:
        self._is_free, self._is_lost = is_free, is_lost
        self._transport: Any = None
        self._answer: Answer | None = None
        self._ended: asyncio.Future[Answer] | None = None
        self._tail = b""
        self._has_head = self._is_chunked = False
        self._to_come: int | None = None
        """Bytes of the body that are still to come, where its length was told."""

    async def ask(self, request: bytes, arrival: float) -> Answer:
        """Send a request as `HttpConnections.ask` does; the connection must be idle."""
        self._answer, self._tail = Answer(arrival), b""
        self._has_head, self._is_chunked, self._to_come = False, False, None
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._ended

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # unasked for
            self.close()
            return
        answer.times.append(time.monotonic() - answer.arrival)
        answer.pieces.append(data)
        if not self._has_head:
            self._read_head(b"".join(answer.pieces))
        elif self._to_come is not None:
            self._to_come -= len(data)
        self._tail = (self._tail + data)[-TAIL:]
        if self._to_come == 0 or (self._is_chunked and self._tail == LAST_CHUNK):
            self._end()
            self._is_free(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost(self)
        self._end()

    def _read_head(self, data: bytes) -> None:
        head, end, body = data.partition(HEAD_END)
        if not end:
            return
        self._has_head = True
        self._is_chunked = CHUNKED.search(head) is not None
        if not self._is_chunked and (length := LENGTH.search(head)) is not None:
            self._to_come = int(length[1]) - len(body)

    def _end(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and self._ended is not None and not self._ended.done():
            self._ended.set_result(answer)
