"""Processes around an API process that is timed: mock replicas that say steps, a bare writer, and
readers of plain sockets. `benchmark_server.py` starts them."""

import asyncio
import json
import os
import re
import selectors
import socket
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from benchmark_tokenizer import FOLDER_REMEDY, benchmark_tokenizer
from child_processes import Pipe

from megatron_async.checkpoints.model_names import DEMO
from megatron_async.errors import ConfigurationError
from megatron_async.server.api_config import ApiConfig
from megatron_async.server.api_process import run_api_process
from megatron_async.serving.address import target_of
from megatron_async.serving.link import Greeting, Link, connect_here
from megatron_async.serving.messages import (
    MOST_BYTES,
    PROTOCOL,
    Card,
    Ended,
    Message,
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
from megatron_async.serving.secret import PEER, proof_of

CONTEXT = 1_000_000
"""Tokens of a sequence: no request ends while it is measured."""
LETTERS = 4
"""Characters of each token: so the text says how many tokens it is of."""
WORD = re.compile("[a-z ][a-z]{3}")
STEPS = 64
"""Different messages of steps, which come again and again."""
FEW = 6
"""Tokens of an idle server's request."""
GAP_S = 0.01
"""Between two of them."""
TEXT = re.compile(rb'"text":"((?:[^"\\]|\\.)*)"')
EVENT = b"data: {"


class Served(NamedTuple):
    """A model that mock replicas have.

    Attributes:
        card: encoded.
        words: its tokens of `LETTERS` characters.
    """

    card: bytes
    words: list[int]


def served_model(folder: str | None) -> Served:
    """A card without a model.

    Args:
        folder: with a `tokenizer.json`; None: the demo model's tokenizer is taken.

    Raises:
        ConfigurationError: there is no tokenizer, or one without words.
    """
    tokenizer = benchmark_tokenizer(folder)
    size = tokenizer.vocab_size
    words = [token for token in range(size) if WORD.fullmatch(tokenizer.detokenize([token]))]
    if not words:
        raise ConfigurationError(
            f"the tokenizer of {folder or DEMO} has no tokens of {LETTERS} small letters, by which "
            f"tokens are counted: give {FOLDER_REMEDY}."
        )
    card = ModelCard(
        model="mock",
        tokenizer_json=tokenizer.backend.to_str().encode(),
        tokenizer_config=tokenizer.config,
        eos_ids=list(tokenizer.eos_ids),
        max_sequence_length=CONTEXT,
        vocab_size=size,
        block_size_tokens=16,
        digest="a",
    )
    return Served(card.encode(), words)


class MockReplica:
    """A replica's side of the wire, without an engine; in a process of its own.

    Args:
        address: of the coordinator.
        slots: requests that it takes at once.
        served: its model.
    """

    def __init__(self, address: str, slots: int, served: Served) -> None:
        self._link = Link(_reached(address), MOST_BYTES)
        self._poller = selectors.DefaultSelector()
        self._poller.register(self._link.fileno(), selectors.EVENT_READ)
        self._heard: deque[bytes] = deque()
        self._prove()
        self._slots = slots
        self._card, self.words = served
        info = ReplicaInfo(
            name="a", instance="a", model={}, card="a", slots=slots, kv_blocks=10**6,
            block_size_tokens=16,
        )  # fmt: skip
        self.send(ReplicaHello(PROTOCOL, info))

    def send(self, message: Message) -> None:
        """Send; never waits."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send a message that was encoded before."""
        self._link.send(data)

    def heard(self, wait_ms: int) -> int | None:
        """The number of a new request, if there is one; answers what else there is."""
        while self._heard or self._has_come(wait_ms):
            message = decode_for_replica(self._heard.popleft())
            if isinstance(message, Run):
                return message.number
            if isinstance(message, Welcome):
                if message.wants_card:
                    self.send(Card("a", self._card))
            elif isinstance(message, Ping):
                self.send(ReplicaStatus(self._slots, 0, 10**6, 10**6, True, {}))
        return None

    def _has_come(self, wait_ms: int) -> bool:
        """Wait for messages; write what waits."""
        if self._link.unsent:
            self._link.flush()
        if self._poller.select(wait_ms / 1000):
            self._heard += self._link.receive()
        return bool(self._heard)

    def _prove(self) -> None:
        """Begin the connection, on the coordinator's Unix socket where there is one, as replicas
        do."""
        while not self._has_come(1000):
            pass
        greeting = Greeting.decode(self._heard.popleft())
        if (end := connect_here(greeting.here)) is not None:
            self._poller.unregister(self._link.fileno())
            self._link.close()
            self._link = Link(end, MOST_BYTES)
            self._poller.register(self._link.fileno(), selectors.EVENT_READ)
            self._prove()
        else:
            self._link.send(proof_of(None, PEER, b"", greeting.nonce))


def _reached(address: str) -> socket.socket:
    target = target_of(address)
    end = socket.socket(socket.AF_UNIX if isinstance(target, str) else socket.AF_INET)
    end.connect(target)
    return end


def stream_steps(address: str, streams: int, rate: float, served: Served, pipe: Pipe) -> None:
    """A mock replica that says steps of all streams while it is told to."""
    replica = MockReplica(address, streams, served)
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
                replica.send_encoded(steps[step % STEPS])
            sent = min(due, sent + 20)
            replica.heard(0)
            time.sleep(0.0005)
        pipe.recv()
        pipe.send(sent)


def answer_each(address: str, requests: int, served: Served, pipe: Pipe) -> None:
    """A mock replica that answers each request with a few tokens; tells when it heard and spoke."""
    replica = MockReplica(address, 4, served)
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
            replica.send(StepTokens(which, one, token))
        spoken.append(times)
        time.sleep(GAP_S)
        end = Ended(number, "length", num_prompt_tokens=3, num_generated_tokens=FEW)
        replica.send(StepTokens(ends=[end]))
    pipe.send((heard, spoken))
    while not pipe.poll():
        replica.heard(20)


def serve(address: str, listener: socket.socket, one_event_a_token: bool, pipe: Pipe) -> None:
    """An API process."""
    pipe.send(os.getpid())
    config = ApiConfig(coordinator=address, one_event_a_token=one_event_a_token)
    run_api_process(config, [listener.detach()])


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


def read_half(port: int, reading: int, stalled: int, pipe: Pipe) -> None:
    """Readers of some streams, and connections that ask and never read; tells tokens when asked."""
    idle = [connected(port) for _ in range(stalled)]
    for connection in idle:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request_bytes(CONTEXT - 10))
    selector = selectors.DefaultSelector()
    for _ in range(reading):
        connection = connected(port)
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
            pipe.send(sum(map(len, TEXT.findall(b"".join(kept)))) // LETTERS)
            kept = []
