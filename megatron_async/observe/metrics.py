"""Prometheus metrics of an engine, read when they are scraped: the step path pays nothing.

Names follow Prometheus' conventions: prefix `megatron_async_`, base units (seconds), `_total` on
counters. docs/observing.md lists them beside the names of `engine.stats()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from megatron_async.observe.draft_statistics import DraftStatistics
from megatron_async.observe.metrics_server import MetricsServer
from megatron_async.observe.statistics import (
    BOUNDS_NS,
    BUCKETS_PER_OCTAVE,
    CountedEngine,
    TimeHistogram,
)

PREFIX = "megatron_async_"

COUNTERS = {
    "steps": "Steps launched.",
    "dummy_steps": "Steps launched without rows, for the experts of this rank.",
    "overlapped_steps": "Steps launched before the step before them was resolved.",
    "captured_steps": "Steps that replayed a graph.",
    "late_steps": "Steps with running requests that took longer than target_tpot_ms.",
    "late_launches": "Launches before which the device had run out of work, with late_launch.",
    "slow_launches": "Launches that took the engine's thread more than 1 ms.",
    "slow_launch_seconds": "Seconds of them.",
    "agreement_seconds": "Seconds in which ranks that share experts agreed on a step's shape.",
    "zombie_steps": "Resolved steps of which all rows were zombies.",
    "discarded_steps": "Steps launched, taken back and launched again (policy rollback).",
    "discarded_rows": "Their rows.",
    "failed_steps": "Steps whose own work raised.",
    "rows": "Rows of all steps.",
    "zombie_rows": "Rows computed for a request that had ended, and dropped.",
    "generated_tokens": "Tokens generated.",
    "prefill_tokens": "Tokens prefilled, recomputed ones included.",
    "recomputed_tokens": "Tokens that evictions took from the cache and that are prefilled again.",
    "finished_in_drafted_rows": "Requests that completed in a row that verified drafts.",
    "pauses": "Times a request sat out for want of a KV block.",
    "evictions": "Times a paused request lost its blocks.",
    "prefix_cache_queries": "Tokens of admitted requests, looked up in the prefix cache.",
    "prefix_cache_hits": "Of these, tokens that were found.",
    "prefix_cache_lost_no_state": "Of these, tokens with KV, but no recurrent state.",
    "prefix_cache_lost_evicted": "Of these, tokens in blocks that were there once.",
    "prefix_cache_evictions": "Blocks of the prefix cache that were handed out anew.",
    "prefix_cache_snapshot_hits": "Requests that began from a snapshot of recurrent states.",
    "prefix_cache_snapshot_evictions": "Snapshots whose place was handed out anew.",
    "engine_pauses": "Times the engine was paused.",
    "engine_suspends": "Times the engine was suspended.",
    "busy_seconds": "Wall time in steps while there was work.",
}
"""Metric -> help; names are those of `engine.stats()`."""

GAUGES = {
    "lookahead": "Steps that may be in flight while the next is prepared.",
    "prefill_limit": "Most prompt tokens of a step with running requests.",
    "waiting_requests": "Requests without a slot.",
    "slots": "Slots: requests served at once.",
    "slots_in_use": "Slots held by requests.",
    "slots_in_use_peak": "Most slots held at once so far.",
    "kv_blocks": "KV blocks in the pool.",
    "prefix_cache_blocks": "KV blocks that no request holds, kept for what they hold.",
    "prefix_cache_snapshots": "Snapshots of recurrent states that are kept.",
    "kv_blocks_in_use": "KV blocks held by requests.",
    "kv_blocks_in_use_peak": "Most KV blocks held at once so far.",
}


class EngineCollector(Collector):
    """All metrics of one engine, for a registry of prometheus_client.

    A scrape reads the engine's counters from another thread, without a lock: each number is right,
    but two of them may be a step apart.
    """

    def __init__(self, engine: CountedEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        engine, statistics = self._engine, self._engine.statistics
        stats = engine.stats()
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, stats[name])
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, stats[name])
        yield GaugeMetricFamily(
            PREFIX + "steps_in_flight", "Steps launched and not resolved.", len(engine.in_flight)
        )

        reasons = CounterMetricFamily(
            PREFIX + "no_overlap_steps",
            "Steps launched with nothing in flight, by reason.",
            labels=["reason"],
        )
        for reason, count in statistics.no_overlap.items():
            reasons.add_metric([reason], count)
        yield reasons

        yield from _drafts(statistics.drafts)

        requests = CounterMetricFamily(
            PREFIX + "requests", "Requests that ended, by outcome.", labels=["outcome"]
        )
        aborted = stats["aborted_requests"]
        requests.add_metric(["completed"], stats["finished_requests"])
        requests.add_metric(["failed"], stats["failed_requests"] - aborted)
        requests.add_metric(["aborted"], aborted)
        yield requests

        stages = HistogramMetricFamily(
            PREFIX + "stage_cpu_seconds",
            "CPU time of the engine's thread in a stage of a step, waits not counted.",
            labels=["stage"],
        )
        for stage, times, total_ns in (
            ("prepare", statistics.prepare_times, statistics.prepare_ns),
            ("launch", statistics.launch_times, statistics.launch_ns),
            ("resolve", statistics.resolve_times, statistics.resolve_ns),
        ):
            stages.add_metric([stage], _buckets(times), total_ns / 1e9)
        yield stages
        step = HistogramMetricFamily(PREFIX + "step_seconds", "Wall time of a call of step.")
        step.add_metric([], _buckets(statistics.step_times), statistics.busy_s)
        yield step


def _drafts(statistics: DraftStatistics) -> Iterator[Metric]:
    """Drafts by their position in a row, and rows that had fewer, by reason."""
    for name, text, counts in (
        ("drafted_tokens", "Drafts that steps verified.", statistics.drafted),
        ("accepted_tokens", "Of these, those that plain decoding says.", statistics.accepted),
    ):
        metric = CounterMetricFamily(PREFIX + name, text, labels=["position"])
        for position, count in enumerate(counts, 1):
            metric.add_metric([str(position)], float(count))
        yield metric
    fewer = CounterMetricFamily(
        PREFIX + "fewer_drafts_rows",
        "Decode rows that verified fewer drafts than they could, by reason.",
        labels=["reason"],
    )
    for reason, rows in statistics.fewer_by_reason.items():
        fewer.add_metric([reason], rows)
    yield fewer


def _buckets(times: TimeHistogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound in seconds: one for each doubling, as scrapes should be
    small."""
    cumulative = list(accumulate(times.counts))
    octaves = zip(BOUNDS_NS[::BUCKETS_PER_OCTAVE], cumulative[::BUCKETS_PER_OCTAVE], strict=False)
    return [
        *((repr(bound / 1e9), float(count)) for bound, count in octaves),
        ("+Inf", cumulative[-1]),
    ]


def serve_metrics(engine: CountedEngine, port: int, host: str = "127.0.0.1") -> MetricsServer:
    """Serve an engine's metrics at `http://host:port/metrics` from a thread of its own.

    Args:
        engine: read at every scrape.
        port: 0 takes any that is free; see the result's `port`.
        host: address to listen at; "0.0.0.0" lets other machines scrape.

    Raises:
        ConfigurationError: the port is taken or not allowed.
    """
    return MetricsServer(EngineCollector(engine), port, host)
