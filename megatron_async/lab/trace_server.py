"""Serve an arrival trace in real time, and note when what happened to each request.

Every time is counted from the moment the trace says the request arrives, not from when the loop
came round to adding it: while a step is waited for, nobody adds requests, and that wait is the
engine's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_async.lab.arrival_trace import TraceRequest
from megatron_async.lab.benchmark_record import distribution
from megatron_async.lab.workloads import greedy
from megatron_async.requests.inference_request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
)

if TYPE_CHECKING:
    from megatron_async.engine.dynamic_engine import DynamicInferenceEngine

SPIN_S = 5e-4
"""An idle loop wakes up this long before an arrival, because a sleep may take longer than asked."""


@dataclass(frozen=True)
class ServedRequest:
    """What became of one request; seconds, all from its arrival by the trace."""

    queue_s: float
    """Until it was given a slot."""
    ttft_s: float
    """Until its first token was on the host."""
    latency_s: float
    """Until its last token was on the host."""
    prompt_tokens: int
    tokens: tuple[int, ...]
    """Generated."""

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each output token after the first; None where there is one only."""
        after_first = len(self.tokens) - 1
        return (self.latency_s - self.ttft_s) / after_first if after_first else None


@dataclass(frozen=True)
class ServedTrace:
    """A served trace."""

    requests: list[ServedRequest]
    """In the trace's order."""
    duration_s: float
    """From the trace's start to the last request's end."""
    steps: int
    overlap_ratio: float
    """Overlap ratio of the steps of this trace."""
    mean_rows: float
    """Rows of a step."""
    most_waiting: int
    """Largest number of arrived requests without a slot, seen after a step."""
    mean_waiting: float
    """Mean number of waiting requests over steps."""
    late_s: float
    """Longest time between a request's arrival and the loop's adding it."""
    evictions: int
    pauses: int


@dataclass
class _Clock:
    """The trace's start on the two clocks in use."""

    perf: float = field(default_factory=time.perf_counter)
    """Clock of `arrival_time`, `ttft` and `latency`."""
    wall: float = field(default_factory=time.time)
    """Clock of events."""

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.perf


def serve_trace(
    engine: DynamicInferenceEngine,
    trace: Sequence[TraceRequest],
    on_finish: Callable[[int, int], None] | None = None,
) -> ServedTrace:
    """Serve a trace from now on, every request greedily to its full length.

    Args:
        engine: idle.
        trace: in order of arrival.
        on_finish: called with (requests finished, tokens generated) whenever some finished.

    Raises:
        RuntimeError: a request failed; it carries the request's error.
    """
    before, context = engine.stats(), engine.context
    counters = engine.statistics
    overlapped, first_steps = counters.overlapped_steps, counters.first_steps
    finished: dict[int, DynamicInferenceRequest] = {}
    waiting: list[int] = []
    late = 0.0
    added = 0
    clock = _Clock()
    while added < len(trace) or engine.has_unfinished_requests():
        now = clock.now()
        while added < len(trace) and trace[added].arrival_s <= now:
            late = max(late, now - trace[added].arrival_s)
            engine.add_request(added, trace[added].prompt, greedy(trace[added].output_tokens))
            added += 1
        if not engine.has_unfinished_requests():
            time.sleep(max(trace[added].arrival_s - clock.now() - SPIN_S, 0.0))
            continue
        if (left := engine.launching.seconds_left()) > 0:
            until = clock.now() + left
            if added < len(trace):
                until = min(until, trace[added].arrival_s)
            time.sleep(max(until - clock.now() - SPIN_S, 0.0))
            continue
        report = engine.step_modern()
        waiting.append(len(context.waiting))
        for request in report["finished_request_records"]:
            if request.error is not None:
                raise RuntimeError(f"request {request.request_id} failed") from request.error
            finished[request.request_id] = request
        if on_finish is not None and report["finished_request_records"]:
            tokens = counters.generated_tokens - int(before["generated_tokens"])
            on_finish(len(report["finished_request_records"]), tokens)
    duration = clock.now()
    after = engine.stats()
    steps = int(after["steps"] - before["steps"])
    served = [_times(finished[i], request, clock) for i, request in enumerate(trace)]
    return ServedTrace(
        requests=served,
        duration_s=duration,
        steps=steps,
        overlap_ratio=(counters.overlapped_steps - overlapped)
        / max(steps - (counters.first_steps - first_steps), 1),
        mean_rows=(after["rows"] - before["rows"]) / max(steps, 1),
        most_waiting=max(waiting, default=0),
        mean_waiting=statistics.fmean(waiting) if waiting else 0.0,
        late_s=late,
        evictions=int(after["evictions"] - before["evictions"]),
        pauses=int(after["pauses"] - before["pauses"]),
    )


def _times(request: DynamicInferenceRequest, planned: TraceRequest, clock: _Clock) -> ServedRequest:
    assert request.ttft is not None  # it completed
    assert request.latency is not None
    admitted = next(
        event.timestamp
        for event in request.events
        if event.type == DynamicInferenceEventType.ADD_CONTEXT
    )
    added = request.arrival_time - clock.perf - planned.arrival_s
    return ServedRequest(
        # The wall clock may be set in between.
        queue_s=max(admitted - clock.wall - planned.arrival_s, added),
        ttft_s=added + request.ttft,
        latency_s=added + request.latency,
        prompt_tokens=len(planned.prompt),
        tokens=tuple(request.generated_tokens),
    )


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
    """A table of all latencies, a line for each setting, so that settings compare at a glance."""
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
