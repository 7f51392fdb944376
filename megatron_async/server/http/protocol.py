"""`HttpProtocol`: uvicorn's connection with limits of its own, and its transport for streams.

uvicorn (httptools) parses requests and writes answers; it limits neither the size of headers nor
the time that they take. A connection that sends more, or nothing, costs a file and some kilobytes
until a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.http.access import REQUEST_ID, request_id
from megatron_async.server.http.replies import Headers

WRITE_BUFFER_BYTES = 256 << 10
"""Bytes that may wait for a reader in the transport before its stream holds tokens back."""

ONCE = {
    b"host": "Host", b"authorization": "Authorization", b"x-api-key": "x-api-key",
    b"content-type": "Content-Type",
}  # fmt: skip
"""Headers of which a proxy might have checked the one, and a server taken the other."""

_errors = logging.getLogger("megatron_async.http")
_errors.setLevel(logging.ERROR)


_Pairs = Sequence[tuple[bytes, bytes]]
_last_head: tuple[_Pairs, _Pairs, bytes] = ((), (), b"")


def _head_of(default: _Pairs, headers: _Pairs) -> bytes:
    """The status line and headers of an answer of events. The last one is kept: uvicorn's headers
    are a new list once a second, with the date."""
    global _last_head
    if _last_head[0] is not default or _last_head[1] is not headers:
        lines = [b"%b: %b\r\n" % pair for pair in (*default, *headers)]
        _last_head = default, headers, STATUS_LINE[200] + b"".join(lines)
    return _last_head[2]


def _end_if_unread(transport: asyncio.Transport, seconds: float) -> None:
    """Let the kernel end a connection whose client takes nothing for so long (tcp(7),
    TCP_USER_TIMEOUT; since Linux 5.11 also of one that says that it has no room). A whole answer
    would else stay in memory for as long as the client likes."""
    number = getattr(socket, "TCP_USER_TIMEOUT", None)
    end = transport.get_extra_info("socket")
    if number is not None and end is not None and end.family in (socket.AF_INET, socket.AF_INET6):
        end.setsockopt(socket.IPPROTO_TCP, number, round(seconds * 1000))


class HttpLimits(NamedTuple):
    """Limits of one connection.

    Attributes:
        head_bytes: request line and headers.
        head_s: from the first byte of a request, or from the connection, to the end of its headers.
        body_s: from there to the end of its body.
        unread_s: for which a client may take nothing of an answer that is ready.
    """

    head_bytes: int = 64 << 10
    headers: int = 100
    head_s: float = 20.0
    body_s: float = 60.0
    unread_s: float = 60.0


class HttpProtocol(HttpToolsProtocol):
    """One connection; see the module. `scope["state"]["connection"]` of a request is it. Its limits
    are of all connections, set by the process before the first one."""

    limits = HttpLimits()

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = _errors  # what strangers send is no news, and must not fill the log
        self._deadline: asyncio.TimerHandle | None = None
        self._expected: tuple[str, float] | None = None
        """What comes next, and in how many seconds."""
        self._is_new = self._is_reading = False
        self._refusal: Refusal | None = None
        self._head_bytes = 0
        self._when_lost: Callable[[], None] | None = None
        self.has_body_to_come = False
        self._has_chunks = True
        self._framing = b""
        """Headers that say where the body ends."""
        self._repeats_head = False

    # ---- For answers -------------------------------------------------------------------------

    @property
    def is_gone(self) -> bool:
        """Whether the client has disconnected."""
        return self.transport is None or self.transport.is_closing()

    def tell_when_lost(self, call: Callable[[], None] | None) -> None:
        """Call this once when the connection is lost; None: nothing."""
        self._when_lost = call

    @property
    def unread_bytes(self) -> int:
        """Bytes of answers that wait in this process for the reader."""
        return self.transport.get_write_buffer_size()

    def begin_events(self, scope: Mapping[str, Any], headers: Headers, data: bytes) -> None:
        """Begin an answer as uvicorn would, but in one write with its first part. HTTP/1.0 knows
        no chunks, which uvicorn would send."""
        # Taken out: with it the two would refer to each other.
        cycle: RequestResponseCycle = scope["state"].pop("cycle")
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        cycle.chunked_encoding = self._has_chunks = scope["http_version"] != "1.0"
        if not self._has_chunks:
            cycle.keep_alive = False
        end = b"\r\n"
        if self._has_chunks:
            end = b"transfer-encoding: chunked\r\n\r\n"
            if data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
        if not cycle.keep_alive:
            end = b"connection: close\r\n" + end
        self.transport.write(_head_of(cycle.default_headers, headers) + end + data)

    def write_chunk(self, data: bytes) -> None:
        """Write a part of an answer that has begun, chunked as uvicorn would; the end is uvicorn's
        to write."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._has_chunks else data)

    def cut_off(self) -> None:
        """End the connection at once; what waits is lost."""
        self.transport.abort()

    # ---- What the transport and the parser call ----------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        _end_if_unread(transport, self.limits.unread_s)
        self._expect("the request's headers", self.limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, or this process has ended the connection."""
        self._expect(None)
        super().connection_lost(exc)
        call, self._when_lost = self._when_lost, None
        if call is not None:
            call()

    def data_received(self, data: bytes) -> None:
        """Bytes have come. Deadlines are set when all of them are parsed: a request that comes in
        one piece needs no timers."""
        self._is_reading = True
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        finally:
            self._is_reading = False
            self._set_deadline()

    def _parse(self, data: bytes) -> bytes:
        """Parse; returns what is behind the headers of a request that would speak another protocol
        (Java's HTTP client asks for "h2c" by itself). Here none is spoken, so it is a request as
        any other (RFC 9110, 7.8); but the parser takes it for one without a body. A new parser,
        which gets the body's headers again, reads the body."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        else:
            return b""
        if self._framing:
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
            self._repeats_head = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % self._framing)
            self._repeats_head = False
        return rest

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self._repeats_head:
            return
        super().on_message_begin()
        self._framing = b""
        self.scope["state"]["connection"] = self
        self._has_chunks, self.has_body_to_come = True, False
        self._head_bytes = 0
        self._expect("the request's headers", self.limits.head_s)

    def on_url(self, url: bytes) -> None:
        """A part of the request line."""
        if self._repeats_head:
            return
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer behind a chunked body: a trailer is dropped. (uvicorn takes it
        for a header, so that it would replace a Host, a key or an id that a proxy has checked.)"""
        if self._repeats_head:
            return
        self._count_head(len(name) + len(value))
        if self.has_body_to_come:
            return
        headers, name = self.headers, name.lower()
        if len(headers) >= self.limits.headers:
            raise self._refused(
                f"the request has more than {self.limits.headers} headers: send fewer.", 431
            )
        if name in ONCE:
            for known, _ in headers:
                if known == name:
                    raise self._refused(f"the request has two {ONCE[name]} headers: send one.", 400)
        if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            shown = value[:60].decode("latin-1")
            raise self._refused(f"the Transfer-Encoding {shown!r} is not known: use chunked.", 501)
        if name in (b"transfer-encoding", b"content-length"):
            self._framing += b"%b: %b\r\n" % (name, value)
        # As uvicorn does, without a further call for each header.
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The body follows."""
        if self._repeats_head:
            return
        if self.parser.get_method() == b"CONNECT":
            raise self._refused("CONNECT is not served: this is no proxy.", 405)
        self.has_body_to_come = True
        self._expect("the request's body", self.limits.body_s)
        super().on_headers_complete()
        self.scope["state"]["cycle"] = self.cycle

    def on_message_complete(self) -> None:
        """All of a request is there; or its headers, where the parser takes it for one of another
        protocol."""
        if self._framing and self.parser.should_upgrade():
            return
        self.has_body_to_come = False
        self._expect(None)
        super().on_message_complete()
        self.headers = []  # what is no further request does not have the id of this one

    def send_400_response(self, msg: str) -> None:
        """Input that is no HTTP, or beyond a limit, gets an error, and the connection ends."""
        refusal = self._refusal or Refusal(f"{msg} Send HTTP/1.1.")
        self._expect(None)
        body, cycle = refusal.body(), self.cycle
        if cycle is not None and not cycle.response_complete:
            if not self.has_body_to_come or cycle.response_started or self.pipeline:
                self.transport.close()  # in the middle of another answer, there is no place for one
                return
            cycle.disconnected = True  # a wait for the rest of this body ends
            cycle.response_complete = True
            cycle.message_event.set()
        # Where the headers had come, the application has given the request its id.
        own_id = self.scope["state"].get("request_id") if self.has_body_to_come else None
        own_id = own_id or request_id(dict(self.headers or ()))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % (
            len(body)
        )
        head += b"%b: %b\r\n\r\n" % (REQUEST_ID, own_id)
        self.transport.write(STATUS_LINE[refusal.status] + head + body)
        self.transport.close()

    # ---- Limits ------------------------------------------------------------------------------

    def _count_head(self, count: int) -> None:
        self._head_bytes += count
        if self._head_bytes > self.limits.head_bytes:
            raise self._refused(
                f"request line and headers have more than {self.limits.head_bytes} bytes: send "
                "less.", 431,
            )  # fmt: skip

    def _refused(self, text: str, status: int) -> Refusal:
        """The exception of the parser's callback, which ends the connection."""
        self._refusal = Refusal(text, status)
        return self._refusal

    def _expect(self, what: str | None, seconds: float = 0.0) -> None:
        """Set the deadline of the next thing to come; None: there is none."""
        self._expected = None if what is None else (what, seconds)
        self._is_new = True
        if not self._is_reading:
            self._set_deadline()

    def _set_deadline(self) -> None:
        if not self._is_new:
            return
        self._is_new = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._expected is not None:
            what, seconds = self._expected
            self._deadline = self.loop.call_later(seconds, self._too_late, what, seconds)

    def _too_late(self, what: str, seconds: float) -> None:
        if self.is_gone:
            return
        self._refused(f"{what} did not come within {seconds:g} s: send it sooner.", 408)
        self.send_400_response("")
