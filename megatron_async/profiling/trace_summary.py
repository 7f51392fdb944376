"""A served trace as figures, and the figures as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_async.profiling.benchmark_record import distribution
from megatron_async.profiling.trace_server import ServedTrace

METRICS = {
    "queue_ms": "queue ms",
    "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms",
    "latency_ms": "latency ms",
}
STATISTICS = ("mean", "p50", "p90", "p99")


def summarize(served: ServedTrace) -> dict[str, Any]:
    """Figures of a served trace, JSON-ready; units stand in the names."""
    requests = served.requests
    seconds = {
        "queue_ms": [r.queue_s for r in requests],
        "ttft_ms": [r.ttft_s for r in requests],
        "tpot_ms": [r.tpot_s for r in requests if r.tpot_s is not None],
        "latency_ms": [r.latency_s for r in requests],
    }
    tokens_in = sum(r.prompt_tokens for r in requests)
    tokens_out = sum(len(r.tokens) for r in requests)
    return {
        **{name: distribution(1e3 * s for s in values) for name, values in seconds.items()},
        "duration_s": served.duration_s,
        "requests_per_second": len(requests) / served.duration_s,
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "tokens_in_per_second": tokens_in / served.duration_s,
        "tokens_out_per_second": tokens_out / served.duration_s,
        "most_waiting": served.most_waiting,
        "mean_waiting": served.mean_waiting,
        "late_ms": served.late_s * 1e3,
        "steps": served.steps,
        "mean_rows": served.mean_rows,
        "overlap_ratio": served.overlap_ratio,
        "evictions": served.evictions,
        "pauses": served.pauses,
    }


def latency_lines(figures: Sequence[dict[str, Any]]) -> list[str]:
    """A table of all latencies, a line for each metric and figure; `figures` carry "rate" and
    "lookahead" beside what `summarize` returns."""
    head = f"{'rate/s':>8}{'lookahead':>10}  {'':<12}"
    lines = [head + "".join(f"{name:>11}" for name in STATISTICS)]
    for metric, title in METRICS.items():
        for row in figures:
            cells = (row[metric][name] for name in STATISTICS)
            values = "".join(f"{math.nan if cell is None else cell:>11.2f}" for cell in cells)
            lines.append(f"{row['rate']:>8g}{row['lookahead']:>10}  {title:<12}{values}")
    return lines
