"""A trace over HTTP, against a server of a few lines that answers at a known pace."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator

import pytest

from megatron_async.lab.arrival_trace import LengthDistribution, TraceRequest, poisson_trace
from megatron_async.lab.http_trace import AnswerError, HttpReaders, HttpServer, TimedRequest

PAUSE_S = 0.03
TOKENS = 4
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\ndata: [DONE]\n\n'


class SlowServer:
    """Sends a token every `PAUSE_S`.

    Args:
        keeps: connections are kept, after `answers` answers given up.

    Attributes:
        most: how many requests it had at once.
        connections: how many there were.
    """

    def __init__(self, keeps: bool = False, answers: int = 100) -> None:
        self.now = self.most = self.connections = 0
        self._keeps, self._answers = keeps, answers
        self.tokens = TOKENS
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._answer, "127.0.0.1", 0)
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self._keeps:
            for _ in range(self._answers):
                await self._answer_in_chunks(reader, writer)
            await reader.read(1)  # the next request is on its way when the connection ends
        else:
            await self._answer_to_the_end(reader, writer)
        writer.close()

    async def _answer_in_chunks(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in [EVENT] * TOKENS + [USAGE % self.tokens]:
            await asyncio.sleep(PAUSE_S)
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        writer.write(b"0\r\n\r\n")

    async def _answer_to_the_end(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.now += 1
        self.most = max(self.most, self.now)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for _ in range(TOKENS):
            await asyncio.sleep(PAUSE_S)
            writer.write(EVENT)
        self.now -= 1
        writer.write(USAGE % self.tokens)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        self._loop.close()


@pytest.fixture(scope="module")
def readers() -> Iterator[HttpReaders]:
    with HttpReaders(2) as found:
        yield found


@pytest.fixture
def server() -> Iterator[SlowServer]:
    made = SlowServer()
    yield made
    made.close()


def serve(
    server: SlowServer,
    readers: HttpReaders,
    most: int | None = None,
    rate: float = math.inf,
    keeps: bool = True,
) -> tuple[list[TraceRequest], list[TimedRequest], float]:
    lengths = LengthDistribution(3, 3, 0), LengthDistribution(TOKENS, TOKENS, 0)
    trace = poisson_trace(rate, 9, *lengths, 100, seed=0)
    where = HttpServer(f"http://127.0.0.1:{server.port}/v1", "any", "", keeps)
    served, seconds = readers.serve(where, trace, 60, most)
    return trace, served, seconds


def test_times_of_a_known_pace(server: SlowServer, readers: HttpReaders) -> None:
    _, found, seconds = serve(server, readers)
    assert server.most == 9
    for request in found:
        assert PAUSE_S <= request.ttft_s <= request.latency_s
        assert request.latency_s >= TOKENS * PAUSE_S
        assert len(request.gaps_s) == TOKENS - 1
        assert sum(request.gaps_s) == pytest.approx(request.latency_s - request.ttft_s)
        assert request.tpot_s == pytest.approx(sum(request.gaps_s) / (TOKENS - 1))
    assert seconds == pytest.approx(max(request.latency_s for request in found))


def test_no_more_at_once_than_asked_for(server: SlowServer, readers: HttpReaders) -> None:
    """A request that has to wait is timed from when it is sent, as clients of a pool are."""
    _, found, seconds = serve(server, readers, most=3)
    assert server.most == 3
    assert seconds >= 3 * TOKENS * PAUSE_S
    assert sum(request.latency_s for request in found) <= 3 * seconds


def test_arrivals_keep_their_times(server: SlowServer, readers: HttpReaders) -> None:
    trace, _, seconds = serve(server, readers, rate=40.0)
    assert seconds >= trace[-1].arrival_s + TOKENS * PAUSE_S


def test_an_answer_that_is_too_short(server: SlowServer, readers: HttpReaders) -> None:
    server.tokens = 3
    with pytest.raises(AnswerError, match="3 tokens came where 4 were asked for"):
        serve(server, readers)


@pytest.mark.parametrize(
    ("answers", "keeps", "connections"),
    [(100, True, 2), (100, False, 9), (1, True, 9)],
    ids=["kept", "new ones", "given up by the server"],
)
def test_connections_are_used_again(
    readers: HttpReaders, answers: int, keeps: bool, connections: int
) -> None:
    """Break it: a connection that the server gave up while it was idle fails the next request."""
    server = SlowServer(keeps=True, answers=answers)
    try:
        _, found, _ = serve(server, readers, most=2, keeps=keeps)
    finally:
        server.close()
    assert len(found) == 9
    assert server.connections == connections
