"""Time an API process between a coordinator and sockets, without an engine.

A mock replica says a step's message at a given rate; a coordinator passes it on; one API process
makes events of it; one reader process, plain sockets and a selector, keeps what comes and takes it
apart when the clock has stopped.

`load`: CPU time of the API process a token while many streams run. Windows alternate with windows
of a bare writer, a process that does nothing but write as many bytes as often to as many sockets:
the ratio of both says what all but the sockets costs, whatever else the machine does.

`idle`: one request after the other, alone. How long a request takes from the reader to the replica
(`in`), its first token from the replica to the reader (`first`) and the others (`other`), and
whether each token is an event of its own. Both ways lead through the coordinator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import selectors
import socket
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import zmq
from benchmark_emit import Pipe, coordinate, cpu_s, spawn

from megatron_async.checkpoints import open_model
from megatron_async.profiling.benchmark_record import write_record
from megatron_async.server.api_config import ApiConfig
from megatron_async.server.api_process import run_api_process
from megatron_async.server.stream_hub import EVERY_S
from megatron_async.serving.messages import (
    PROTOCOL,
    Card,
    Ended,
    Ping,
    ReplicaHello,
    ReplicaInfo,
    ReplicaStatus,
    Run,
    StepTokens,
    Welcome,
    decode_for_replica,
    encode,
)
from megatron_async.serving.model_card import ModelCard

MODEL = "smollm2"
CONTEXT = 1_000_000
"""Tokens of a sequence: no request ends while it is measured."""
LETTERS = 4
"""Characters of each token: so the text says how many tokens it is of."""
STEPS = 64
"""Different messages of steps, which come again and again."""
SETTLE_S = 0.3
"""What is under way when a window begins or ends is waited for so long."""
FEW = 6
"""Tokens of an idle server's request."""
GAP_S = 0.01
"""Between two of them."""
TEXT = re.compile(rb'"text":"((?:[^"\\]|\\.)*)"')
EVENT = b"data: {"


def card_and_tokens() -> tuple[bytes, list[int]]:
    """The demo model's card, and its tokens of a space and three letters."""
    tokenizer = open_model(MODEL).tokenizer
    assert tokenizer is not None
    words = [
        token for token in range(49152) if re.fullmatch(" [a-z]{3}", tokenizer.detokenize([token]))
    ]
    card = ModelCard(
        model=MODEL,
        tokenizer_json=tokenizer.backend.to_str().encode(),
        tokenizer_config=tokenizer.config,
        eos_ids=list(tokenizer.eos_ids),
        max_sequence_length=CONTEXT,
        vocab_size=49152,
        block_size_tokens=16,
        digest="a",
    )
    return card.encode(), words


class MockReplica:
    """A replica's side of the wire, without an engine; in a process of its own.

    Args:
        address: of the coordinator.
        slots: requests that it takes at once.
    """

    def __init__(self, address: str, slots: int) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(address)
        self._slots = slots
        self._card, self.words = card_and_tokens()
        info = ReplicaInfo(
            name="a", instance="a", model={}, card="a", slots=slots, kv_blocks=10**6,
            block_size_tokens=16,
        )  # fmt: skip
        self.socket.send(encode(ReplicaHello(PROTOCOL, info)))

    def heard(self, wait_ms: int) -> int | None:
        """The number of a new request, if there is one; answers what else there is."""
        while self.socket.poll(wait_ms):
            message = decode_for_replica(self.socket.recv())
            if isinstance(message, Run):
                return message.number
            if isinstance(message, Welcome) and message.wants_card:
                self.socket.send(encode(Card("a", self._card)))
            elif isinstance(message, Ping):
                self.socket.send(encode(ReplicaStatus(self._slots, 0, 10**6, 10**6, True, {})))
        return None


def stream_steps(address: str, streams: int, rate: float, pipe: Pipe) -> None:
    """A mock replica that says steps of all streams while it is told to."""
    replica = MockReplica(address, streams)
    chance = np.random.default_rng(0)
    pipe.send("ready")
    numbers: list[int] = []
    while len(numbers) < streams:
        number = replica.heard(100)
        numbers += [] if number is None else [number]
    ones, all_numbers = np.ones(streams, np.int32), np.array(numbers, np.int64).tobytes()
    steps = [
        encode(StepTokens(all_numbers, ones.tobytes(), words.astype(np.int32).tobytes()))
        for words in chance.choice(replica.words, (STEPS, streams))
    ]
    pipe.send("running")
    while True:
        while not pipe.poll():
            replica.heard(20)
        if pipe.recv() == "end":
            return
        sent, start = 0, time.perf_counter()
        while not pipe.poll():
            due = int((time.perf_counter() - start) * rate)
            for step in range(sent, min(due, sent + 20)):
                replica.socket.send(steps[step % STEPS])
            sent = min(due, sent + 20)
            replica.heard(0)
            time.sleep(0.0005)
        pipe.recv()
        pipe.send(sent)


def answer_each(address: str, requests: int, pipe: Pipe) -> None:
    """A mock replica that answers each request with a few tokens; tells when it heard and spoke."""
    replica = MockReplica(address, 4)
    pipe.send("ready")
    heard: list[float] = []
    spoken: list[list[float]] = []
    while len(heard) < requests:
        if (number := replica.heard(100)) is None:
            continue
        heard.append(time.monotonic())
        which, one = np.array([number], np.int64).tobytes(), np.ones(1, np.int32).tobytes()
        times: list[float] = []
        for place in range(FEW):
            time.sleep(GAP_S)
            token = np.array([replica.words[place]], np.int32).tobytes()
            times.append(time.monotonic())
            replica.socket.send(encode(StepTokens(which, one, token)))
        spoken.append(times)
        time.sleep(GAP_S)
        end = Ended(number, "length", num_prompt_tokens=3, num_generated_tokens=FEW)
        replica.socket.send(encode(StepTokens(ends=[end])))
    pipe.send((heard, spoken))
    while not pipe.poll():
        replica.heard(20)


def serve(address: str, listener: socket.socket, one_event_a_token: bool, pipe: Pipe) -> None:
    """An API process."""
    pipe.send(os.getpid())
    config = ApiConfig(coordinator=address, one_event_a_token=one_event_a_token)
    run_api_process(config, listener.detach())


def write_bare(listener: socket.socket, every_s: float, pipe: Pipe) -> None:
    """The bare writer: when told how many bytes, it writes them to all sockets every `every_s`."""
    import uvloop

    pipe.send(os.getpid())
    transports: list[asyncio.Transport] = []

    class Peer(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transports.append(transport)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Peer, sock=listener)
        told: asyncio.Event = asyncio.Event()
        loop.add_reader(pipe.fileno(), told.set)
        while True:
            await told.wait()
            told.clear()
            size = pipe.recv()
            if not size:
                break
            data, due, writes = b"x" * size, loop.time(), 0
            while not told.is_set():
                for transport in transports:
                    transport.write(data)
                writes += len(transports)
                due = max(due + every_s, loop.time())
                await asyncio.sleep(due - loop.time())
            told.clear()
            pipe.recv()
            pipe.send(writes)
        server.close()

    uvloop.run(main())


def request_bytes(tokens: int) -> bytes:
    """A request for a stream."""
    body = json.dumps(
        {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def connected(port: int) -> socket.socket:
    """A connection without delay."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_all(port: int, bare_port: int, streams: int, pipe: Pipe) -> None:
    """The readers: keep what comes until asked, then tell reads, bytes, events and tokens."""
    selector = selectors.DefaultSelector()
    for place in (port, bare_port):
        for _ in range(streams):
            connection = connected(place)
            if place == port:
                connection.sendall(request_bytes(CONTEXT - 10))
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ)
    selector.register(pipe, selectors.EVENT_READ)
    kept: list[bytes] = []
    while True:
        for key, _ in selector.select():
            if isinstance(key.fileobj, socket.socket):
                kept.append(key.fileobj.recv(1 << 18))
                continue
            if pipe.recv() == "end":
                return
            data = b"".join(kept)
            tokens = sum(map(len, TEXT.findall(data))) // LETTERS
            pipe.send((len(kept), len(data), data.count(EVENT), tokens))
            kept = []


def time_load(args: argparse.Namespace) -> dict[str, float]:
    """Figures of `load`."""
    streams, rate = args.streams, args.rate
    coordinator, told = spawn(coordinate)
    address = told.recv()[0]
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=2048) for _ in range(2)]
    ports = [listener.getsockname()[1] for listener in listeners]
    replica, steps = spawn(stream_steps, address, streams, rate)
    steps.recv()
    api, api_pipe = spawn(serve, address, listeners[0], args.one_event_a_token)
    every_s = max(EVERY_S, 1 / rate)
    bare, bare_pipe = spawn(write_bare, listeners[1], every_s)
    api_pid, bare_pid = api_pipe.recv(), bare_pipe.recv()
    readers, read = spawn(read_all, *ports, streams)
    steps.recv()  # all requests have come
    rows: list[dict[str, float]] = []

    def window(pid: int, start: Any, pipe: Pipe) -> tuple[float, float, Any, Any]:
        read.send("clear")
        read.recv()
        before, begun = cpu_s(pid), time.perf_counter()
        pipe.send(start)
        time.sleep(args.seconds)
        pipe.send("stop")
        done, wall = pipe.recv(), time.perf_counter() - begun
        time.sleep(SETTLE_S)
        used = cpu_s(pid) - before
        read.send("tell")
        return used, wall, done, read.recv()

    for pair in range(args.pairs + 1):
        used, wall, sent, (reads, size, events, tokens) = window(api_pid, "go", steps)
        bytes_a_write = round(size / max(reads, 1))
        bare_used, bare_wall, writes, _ = window(bare_pid, bytes_a_write, bare_pipe)
        if not pair:
            continue  # the first one has what happens once
        bare_us = 1e6 * bare_used / max(writes, 1)
        rows.append(
            {
                "tokens_a_second": tokens / wall,
                "delivered": tokens / max(sent * streams, 1),
                "share_of_a_core": used / wall,
                "us_a_token": 1e6 * used / max(tokens, 1),
                "tokens_an_event": tokens / max(events, 1),
                "tokens_a_read": tokens / max(reads, 1),
                "bytes_a_token": size / max(tokens, 1),
                "us_a_read": 1e6 * used / max(reads, 1),
                "bare_us_a_write": bare_us,
                "bare_share_of_a_core": bare_used / bare_wall,
                "to_bare": (used / max(reads, 1)) / (bare_us / 1e6) if bare_us else 0.0,
            }
        )
    for pipe in (steps, read):
        pipe.send("end")
    bare_pipe.send(0)
    for process in (readers, replica, api, bare, coordinator):
        process.join(1)
        process.kill()
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    at_64k = medians["us_a_token"] * 64_000 / 1e6
    return {"streams": streams, "rate": rate, **medians, "cores_at_64000": at_64k}


def time_idle(args: argparse.Namespace) -> dict[str, float]:
    """Figures of `idle`."""
    requests = args.requests + 5  # the first ones have what happens once
    coordinator, told = spawn(coordinate)
    address = told.recv()[0]
    listener = socket.create_server(("127.0.0.1", 0))
    replica, pipe = spawn(answer_each, address, requests)
    pipe.recv()
    api, api_pipe = spawn(serve, address, listener, False)
    api_pipe.recv()
    connection = connected(listener.getsockname()[1])
    asked, arrived = [], []
    for _ in range(requests):
        time.sleep(GAP_S)
        asked.append(time.monotonic())
        connection.sendall(request_bytes(FEW))
        arrived.append(list(_events_of_one(connection)))
    heard, spoken = pipe.recv()
    pipe.send("end")
    for process in (replica, api, coordinator):
        process.join(1)
        process.kill()
    ways_in = [1e3 * (at - begun) for begun, at in zip(asked, heard, strict=True)][5:]
    # The last event of an answer has its end; those before it are the tokens'.
    ways_out = [
        [1e3 * (at - said) for said, at in zip(times, events, strict=False)]
        for times, events in zip(spoken, arrived, strict=True)
    ][5:]
    first, other = [ways[0] for ways in ways_out], [w for ways in ways_out for w in ways[1:]]
    p99 = partial(np.percentile, q=99)
    return {
        "requests": args.requests,
        "events_a_token": statistics.mean(len(events) - 1 for events in arrived) / FEW,
        "in_ms": statistics.median(ways_in),
        "first_ms": statistics.median(first),
        "first_ms_p99": float(p99(first)),
        "other_ms": statistics.median(other),
        "other_ms_p99": float(p99(other)),
    }


def _events_of_one(connection: socket.socket) -> Sequence[float]:
    """When the events of one answer came, to its end."""
    times: list[float] = []
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        new = connection.recv(1 << 16)
        if not new:
            raise ConnectionError(f"the server ended the connection behind {data[-300:]!r}")
        data += new
        times += [time.monotonic()] * (data.count(EVENT) - len(times))
    if b"200 OK" not in data[:20]:
        raise ConnectionError(f"the server answered {data[:300]!r}")
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures and, with --json, write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=("load", "idle"))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1000.0, help="steps/s (default 1000)")
    parser.add_argument("--one-event-a-token", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window (default 3)")
    parser.add_argument("--pairs", type=int, default=5, help="of windows (default 5)")
    parser.add_argument("--requests", type=int, default=100, help="of `idle` (default 100)")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(arguments)
    figures: list[dict[str, Any]] = []
    for what in args.what:
        found = time_load(args) if what == "load" else time_idle(args)
        figures.append({"what": what, **found})
        print(what, " ".join(f"{key}={value:.4g}" for key, value in found.items()), flush=True)
    if args.json:
        write_record(args.json, "server", vars(args) | {"device": "cpu"}, figures)


if __name__ == "__main__":
    main()
