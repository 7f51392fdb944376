"""Time the way of tokens from an engine to its clients, without a model and without HTTP.

`engine`: a replica around an engine that computes nothing, a step every millisecond, whose requests
come from N clients through a coordinator, each in a process of its own. Windows of steps with the
emitter and without it alternate. The CPU time of the engine's thread a step is compared window by
window, so that other work of the machine, and the engine's own, falls out. `own_us` is what the
emitter costs the thread: without it, another coordinator and as many clients do the same work as
those of the engine do with it. `more_us` includes what these processes cost the engine's thread by
sharing its cores and caches: without the emitter, all of them are idle.

`coordinator`: one coordinator in a process, mock replicas in others that say a step's message at a
given rate, and clients that read. Reports the coordinator's CPU time a message (all its
threads), the share of a core that 8 replicas of 1,000 steps a second would take, and the number of
messages passed on.

`client`: CPU time of `TokenClient` a row, from a step's message to the reader's call.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zmq
from child_processes import Pipe, coordinate, cpu_s, spawn
from stand_in import StandIn

from megatron_async import InferenceConfig, SamplingParams
from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.contexts.step_plan import IntArray, StepPlan
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.observe.listener import EngineListener
from megatron_async.profiling.benchmark_record import write_record
from megatron_async.serving.messages import (
    PROTOCOL,
    Card,
    ClientHello,
    Generate,
    Ping,
    Pong,
    ReplicaHello,
    ReplicaInfo,
    ReplicaStatus,
    Run,
    StepTokens,
    Welcome,
    decode_for_client,
    decode_for_replica,
    encode,
)
from megatron_async.serving.model_card import ModelCard
from megatron_async.serving.readers import RequestEnd, TokenLogProbs
from megatron_async.serving.replica import Replica
from megatron_async.serving.token_client import TokenClient
from megatron_async.simulation.model_less import ModelLessEngine
from megatron_async.simulation.model_shape import ModelShape
from megatron_async.text_generation_controllers.text_generation_controller import LaunchedStep

STEP_S = 0.001
WARM_UP_S = 1.5
LENGTH = 60_000
"""Tokens of a sequence: no request ends while it is measured."""
TARGET_MESSAGES = 8000
"""A second: 8 replicas of 1,000 steps."""
NO_PARAMS = msgspec.Raw(msgspec.msgpack.encode({}))


class SameToken:
    """Every row's sample."""

    def sample(self, plan: StepPlan, context: DynamicInferenceContext) -> tuple[IntArray, IntArray]:
        """Sevens."""
        return np.full(plan.num_rows, 7, np.int32), np.ones(plan.num_rows, np.int32)


class RestingEngine(ModelLessEngine):
    """Steps once in `STEP_S`, and rests meanwhile: its thread's time is work alone. (The engine
    would ask a `PacedEngine`'s device again and again.)"""

    _next = 0.0

    async def async_step(self) -> dict[str, Any]:
        """See `DynamicInferenceEngine.async_step`."""
        rest = self._next - time.perf_counter()
        if rest > 0:
            await asyncio.sleep(rest)
        self._next = max(self._next, time.perf_counter() - STEP_S) + STEP_S
        return await super().async_step()


class Windows(EngineListener):
    """Thread time of windows of steps, by turns with the emitter, beside the stand-in's work and
    with neither.

    Args:
        replica: whose emitter is taken out and put back.
        engine: its engine.
        stand_in: does the other processes' work.
        steps: of a window.
        rounds: of windows.
    """

    def __init__(
        self,
        replica: Replica,
        engine: ModelLessEngine,
        stand_in: StandIn,
        steps: int,
        rounds: int,
    ) -> None:
        self._emitter: Any = replica._emitter
        self._stand_in = stand_in
        self._engine = engine
        self._steps = steps
        self._most = 3 * rounds
        self._count = 0
        self._start = (0, 0.0)
        self.is_over = asyncio.Event()
        self.cpu_us: list[float] = []
        self.step_ms: list[float] = []
        self.is_begun = False

    def resolved(self, step: LaunchedStep) -> None:
        """Count a step; at a window's end begin the next."""
        if not self.is_begun:
            return
        self._count += 1
        now = time.thread_time_ns(), time.perf_counter()
        if self._count > 2:  # the first ones of a window still have something of the one before
            if self._count == 3:
                self._start = now
            if self._count < self._steps + 3:
                return
            self.cpu_us.append((now[0] - self._start[0]) / 1e3 / self._steps)
            self.step_ms.append((now[1] - self._start[1]) * 1e3 / self._steps)
            self._count = 0
            turn = len(self.cpu_us) % 3
            self._stand_in.turn(on=turn == 1)
            if turn == 0:
                self._engine.listeners.append(self._emitter)
            elif turn == 1:
                self._engine.listeners.remove(self._emitter)
            if len(self.cpu_us) == self._most:
                self.is_over.set()


class Counting:
    """A reader that counts."""

    def __init__(self) -> None:
        self.count = 0

    def tokens(self, tokens: memoryview, log_probs: TokenLogProbs | None) -> None:
        """Count."""
        self.count += len(tokens)

    def text(self, text: str) -> None:
        """Nothing."""

    def ended(self, end: RequestEnd) -> None:
        """Nothing."""


def ask(address: str, requests: int, pipe: Pipe) -> None:
    """A client's process: sends requests, reads their tokens, and tells counts when asked."""

    async def serve() -> None:
        client = TokenClient(address)
        await client.open()
        await client.card()
        reader = Counting()
        params = SamplingParams(termination_id=-1)
        for _ in range(requests):
            client.send([1, 2, 3], params, reader)
        while not pipe.poll():
            await asyncio.sleep(0.05)
        pipe.send((reader.count, time.process_time()))
        pipe.recv()
        await client.close()

    asyncio.run(serve())


def time_engine(clients: int, args: argparse.Namespace) -> dict[str, float]:
    """Figures of `engine`."""
    coordinator, told = spawn(coordinate)
    address = told.recv()[0]
    shape = ModelShape.of_architecture(DUMMY_SHAPES["tiny"], "float32")
    config = InferenceConfig(
        max_requests=args.streams, max_tokens=4 * args.streams, max_sequence_length=LENGTH,
        num_kv_blocks=args.streams * (LENGTH // 256 + 1), block_size_tokens=256,
        enable_prefix_caching=False, lookahead=1,
    )  # fmt: skip
    engine = RestingEngine(shape, config, SameToken())
    each = args.streams // clients
    readers = [spawn(ask, address, each) for _ in range(clients)]

    async def serve(stand_in: StandIn) -> Windows:
        replica = Replica(engine, address, "none", "a")
        windows = Windows(replica, engine, stand_in, args.steps, args.pairs)
        engine.listeners.append(windows)
        running = asyncio.create_task(replica.run())
        while len(engine.requests) < each * clients:
            await asyncio.sleep(0.01)
            if running.done():
                await running
        await asyncio.sleep(WARM_UP_S)
        windows.is_begun = True
        await windows.is_over.wait()
        replica.leave()
        replica.leave()
        await running
        return windows

    with StandIn(ask, clients, each, STEP_S) as stand_in:
        windows = asyncio.run(serve(stand_in))
    for process, pipe in readers:
        pipe.send(0)
        pipe.recv()
        process.kill()
    coordinator.kill()
    on, beside, off = (windows.cpu_us[place::3] for place in range(3))
    step_on, step_off = windows.step_ms[0::3], windows.step_ms[2::3]
    return {
        "clients": clients,
        "streams": each * clients,
        "cpu_us_without": statistics.median(off),
        "own_us": statistics.median(a - b for a, b in zip(on, beside, strict=True)),
        "more_us": statistics.median(a - b for a, b in zip(on, off, strict=True)),
        "step_ms": statistics.median(step_on),
        "step_ratio": statistics.median(a / b for a, b in zip(step_on, step_off, strict=True)),
    }


def mock_replicas(address: str, names: list[str], rows: int, rate: float, pipe: Pipe) -> None:
    """Replicas that say a step's message `rate` times a second once they have `rows` requests."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    card = ModelCard(model="none", max_sequence_length=8, vocab_size=8, block_size_tokens=4)
    sockets, steps = [], []
    for name in names:
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        info = ReplicaInfo(
            name=name, instance=name, model={}, card="a", slots=rows, kv_blocks=10**6,
            block_size_tokens=4,
        )  # fmt: skip
        socket.send(encode(ReplicaHello(PROTOCOL, info)))
        sockets.append(socket)
        numbers: list[int] = []
        while len(numbers) < rows:
            message = decode_for_replica(socket.recv())
            if isinstance(message, Welcome) and message.wants_card:
                socket.send(encode(Card("a", card.encode())))
            elif isinstance(message, Run):
                numbers.append(message.number)
        tokens = np.arange(rows, dtype=np.int32).tobytes()
        ones = np.ones(rows, np.int32).tobytes()
        step = StepTokens(np.array(numbers, np.int64).tobytes(), ones, tokens)
        steps.append(encode(step))
    pipe.send("ready")
    pipe.recv()
    sent, start = 0, time.perf_counter()
    alive = encode(ReplicaStatus(rows, 1, 1, 1, True, {}))
    while not pipe.poll():
        due = int((time.perf_counter() - start) * rate)
        for _ in range(min(due - sent, 20)):
            for socket, step_ in zip(sockets, steps, strict=True):
                socket.send(step_)
            sent += 1
        for socket in sockets:
            if socket.poll(0) and isinstance(decode_for_replica(socket.recv()), Ping):
                socket.send(alive)
        time.sleep(0.0005)
    pipe.send(sent * len(sockets))


def drain(address: str, requests: int, pipe: Pipe) -> None:
    """A client that asks and counts messages and tokens, and does nothing else."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.RCVHWM, 0)
    socket.connect(address)
    socket.send(encode(ClientHello(PROTOCOL)))
    for number in range(requests):
        socket.send(encode(Generate(number, [1], NO_PARAMS, 5, 0)))
    messages = tokens = 0
    while not pipe.poll():
        while socket.poll(20):
            data = socket.recv()
            if len(data) < 200 and isinstance(decode_for_client(data), Ping):
                socket.send(encode(Pong()))
            else:
                messages += 1
                message = decode_for_client(data)
                tokens += len(message.tokens) // 4 if isinstance(message, StepTokens) else 0
    pipe.send((messages, tokens))


def time_coordinator(clients: int, args: argparse.Namespace) -> dict[str, float]:
    """Figures of `coordinator`."""
    coordinator, told = spawn(coordinate)
    address, pid = told.recv()
    requests = args.replicas * args.rows
    readers = [spawn(drain, address, requests // clients) for _ in range(clients)]
    time.sleep(1.0)
    names = [f"r{number}" for number in range(args.replicas)]
    mock, pipe = spawn(mock_replicas, address, names, args.rows, args.rate)
    # Requests come before replicas, which each take their share: slots times `requests_per_slot`.
    pipe.recv()
    pipe.send("go")
    time.sleep(0.5)
    before, start = cpu_s(pid), time.perf_counter()
    time.sleep(args.seconds)
    used, wall = cpu_s(pid) - before, time.perf_counter() - start
    pipe.send("stop")
    sent = pipe.recv()
    time.sleep(0.5)
    counts = []
    for process, reader in readers:
        reader.send("stop")
        counts.append(reader.recv())
        process.kill()
    mock.kill()
    coordinator.kill()
    a_second = sent / (wall + 0.5)
    each_us = 1e6 * used / (a_second * wall)
    return {
        "clients": clients,
        "messages_a_second": a_second,
        "cpu_us_a_message": each_us,
        "share_of_a_core": used / wall,
        "share_at_8000": each_us * TARGET_MESSAGES / 1e6,
        "tokens_passed_on": sum(tokens for _, tokens in counts) / max(sent * args.rows, 1),
    }


def time_client(args: argparse.Namespace) -> dict[str, float]:
    """Figures of `client`."""
    rows, steps = args.streams, 2000

    async def serve() -> float:
        client, reader = TokenClient("ipc:///tmp/nobody"), Counting()
        from megatron_async.serving.sent_request import SentRequest

        for number in range(rows):
            client._sent.put(number, SentRequest(reader, 0))
        numbers = np.arange(rows, dtype=np.int64)
        ones = np.ones(rows, np.int32)
        data = encode(StepTokens(numbers.tobytes(), ones.tobytes(), ones.tobytes()))
        start = time.process_time()
        for _ in range(steps):
            client._hear(decode_for_client(data))
        return time.process_time() - start

    return {"rows": rows, "us_a_row": 1e6 * asyncio.run(serve()) / (rows * steps)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures and, with --json, write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=("engine", "coordinator", "client"))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50, help="of a window (default 50)")
    parser.add_argument("--pairs", type=int, default=30, help="rounds of windows (default 30)")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1000.0, help="steps/s of a mock replica")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(arguments)
    figures: list[dict[str, Any]] = []
    for what in args.what:
        for clients in [1] if what == "client" else args.clients:
            if what == "client":
                found = time_client(args)
            else:
                time_it = time_engine if what == "engine" else time_coordinator
                found = time_it(clients, args)
            figures.append({"what": what, **found})
            print(what, " ".join(f"{key}={value:.4g}" for key, value in found.items()), flush=True)
    if args.json:
        write_record(args.json, "emit", vars(args) | {"device": "cpu"}, figures)


if __name__ == "__main__":
    main()
