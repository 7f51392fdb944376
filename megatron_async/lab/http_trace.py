"""Serve an arrival trace through a server of OpenAI's protocol, and note when what came back.

`/v1/completions` with prompts as token ids, greedy, to the full length: what this project's server,
vLLM's and SGLang's all take. Readers are plain sockets in processes of their own; they keep what
comes and when, and take it apart when the trace is over, so that parsing costs no latency.
Connections are kept, as OpenAI's client keeps them.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import time
from bisect import bisect_left
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any
from urllib.parse import urlsplit

import uvloop

from megatron_async.lab.arrival_trace import TraceRequest

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


CHOICE_EVENT = re.compile(rb'data: \{[^\n]*"choices":\s*\[\{[^\n]*\n\r?\n')
"""An event with a choice, to the blank line after it; the one with usage alone has none."""
USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
START_S = 0.5
"""Readers agree on a start so long after the last of them is there."""


@dataclass(frozen=True)
class HttpServer:
    """Where to ask.

    Attributes:
        url: up to and with `/v1`.
        model: the name it is served by.
        key: API key; empty: none.
        keeps_connections: requests use connections again; False: each opens one of its own, which
            costs the first token some tenths of a millisecond.
    """

    url: str
    model: str
    key: str = ""
    keeps_connections: bool = True


@dataclass(frozen=True)
class TimedRequest:
    """What a client saw of one request; seconds, from its arrival by the trace."""

    ttft_s: float
    """Until the first event with a choice."""
    latency_s: float
    """Until the last event."""
    prompt_tokens: int
    output_tokens: int
    """By the server's own count (`usage`)."""
    events: int
    gaps_s: tuple[float, ...] = ()
    """From each event with a choice to the next."""

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each output token after the first; None where there is one only."""
        after_first = self.output_tokens - 1
        return (self.latency_s - self.ttft_s) / after_first if after_first > 0 else None


class AnswerError(RuntimeError):
    """A server did not answer a request of the trace as it should."""


class HttpReaders:
    """Processes that send requests and read answers; use it with `with`."""

    def __init__(self, processes: int = 1) -> None:
        self._processes = processes

    def __enter__(self) -> HttpReaders:
        spawn = multiprocessing.get_context("spawn")
        self._manager = spawn.Manager()
        self._pool = ProcessPoolExecutor(self._processes, mp_context=spawn)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._manager.shutdown()

    def serve(
        self,
        server: HttpServer,
        trace: Sequence[TraceRequest],
        timeout_s: float = 600.0,
        max_concurrency: int | None = None,
    ) -> tuple[list[TimedRequest], float]:
        """Send a trace's requests at their times.

        Args:
            server: the address to ask.
            trace: in order of arrival.
            timeout_s: for the whole trace, from its start.
            max_concurrency: no more requests are under way at once; the others are sent when one
                ends, and their times count from then.

        Returns:
            the requests in the trace's order, and the seconds from the trace's start to the last
            end.

        Raises:
            AnswerError: a request was refused, cut off or shorter than asked for; the error has
                the server's words.
            TimeoutError: the trace took longer than `timeout_s`.
        """
        count = min(self._processes, len(trace), max_concurrency or len(trace))
        sent = [_sent_of(server, request) for request in trace]
        barrier, start = self._manager.Barrier(count), self._manager.dict()
        work = [
            self._pool.submit(
                _serve_part,
                server,
                sent[i::count],
                barrier,
                start,
                timeout_s,
                None if max_concurrency is None else (max_concurrency + i) // count,
            )
            for i in range(count)
        ]
        parts = [future.result() for future in work]
        answers = [parts[place % count][place // count] for place in range(len(trace))]
        served = [_read(answer, request) for answer, request in zip(answers, trace, strict=True)]
        ends = (a.arrival + timed.latency_s for a, timed in zip(answers, served, strict=True))
        return served, max(ends)


@dataclass(frozen=True)
class _Sent:
    """A request as it is sent."""

    arrival_s: float
    data: bytes


def _sent_of(server: HttpServer, request: TraceRequest) -> _Sent:
    body = {
        "model": server.model,
        "prompt": request.prompt.tolist(),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,  # a model without a tokenizer has no texts to tell
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    url, data = urlsplit(server.url), json.dumps(body).encode()
    head = [
        f"POST {url.path.rstrip('/')}/completions HTTP/1.1",
        f"Host: {url.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *([f"Authorization: Bearer {server.key}"] if server.key else []),
    ]
    return _Sent(request.arrival_s, "\r\n".join([*head, "", ""]).encode() + data)


def _serve_part(
    server: HttpServer,
    requests: Sequence[_Sent],
    barrier: Any,
    start: MutableMapping[str, float],
    timeout_s: float,
    at_once: int | None,
) -> list[Answer]:
    """One process' work. All processes begin at one time of the monotonic clock."""
    barrier.wait(timeout_s)
    begin = start.setdefault("at", time.monotonic() + START_S)
    return uvloop.run(_serve_all(server, requests, begin, timeout_s, at_once))


async def _serve_all(
    server: HttpServer,
    requests: Sequence[_Sent],
    begin: float,
    timeout_s: float,
    at_once: int | None,
) -> list[Answer]:
    turns = None if at_once is None else asyncio.Semaphore(at_once)
    url = urlsplit(server.url)
    connections = HttpConnections(url.hostname or "", url.port or 80, server.keeps_connections)

    async def ask(request: _Sent) -> Answer:
        arrival = begin + request.arrival_s
        await asyncio.sleep(arrival - time.monotonic())
        try:
            if turns is None:
                return await connections.ask(request.data, arrival)
            async with turns:
                return await connections.ask(request.data, time.monotonic())
        except OSError as error:
            raise AnswerError(f"{server.url} does not answer: {error}.") from None

    async with asyncio.timeout(begin - time.monotonic() + timeout_s):
        answers = await asyncio.gather(*map(ask, requests))
    connections.close()
    return [replace(answer, arrival=answer.arrival - begin) for answer in answers]


def _read(answer: Answer, request: TraceRequest) -> TimedRequest:
    """Take an answer apart."""
    data = b"".join(answer.pieces)
    events = [found.end() for found in CHOICE_EVENT.finditer(data)]
    counts = USAGE.findall(data)
    if not events or not counts or not data[:20].partition(b" ")[2].startswith(b"200"):
        raise AnswerError(f"a request of the trace was answered {_shown(data)}")
    tokens = int(counts[-1])
    if tokens != request.output_tokens:
        raise AnswerError(
            f"{tokens} tokens came where {request.output_tokens} were asked for: {_shown(data)}"
        )
    ends = list(accumulate(map(len, answer.pieces)))

    def when(place: int) -> float:
        return answer.times[bisect_left(ends, place)]

    times = [when(place) for place in events]
    return TimedRequest(
        ttft_s=times[0],
        latency_s=times[-1],
        prompt_tokens=len(request.prompt),
        output_tokens=tokens,
        events=len(events),
        gaps_s=tuple(later - earlier for earlier, later in pairwise(times)),
    )


def _shown(data: bytes) -> str:
    return repr(data[:600].decode(errors="replace")) if data else "with nothing"
