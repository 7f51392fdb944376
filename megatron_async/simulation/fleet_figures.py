"""`FleetRun`: a trace that a simulated fleet has served, as figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_async.engines.dynamic_engine import DynamicInferenceEngine
from megatron_async.profiling.benchmark_record import distribution
from megatron_async.simulation.model_less import ModelLessEngine
from megatron_async.simulation.virtual_replica import Served


@dataclass(frozen=True)
class FleetRun:
    """A served trace, and what the engines have counted.

    Attributes:
        served: in order of arrival.
        duration_s: from the trace's start to the last request's end, virtual seconds.
        busy_share: of the replicas' time: their devices' steps.
        busiest_share: the same of the replica with most.
        counters: of all engines together, by the names of docs/statistics.md.
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
