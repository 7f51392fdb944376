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
STATISTICS = ("p50", "p99")
WIDTH = 10


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
    """A table of all latencies, a line for each setting, so that settings compare at a glance.

    Args:
        figures: what `summarize` returns, with the settings; see `setting_cells`.
    """
    shown = [(key, name) for key in METRICS for name in STATISTICS]
    head, *labels = setting_cells(figures)
    titles = "".join(f"{title:>{WIDTH * len(STATISTICS)}}" for title in METRICS.values())
    top = " " * len(head) + titles
    lines = [top, head + "".join(f"{n:>{WIDTH}}" for _, n in shown)]
    for label, row in zip(labels, figures, strict=True):
        cells = (row[key][name] for key, name in shown)
        values = "".join(f"{math.nan if cell is None else cell:>{WIDTH}.2f}" for cell in cells)
        lines.append(label + values)
    return lines


def setting_cells(figures: Sequence[dict[str, Any]]) -> list[str]:
    """The first columns of a table: its title, then one for each of `figures`: their "rate" and
    "lookahead", and "target_tpot_ms" where one has a target."""
    columns = {"rate": "  rate/s", "lookahead": " lookahead", "target_tpot_ms": " target ms"}
    if all(row.get("target_tpot_ms") is None for row in figures):
        del columns["target_tpot_ms"]
    lines = ["".join(columns.values())]
    for row in figures:
        cells = {key: "-" if row[key] is None else f"{row[key]:g}" for key in columns}
        lines.append("".join(f"{cells[key]:>{len(title)}}" for key, title in columns.items()))
    return lines
