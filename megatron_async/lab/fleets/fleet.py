"""`simulate_fleet`: serve a trace by replicas behind the coordinator's own decisions, in virtual
time; `FleetRun`: the figures of it.

The `Dispatcher`, its queue and its policies are those of `serving/`; engines and schedulers are the
real ones, without models. Only what lies between them is simulated: messages take no time, a ping
is answered between two steps, and each replica has a clock of its own, which its steps move on.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import msgspec

from megatron_async.config import InferenceConfig
from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
from megatron_async.lab.benchmark_record import distribution
from megatron_async.lab.device_times import Machine
from megatron_async.lab.fleets.traced_requests import Trace, TracedRequest
from megatron_async.lab.fleets.virtual_replica import Served, VirtualReplica
from megatron_async.lab.model_less import ModelLessEngine
from megatron_async.lab.model_shape import ModelShape
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


@dataclass(frozen=True)
class FleetRun:
    """A served trace, and what the engines have counted.

    Attributes:
        served: in order of arrival.
        duration_s: from the trace's start to the last request's end, virtual seconds.
        busy_share: of the replicas' time: their devices' steps.
        busiest_share: the same of the replica with most.
        counters: of all engines together, by the names of docs/observing.md.
        cpu_s: real time that the simulation took of one CPU, seconds.
    """

    served: list[Served]
    duration_s: float
    busy_share: float
    busiest_share: float
    counters: dict[str, int]
    cpu_s: float

    @classmethod
    def of(
        cls,
        served: list[Served],
        engines: Sequence[ModelLessEngine],
        duration_s: float,
        cpu_s: float,
    ) -> FleetRun:
        """What is left of a run that is over."""
        busy = [engine.virtual_device.compute.busy_us / 1e6 for engine in engines]
        duration = max(duration_s, 1e-9)
        counters: dict[str, int] = {}
        for engine in engines:
            for name, value in _counters(engine).items():
                counters[name] = counters.get(name, 0) + value
        return cls(
            served,
            duration_s,
            sum(busy) / len(busy) / duration,
            max(busy) / duration,
            counters,
            cpu_s,
        )

    @property
    def prompt_tokens(self) -> int:
        """Figures of all requests together."""
        return sum(request.input_tokens for request in self.served)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that requests found when they were admitted for the first time."""
        return sum(request.cached_tokens for request in self.served)

    @property
    def hit_ratio(self) -> float:
        """Prompt tokens found, for each prompt token."""
        return self.cached_tokens / max(self.prompt_tokens, 1)

    def figures(self) -> dict[str, Any]:
        """JSON-ready figures; units stand in the names."""
        tokens_out = sum(request.output_tokens for request in self.served)
        milliseconds: dict[str, list[float]] = {
            "queue_ms": [1e3 * (r.first_launched_s - r.arrival_s) for r in self.served],
            "ttft_ms": [1e3 * r.ttft for r in self.served],
            "tpot_ms": [
                1e3 * (r.ended_s - r.first_token_s) / (r.output_tokens - 1)
                for r in self.served
                if r.output_tokens > 1
            ],
            "latency_ms": [1e3 * r.latency for r in self.served],
        }
        duration = max(self.duration_s, 1e-9)
        return {
            **{name: distribution(values) for name, values in milliseconds.items()},
            "requests": len(self.served),
            "hit_ratio": self.hit_ratio,
            "cached_tokens": self.cached_tokens,
            "tokens_in": self.prompt_tokens,
            "tokens_out": tokens_out,
            "duration_s": self.duration_s,
            "requests_per_second": len(self.served) / duration,
            "tokens_in_per_second": self.prompt_tokens / duration,
            "tokens_out_per_second": tokens_out / duration,
            "busy_share": self.busy_share,
            "busiest_share": self.busiest_share,
            **self.counters,
            "simulator_cpu_s": self.cpu_s,
            "simulator_requests_per_cpu_second": len(self.served) / max(self.cpu_s, 1e-9),
        }


def _counters(engine: DynamicInferenceEngine) -> dict[str, int]:
    stats = engine.stats()
    names = (
        "steps",
        "prefill_tokens",
        "recomputed_tokens",
        "pauses",
        "evictions",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "prefix_cache_evictions",
        "prefix_cache_lost_no_state",
        "prefix_cache_lost_evicted",
        "prefix_cache_snapshots",
        "prefix_cache_snapshot_hits",
        "prefix_cache_snapshot_evictions",
    )
    return {name: int(stats[name]) for name in names}


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
