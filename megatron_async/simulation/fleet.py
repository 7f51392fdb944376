"""`simulate_fleet`: serve a trace by replicas behind the coordinator's own decisions, in virtual
time.

The `Dispatcher`, its queue and its policies are those of `serving/`; engines and schedulers are the
real ones, without models. Only what lies between them is simulated: messages take no time, a ping
is answered between two steps, and each replica has a clock of its own, which its steps move on.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec

from megatron_async.config import InferenceConfig
from megatron_async.serving.dispatcher import Dispatcher
from megatron_async.serving.messages import (
    PROTOCOL,
    ClientHello,
    Ended,
    Generate,
    Ping,
    Pong,
    ReplicaHello,
    Run,
    StepTokens,
)
from megatron_async.serving.records import CoordinatorConfig
from megatron_async.serving.replica_status import describe
from megatron_async.serving.routing import RoutingPolicy
from megatron_async.simulation.device_times import Machine
from megatron_async.simulation.fleet_figures import FleetRun
from megatron_async.simulation.model_shape import ModelShape
from megatron_async.simulation.traced_requests import Trace, TracedRequest
from megatron_async.simulation.virtual_replica import Served, VirtualReplica

CLIENT = b"client"
NO_PARAMS = msgspec.Raw(b"")
"""The coordinator does not read them, and a virtual replica knows the request."""
NO_LIMIT = 2**31


def simulate_fleet(
    trace: Trace,
    shape: ModelShape,
    config: InferenceConfig,
    machine: Machine,
    replicas: int = 1,
    policy: RoutingPolicy | None = None,
    on_finish: Callable[[int], None] | None = None,
) -> FleetRun:
    """Serve a trace, every request to its full length.

    Args:
        trace: read once, request by request, as they arrive.
        shape: of the model.
        config: settings of each engine; `num_kv_blocks` or `buffer_size_gb` must be set.
        machine: how long everything takes.
        replicas: how many.
        policy: of the coordinator; None: its default. An object of this run alone.
        on_finish: called with the number of requests that have ended, whenever some have.

    Raises:
        ConfigurationError: settings that no engine can have.
        RuntimeError: a request failed, such as one that no engine can serve; it carries the
            request's error.
    """
    fleet = _Fleet(trace, shape, config, machine, replicas, policy or RoutingPolicy(), on_finish)
    return fleet.run()


class _Fleet:
    """One run: what happens when, in the order of the virtual time."""

    def __init__(
        self,
        trace: Trace,
        shape: ModelShape,
        config: InferenceConfig,
        machine: Machine,
        replicas: int,
        policy: RoutingPolicy,
        on_finish: Callable[[int], None] | None,
    ) -> None:
        self._cpu_began = time.process_time()
        self._on_finish = on_finish
        self._trace: Iterator[TracedRequest] = iter(trace)
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._served: list[Served] = []
        self._waiting: dict[int, tuple[TracedRequest, Served]] = {}
        """Requests that no replica has, by number."""
        self._pinged: list[VirtualReplica] = []
        self._now_us = 0.0
        self._num_ended = 0
        self._trace_has_ended = False
        coordinator = CoordinatorConfig(max_unfinished=NO_LIMIT, policy=policy)
        self._ping_us = 1e6 * coordinator.ping_interval_s
        self._dispatcher = Dispatcher(coordinator, self._send, now=0.0)
        self._hear(CLIENT, ClientHello(PROTOCOL))
        self._replicas: dict[bytes, VirtualReplica] = {}
        for number in range(replicas):
            # Engines write to their configuration, so each has its own.
            replica = VirtualReplica(number, shape, replace(config), machine)
            self._replicas[replica.identity] = replica
            info = describe(replica.engine, "virtual", replica.identity.decode(), False)
            self._hear(replica.identity, ReplicaHello(PROTOCOL, info))

    def run(self) -> FleetRun:
        """Serve all of it."""
        self._expect_arrival()
        self._at(self._ping_us, self._tick)
        while not self._trace_has_ended or self._num_ended < len(self._served):
            self._now_us, _, happens = heapq.heappop(self._due)
            happens(self._now_us)
        engines = [replica.engine for replica in self._replicas.values()]
        for engine in engines:
            engine.close()
        cpu_s = time.process_time() - self._cpu_began
        return FleetRun.of(self._served, engines, self._now_us / 1e6, cpu_s)

    def _at(self, time_us: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._due, (time_us, next(self._order), happens))

    def _hear(self, identity: bytes, message: Any) -> None:
        self._dispatcher.hear(identity, message, self._now_us / 1e6)

    # ---- What happens ------------------------------------------------------------------------

    def _expect_arrival(self) -> None:
        request = next(self._trace, None)
        if request is None:
            self._trace_has_ended = True
        else:
            self._at(1e6 * request.arrival_s, lambda _: self._arrive(request))

    def _arrive(self, request: TracedRequest) -> None:
        number = len(self._served)
        served = Served(request.arrival_s, request.input_tokens, request.output_tokens)
        self._served.append(served)
        self._waiting[number] = request, served
        replica = next(iter(self._replicas.values()))
        prompt: Any = request.prompt(replica.engine.controller.vocab_size)
        # An array for a list: the coordinator only measures, cuts and hashes it.
        generate = Generate(number, prompt, NO_PARAMS, request.output_tokens, 0)
        self._hear(CLIENT, generate)
        self._expect_arrival()

    def _tick(self, now_us: float) -> None:
        self._dispatcher.tick(now_us / 1e6)
        pinged, self._pinged = self._pinged, []
        for replica in pinged:
            if replica.clock.now_us > now_us:
                replica.status_is_due = True
            else:
                self._hear(replica.identity, replica.status())
        self._hear(CLIENT, Pong())
        self._at(now_us + self._ping_us, self._tick)

    def _turn(self, replica: VirtualReplica) -> None:
        if replica.status_is_due:
            replica.status_is_due = False
            self._hear(replica.identity, replica.status())
        if replica.news:
            news, replica.news = replica.news, []
            self._hear(replica.identity, StepTokens(ends=list(news)))
        replica.has_turn = replica.turn(self._now_us)
        if replica.has_turn:
            self._at(replica.clock.now_us, lambda _: self._turn(replica))

    def _send(self, identity: bytes, message: Any) -> None:
        """The dispatcher's messages to others."""
        if isinstance(message, Run):
            replica = self._replicas[identity]
            asked = self._dispatcher.requests[message.number].asked.number
            replica.inbox.append((message.number, *self._waiting.pop(asked)))
            if not replica.has_turn:
                replica.has_turn = True
                self._at(self._now_us, lambda _: self._turn(replica))
        elif isinstance(message, Ping):
            if identity != CLIENT:
                self._pinged.append(self._replicas[identity])
        elif isinstance(message, StepTokens):
            for ended in message.ends:
                self._note_end(ended)

    def _note_end(self, ended: Ended) -> None:
        if ended.failure is not None:
            raise RuntimeError(f"request {ended.number} failed: {ended.failure[1]}")
        self._num_ended += 1
        if self._on_finish is not None:
            self._on_finish(1)
