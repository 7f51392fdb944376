"""A trace over HTTP, against a server of a few lines that answers at a known pace."""

import asyncio
import math
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from megatron_async import LLM
from megatron_async.errors import ConfigurationError
from megatron_async.lab.arrival_trace import LengthDistribution, TraceRequest, poisson_trace
from megatron_async.lab.http_trace import AnswerError, HttpReaders, HttpServer, TimedRequest
from megatron_async.lab.trace_server import serve_trace
from megatron_async.lab.workloads import greedy

PAUSE_S = 0.03
TOKENS = 4
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\ndata: [DONE]\n\n'


class SlowServer:
    """Sends a token every `PAUSE_S`, and keeps connections, of which it gives one up after
    `answers` answers; it counts them, and the most requests at once."""

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
def test_connections_are_used_again(readers, answers: int, keeps: bool, connections: int):
    """Break it: a connection that the server gave up while it was idle fails the next request."""
    server = SlowServer(keeps=True, answers=answers)
    try:
        _, found, _ = serve(server, readers, most=2, keeps=keeps)
    finally:
        server.close()
    assert len(found) == 9
    assert server.connections == connections


def tiny(lookahead=1, max_requests=8):
    return LLM(
        "dummy:tiny",
        device="cpu",
        lookahead=lookahead,
        block_size_tokens=16,
        num_kv_blocks=200,
        check_integrity=True,
        max_requests=max_requests,
        max_tokens=256,
        max_sequence_length=256,
    )


def test_traces_are_deterministic_by_seed_and_scaled_by_rate():
    prompts, outputs = LengthDistribution(64, 256), LengthDistribution(32, 128)

    def trace(rate=10.0, seed=0, count=2000):
        return poisson_trace(rate, count, prompts, outputs, 1000, seed)

    first, again, faster, other = trace(), trace(), trace(rate=40.0), trace(seed=1)
    for a, b, c in zip(first, again, faster, strict=True):
        assert a.arrival_s == b.arrival_s == pytest.approx(4 * c.arrival_s)
        assert a.output_tokens == b.output_tokens == c.output_tokens
        assert np.array_equal(a.prompt, b.prompt)
        assert np.array_equal(a.prompt, c.prompt)
    assert [r.output_tokens for r in first] != [r.output_tokens for r in other]
    assert first[5].arrival_s == trace(count=6)[5].arrival_s
    # Poisson: gaps of mean and standard deviation 1 / rate. Four standard errors.
    gaps = np.diff([0.0, *(r.arrival_s for r in first)])
    assert gaps.mean() == pytest.approx(0.1, rel=4 / math.sqrt(2000))
    assert gaps.std() == pytest.approx(0.1, rel=0.15)
    lengths = np.array([len(r.prompt) for r in first])
    assert lengths.mean() == pytest.approx(64, rel=0.1)
    assert 1 <= lengths.min() < lengths.max() <= 256
    assert all(r.arrival_s == 0 for r in trace(rate=math.inf, count=3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: LengthDistribution(300, 256), "mean length of 300 tokens .* longest, 256"),
        (lambda d: LengthDistribution(3, 5, sigma=-1), "sigma=-1"),
        (lambda d: poisson_trace(0.0, 4, d, d, 10, 0), "rate=0.0"),
        (lambda d: poisson_trace(1.0, 0, d, d, 10, 0), "num_requests=0"),
    ],
)
def test_bad_traces(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make(LengthDistribution(8, 8))


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_trace_is_served_by_the_wall_clock(lookahead):
    """Two bursts with an idle second half: nobody is served before arriving, lengths are kept, and
    the burst that is too large for the slots queues."""
    trace = poisson_trace(math.inf, 6, LengthDistribution(8, 16), LengthDistribution(6, 12), 500, 3)
    moved = [
        type(r)(arrival_s=0.25 * (i // 3), prompt=r.prompt, output_tokens=r.output_tokens)
        for i, r in enumerate(trace)
    ]
    finishes = []
    with tiny(lookahead, max_requests=2) as llm:
        served = serve_trace(llm.engine, moved, lambda n, tokens: finishes.append((n, tokens)))
    assert served.duration_s > 0.25
    assert [len(r.tokens) for r in served.requests] == [r.output_tokens for r in moved]
    assert [r.prompt_tokens for r in served.requests] == [len(r.prompt) for r in moved]
    for request in served.requests:
        assert 0 <= request.queue_s < request.ttft_s <= request.latency_s
        assert request.latency_s < served.duration_s
        assert (request.tpot_s is None) == (len(request.tokens) == 1)
    assert served.most_waiting >= 1
    assert max(r.queue_s for r in served.requests) > min(r.queue_s for r in served.requests)
    assert sum(n for n, _ in finishes) == 6
    assert finishes[-1][1] == sum(r.output_tokens for r in moved)
    # The engine went idle between the bursts: those steps had none before them.
    assert served.overlap_ratio == (1 if lookahead else 0)


def test_times_count_from_the_arrival_by_the_trace():
    """A consumer that blocks the loop for half a second delays the request that arrives meanwhile,
    and the delay is that request's."""
    tokens = np.arange(4, dtype=np.int32)
    trace = [TraceRequest(arrival_s, tokens, output_tokens=1) for arrival_s in (0.0, 0.2)]
    sleeps = iter([0.5, 0.0])
    with tiny() as llm:
        llm.generate([[1, 2, 3, 4]], greedy(2))  # warm
        served = serve_trace(llm.engine, trace, lambda *_: time.sleep(next(sleeps)))
    late = served.requests[1]
    assert served.late_s > 0.25
    assert served.late_s <= late.queue_s <= late.ttft_s <= late.latency_s
    assert served.requests[0].latency_s <= served.duration_s - 0.5
