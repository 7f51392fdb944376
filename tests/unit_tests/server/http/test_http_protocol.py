"""A connection's limits, and answers written past ASGI, by raw sockets."""

import asyncio
import json
import re
import socket
import time

import pytest
import uvicorn

from megatron_async.server.api_config import ApiConfig
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.http.access import Access
from megatron_async.server.http.app import App, Route
from megatron_async.server.http.exchange import Exchange
from megatron_async.server.http.protocol import HttpLimits, HttpProtocol
from megatron_async.server.http.replies import EVENTS, reply_json
from tests.support.patience import PATIENCE_S

HEAD = b"Host: localhost\r\n"


class Handlers:
    def __init__(self):
        self.lost = 0

    async def echo(self, exchange, rest):
        body = await exchange.body(1000)
        await reply_json(exchange.send, {"bytes": len(body), "rest": rest})

    async def stream(self, exchange, rest):
        connection = exchange.connection
        await exchange.send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        for number in range(3):
            connection.write_chunk(b"data: %d\n\n" % number)
            await asyncio.sleep(0)
        await exchange.send({"type": "http.response.body", "body": b""})

    async def events(self, exchange, rest):
        exchange.begin_events(b"data: 0\n\n" if rest else b"")
        await asyncio.sleep(0)
        exchange.connection.write_chunk(b"data: 1\n\n")
        await exchange.send({"type": "http.response.body", "body": b""})

    async def fail(self, exchange, rest):
        raise RuntimeError("a secret of the server")

    async def large(self, exchange, rest):
        def lose():
            self.lost += 1

        exchange.connection.tell_when_lost(lose)
        await reply_json(exchange.send, "x" * 30_000_000)

    async def wait(self, exchange, rest):
        gone = asyncio.get_running_loop().create_future()
        exchange.connection.tell_when_lost(lambda: gone.set_result(None))
        await gone
        self.lost += 1


@pytest.fixture
def served(monkeypatch):
    """Runs a test's coroutine beside a server; `ask` sends bytes and gives the answers."""
    handlers = Handlers()
    monkeypatch.setattr(HttpProtocol, "limits", HttpLimits(2000, 20, 0.3, 0.3, 0.3))
    routes = [
        Route("POST", "/echo/*", handlers.echo), Route("GET", "/stream", handlers.stream),
        Route("GET", "/events/*", handlers.events), Route("GET", "/events", handlers.events),
        Route("GET", "/fail", handlers.fail), Route("GET", "/wait", handlers.wait),
        Route("GET", "/large", handlers.large),
    ]  # fmt: skip
    app = App(routes, Access(ApiConfig(coordinator="x")), "/root")

    def run(test):
        async def main():
            config = uvicorn.Config(app, http=HttpProtocol, ws="none", lifespan="off", loop="none",
                                    log_config=None, access_log=False, port=0)  # fmt: skip
            server = uvicorn.Server(config)
            server.install_signal_handlers = lambda: None
            serving = asyncio.create_task(server._serve())
            while not server.started:
                await asyncio.sleep(0.005)
            port = server.servers[0].sockets[0].getsockname()[1]
            try:
                await asyncio.wait_for(test(port, handlers), PATIENCE_S)
            finally:
                server.should_exit = server.force_exit = True
                await serving

        asyncio.run(main())

    return run


async def connect(port):
    return await asyncio.open_connection("127.0.0.1", port)


async def answer(reader):
    """Status, headers and body of one answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while (size := int(await reader.readline(), 16)) > 0:
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    else:
        body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, body


def test_a_connection_serves_one_request_after_the_other(served):
    """Also behind a stream that was written past ASGI."""

    async def test(port, _):
        reader, writer = await connect(port)
        for _ in range(2):
            writer.write(b"GET /stream HTTP/1.1\r\n" + HEAD + b"\r\n")
            status, headers, body = await answer(reader)
            assert (status, body) == (200, b"data: 0\n\ndata: 1\n\ndata: 2\n\n")
            assert headers["content-type"].startswith("text/event-stream")
            writer.write(b"POST /root/echo/x HTTP/1.1\r\n" + HEAD + b"X-Request-Id: a.1\r\n"
                         b"Content-Type: Application/JSON; charset=utf-8\r\n"
                         b"Content-Length: 4\r\n\r\n{}{}")  # fmt: skip
            status, headers, body = await answer(reader)
            assert (status, json.loads(body)) == (200, {"bytes": 4, "rest": "x"})
            assert headers["x-request-id"] == "a.1"
        writer.close()

    served(test)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_who_does_not_read_a_whole_answer_is_cut_off(served):
    """Break it: `_end_if_unread` without its option."""

    async def test(port, handlers):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /large HTTP/1.1\r\n" + HEAD + b"\r\n")
            while not handlers.lost:
                await asyncio.sleep(0.05)

    served(test)


def test_events_begin_in_one_write(served):
    """Answers begin as uvicorn would begin them: also for requests that were sent before the answer
    to the first one, in HTTP/1.0, and where the client wants the connection to end. Break it:
    `begin_events` of the connection's newest cycle instead of the request's."""
    both = b"data: 0\n\ndata: 1\n\n"

    async def test(port, _):
        reader, writer = await connect(port)
        first = b"GET /events/x HTTP/1.1\r\n" + HEAD + b"X-Request-Id: a\r\n\r\n"
        writer.write(first + b"GET /events HTTP/1.1\r\n" + HEAD + b"Connection: close\r\n\r\n")
        status, headers, body = await answer(reader)
        assert (status, body, headers["x-request-id"]) == (200, both, "a")
        assert headers["content-type"].startswith("text/event-stream")
        assert {"date", "server"} <= headers.keys()
        assert "connection" not in headers
        status, headers, body = await answer(reader)
        assert (status, body, headers["connection"]) == (200, both[9:], "close")
        assert re.fullmatch("[0-9a-f]{24}", headers["x-request-id"])  # one of ours
        assert await reader.read() == b""
        writer.close()
        reader, writer = await connect(port)
        writer.write(b"GET /events/x HTTP/1.0\r\n" + HEAD + b"\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert body == both
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert head.count(b"connection: close") == 1
        assert b"chunked" not in head
        writer.close()

    served(test)


FRAMED = [
    b"Content-Length: 20\r\n\r\n{GET /none HTTP/1.1}",
    b"Transfer-Encoding: chunked\r\n\r\na;x=y\r\n{0\r\n\r\n567}\r\na\r\n1234567890\r\n0\r\n\r\n",
    b"Content-Length: 0\r\n\r\n",
    b"\r\n",
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("framed", FRAMED, ids=["length", "chunks", "empty", "none"])
@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_another_protocol_is_not_spoken(served, framed, upgrade, size):
    """The request is one as any other (RFC 9110, 7.8), also its body, and so is the next one. Break
    it: `_parse` without a new parser."""
    body = 20 if framed in FRAMED[:2] else 0
    asked = (b"POST /echo/x HTTP/1.1\r\n" + HEAD + b"Connection: Upgrade, HTTP2-Settings\r\n"
             b"HTTP2-Settings: AAEAAEAAAAIAAAAB\r\nContent-Type: application/json\r\n"
             b"Upgrade: " + upgrade + b"\r\n" + framed)  # fmt: skip
    data = asked + asked + b"GET /events HTTP/1.1\r\n" + HEAD + b"\r\n"

    async def test(port, _):
        reader, writer = await connect(port)
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            if size < 1000:
                await asyncio.sleep(0)
        for _ in range(2):
            status, _, told = await answer(reader)
            assert (status, json.loads(told)) == (200, {"bytes": body, "rest": "x"})
        assert (await answer(reader))[2] == b"data: 1\n\n"
        writer.close()

    served(test)


@pytest.mark.parametrize(
    ("request_bytes", "status", "text"),
    [
        (b"GET /none HTTP/1.1\r\n" + HEAD + b"\r\n", 404, "nothing at"),
        (b"GET /echo/x HTTP/1.1\r\n" + HEAD + b"\r\n", 405, "use POST"),
        (b"GET /fail HTTP/1.1\r\n" + HEAD + b"\r\n", 500, "the server's log"),
        (b"GET /stream HTTP/1.1\r\nHost: evil.org\r\n\r\n", 421, "evil.org"),
        (b"nonsense\r\n\r\n", 400, "HTTP/1.1"),
        (b"GET /stream HTTP/1.1\r\n" + HEAD + b"A: b\r\n" * 30 + b"\r\n", 431, "20 headers"),
        (b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\n" + HEAD + b"\r\n", 431, "2000 bytes"),
        (b"POST /echo/x HTTP/1.1\r\n" + HEAD + b"Content-Length: 1001\r\n\r\n", 413, "1000 bytes"),
        (b"POST /echo/x HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
         + (b"1f4\r\n" + b"x" * 500 + b"\r\n") * 3, 413, "1000 bytes"),
        (b"POST /echo/x HTTP/1.1\r\n" + HEAD + b"Content-Length: 2\r\n\r\n{}", 415, "missing"),
        (b"POST /echo/x HTTP/1.1\r\n" + HEAD + b"Content-Type: text/plain\r\n"
         b"Content-Length: 2\r\n\r\n{}", 415, "text/plain"),
        (b"GET /stream HTTP/1.1\r\n" + HEAD + HEAD + b"\r\n", 400, "two Host"),
        (b"GET /stream HTTP/1.1\r\n" + HEAD + b"Authorization: Bearer a\r\n"
         b"authorization: Bearer a\r\n\r\n", 400, "two Authorization"),
        (b"POST /echo/x HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
         400, "HTTP/1.1"),
        (b"POST /echo/x HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: gzip\r\n\r\n{}",
         501, "'gzip'"),
        (b"POST /echo/x HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n",
         501, "'gzip, chunked'"),
        (b"POST /echo/x HTTP/1.1\r\n" + HEAD + b"Content-Length: " + b"0" * 500 + b"2\r\n\r\n{}",
         415, "missing"),
        (b"POST /echo/x HTTP/1.1\r\n" + HEAD + b"Content-Length: 18446744073709551615\r\n\r\n",
         413, "1000 bytes"),
        (b"POST /echo/x HTTP/1.1\r\n" + HEAD + b"Content-Length: " + b"9" * 500 + b"\r\n\r\n{}",
         400, "HTTP/1.1"),
        (b"CONNECT /echo/x HTTP/1.1\r\n" + HEAD + b"Content-Length: 2\r\n\r\n{}",
         405, "no proxy"),
        (b"CONNECT a:1 HTTP/1.1\r\n" + HEAD + b"\r\n", 405, "no proxy"),
        (b"POST /echo/x HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"
         + b"A: %b\r\n" % (b"b" * 50) * 50, 431, "2000 bytes"),
        (b"GET /stream HTTP/1.1\r\nX-Request-Id: early\r\n" + HEAD + b"A: b\r\n" * 30 + b"\r\n",
         431, "20 headers"),
        (b"GET /stream HTTP/1.1\r\nHost: loc", 408, "headers did not come within 0.3 s"),
        (b"POST /echo/x HTTP/1.1\r\nX-Request-Id: slow\r\n" + HEAD
         + b"Content-Length: 10\r\n\r\n{}", 408, "body did"),
        (b"POST /echo/x HTTP/1.1\r\n" + HEAD + b"Content-Length: 10\r\n\r\n{}", 408, "body did"),
    ],
)  # fmt: skip
def test_errors_are_objects(served, request_bytes, status, text):
    """Break it: `on_header` without its count, `_expect` without a timer, and the like."""

    async def test(port, _):
        reader, writer = await connect(port)
        writer.write(request_bytes)
        found, headers, body = await answer(reader)
        assert found == status
        error = json.loads(body)["error"]
        assert text in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert b"secret" not in body
        assert headers["content-type"] == "application/json"
        given = re.search(rb"(?m)^X-Request-Id: (.*)\r$", request_bytes)
        expected = "[0-9a-f]{24}" if given is None else given[1].decode()
        assert re.fullmatch(expected, headers["x-request-id"])
        writer.close()
        # And the server goes on.
        reader, writer = await connect(port)
        writer.write(b"GET /stream HTTP/1.1\r\n" + HEAD + b"\r\n")
        assert (await answer(reader))[0] == 200
        writer.close()

    served(test)


def test_trailers_are_no_headers(served):
    """A proxy checks headers; what comes behind the body must not replace them. Break it:
    `on_header` without `has_body_to_come`."""

    async def test(port, _):
        reader, writer = await connect(port)
        writer.write(b"POST /echo/x HTTP/1.1\r\n" + HEAD + b"Content-Type: application/json\r\n"
                     b"X-Request-Id: a.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
                     b"Host: evil.org\r\nX-Request-Id: b.2\r\n\r\n")  # fmt: skip
        status, headers, _ = await answer(reader)
        assert (status, headers["x-request-id"]) == (200, "a.1")
        writer.close()

    served(test)


def test_a_broken_body_is_not_answered_into_another_answer(served):
    """The second request's body is broken while the first waits: the connection ends."""

    async def test(port, handlers):
        reader, writer = await connect(port)
        writer.write(b"GET /wait HTTP/1.1\r\n" + HEAD + b"\r\n"
                     b"POST /echo/x HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
                     b"ZZ\r\n")  # fmt: skip
        assert await reader.read() == b""
        while not handlers.lost:
            await asyncio.sleep(0.01)
        writer.close()

    served(test)


def test_odd_input_does_not_fill_the_log(served, caplog):
    async def test(port, _):
        upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
        for sent in (b"nonsense\r\n\r\n", b"GET /stream HTTP/1.1\r\n" + HEAD + upgrade + b"\r\n"):
            reader, writer = await connect(port)
            writer.write(sent)
            await answer(reader)
            writer.close()

    served(test)
    assert not [r for r in caplog.records if "HTTP" in r.message or "WebSocket" in r.message]


def test_a_silent_connection_ends(served):
    async def test(port, _):
        reader, writer = await connect(port)
        start = time.monotonic()
        assert (await answer(reader))[0] == 408
        assert await reader.read() == b""
        assert time.monotonic() - start > 0.2
        writer.close()

    served(test)


@pytest.mark.parametrize(
    "part", [b"GET /ech", b"POST /root/echo/x HTTP/1.1\r\n" + HEAD + b"Content-Length: 9\r\n\r\n{"]
)
def test_a_request_that_stops_ends(served, part):
    """Break it: `data_received` that sets no deadline."""

    async def test(port, _):
        reader, writer = await connect(port)
        writer.write(b"POST /root/echo/x HTTP/1.1\r\n" + HEAD + b"Content-Length: 0\r\n\r\n")
        assert (await answer(reader))[0] == 200
        writer.write(part)
        start = time.monotonic()
        assert (await answer(reader))[0] == 408
        assert time.monotonic() - start > 0.2
        writer.close()

    served(test)


def test_who_leaves_is_noticed(served):
    async def test(port, handlers):
        _, writer = await connect(port)
        writer.write(b"GET /wait HTTP/1.1\r\n" + HEAD + b"\r\n")
        await asyncio.sleep(0.1)
        assert handlers.lost == 0
        writer.close()
        while not handlers.lost:
            await asyncio.sleep(0.01)

    served(test)


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
