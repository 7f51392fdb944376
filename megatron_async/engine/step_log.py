"""A log line every few steps, with the step's time on the device; and, in the timeline, the reason
why a step did not overlap.

Two events mark the step in the compute stream. The host does not wait for them: a later step writes
the line, once both are reached.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import NamedTuple

from megatron_async.devices import Event
from megatron_async.engine.listener import EngineListener
from megatron_async.observe.statistics import EngineStatistics
from megatron_async.observe.timeline import NO_OVERLAP, Span
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.planning.step_plan import StepPlan
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.traces import TraceLog, named

logger = logging.getLogger("megatron_async")


class _Counts(NamedTuple):
    """Counters of which a line tells the change."""

    steps: int
    first_steps: int
    overlapped: int
    tokens: int
    busy_s: float


class StepLog(EngineListener):
    """Writes the lines of `InferenceConfig.logging_step_interval`, and notes in the timeline.

    Args:
        context: of the engine; its occupancy is logged.
        statistics: of the engine.
        traces: of its requests; a line names those that are sampled.
    """

    def __init__(
        self, context: DynamicInferenceContext, statistics: EngineStatistics, traces: TraceLog
    ) -> None:
        self._interval = context.config.logging_step_interval
        self._context = context
        self._statistics = statistics
        self._traces = traces
        self._last = self._counts()
        self._start: Event | None = None
        if self._interval:
            # A GPU's first timed event sets its clock, which waits for it: better now.
            context.device.event(timing=True)

    def added(self, request: DynamicInferenceRequest) -> None:
        """Note in the timeline when a request with a trace came."""
        if request.traceparent:
            name = named(request.request_id, request.traceparent)
            self._context.tracer.note(name, self._context.next_step)

    def launching(self, plan: StepPlan) -> None:
        """Mark where a step's device work begins, if the step is due for a line."""
        if self._interval and (plan.step + 1) % self._interval == 0:
            self._start = self._context.tracer.timed_event(self._context.device.compute)

    def launched(self, plan: StepPlan | None) -> None:
        """Mark where it ends: the step is launched and counted. The line follows later."""
        if plan is None:
            return
        reason = self._statistics.last_reason
        if reason is not None:
            self._context.tracer.note(f"{NO_OVERLAP}{reason}", plan.step)
        start, self._start = self._start, None
        if start is None:
            return
        context, before, now = self._context, self._last, self._counts()
        self._last = now
        could_overlap = now.steps - before.steps - (now.first_steps - before.first_steps)
        ratio = (now.overlapped - before.overlapped) / could_overlap if could_overlap else 1.0
        busy_s = now.busy_s - before.busy_s
        total = context.blocks.total
        figures = (
            plan.num_rows,
            (now.tokens - before.tokens) / busy_s if busy_s else 0.0,
            ratio,
            f"{context.max_requests - context.slots.num_free}/{context.max_requests}",
            f"{total - context.blocks.allocatable}/{total}",
            len(context.waiting),
            self._traces.names(),
        )
        end = context.tracer.timed_event(context.device.compute)
        write = partial(_write, figures)
        context.tracer.device_span("logged_step", plan.step, start, end, write)

    def _counts(self) -> _Counts:
        counts = self._statistics
        return _Counts(
            counts.steps,
            counts.first_steps,
            counts.overlapped_steps,
            counts.generated_tokens,
            counts.busy_s,
        )


def _write(figures: tuple[object, ...], span: Span) -> None:
    """Log one step: its own figures, and rates since the line before."""
    logger.info(
        "step %d: device %.2f ms, %d rows, %.0f tokens/s, overlap %.2f, slots %s, KV blocks %s, "
        "%d waiting%s",
        span.step,
        (span.end_us - span.start_us) / 1e3,
        *figures,
    )
