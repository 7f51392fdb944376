"""Named ranges: one call marks a stage for NVTX and for the step timeline.

The stages are `step`, `schedule`, `prepare_step`, `transfer_bookkeeping_to_gpu`, `launch_step`,
`forward_pass`, `sampling`, `transfer_samples_to_cpu` (where samples are copied), `resolve`,
`update_requests` and `emit`. On a GPU the ranges are NVTX ranges of the launching thread, and the
timeline's device lane comes from timed events; on a CPU device the stages really run on the
stream's thread, so their ranges are the device lane.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

import torch

from megatron_async.devices import Device, Event, Stream
from megatron_async.devices.cpu import current_stream_name
from megatron_async.observe.timeline import Span, Timeline

_LANES = {None: "cpu", "compute": "device", "copy": "copy"}


class _NoRange:
    """Costs nothing when nobody looks."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NO_RANGE = _NoRange()


class _Range:
    __slots__ = ("_name", "_start", "_step", "_tracer")

    def __init__(self, tracer: Tracer, name: str, step: int) -> None:
        self._tracer, self._name, self._step = tracer, name, step

    def __enter__(self) -> None:
        if self._tracer.nvtx:
            torch.cuda.nvtx.range_push(self._name)
        self._start = time.perf_counter_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        timeline = self._tracer.timeline
        if timeline is not None:
            lane = _LANES[current_stream_name()]
            start, end = self._start / 1e3, time.perf_counter_ns() / 1e3
            timeline.add(Span(lane, self._name, self._step, start, end))
        if self._tracer.nvtx:
            torch.cuda.nvtx.range_pop()


class Tracer:
    """Source of named ranges for one engine.

    Args:
        device: the engine's device.
        timeline: where spans go, or None to keep none.
    """

    def __init__(self, device: Device, timeline: Timeline | None = None) -> None:
        self._device = device
        self.nvtx = device.torch_device.type == "cuda"
        self.timeline = timeline
        self._pending: list[tuple[Callable[[Span], None], str, int, Event, Event]] = []

    def range(self, name: str, step: int = -1) -> _Range | _NoRange:
        """A context manager around one stage."""
        if self.nvtx or self.timeline is not None:
            return _Range(self, name, step)
        return _NO_RANGE

    def note(self, name: str, step: int) -> None:
        """Note a moment of the host's in the timeline, if there is one."""
        if self.timeline is not None:
            now = self.timeline.now_us()
            self.timeline.add(Span("cpu", name, step, now, now))

    def mark(self, stream: Stream, step: int) -> Event | None:
        """A timed event here in the stream, when a timeline wants the device lane of a GPU (and not
        while a graph is captured, which belongs to no step)."""
        if self.timeline is None or not self.nvtx or step < 0:
            return None
        return self.timed_event(stream)

    def timed_event(self, stream: Stream) -> Event:
        """A timed event here in the stream, on any device; recorded by the host's thread."""
        event = self._device.event(timing=True)
        stream.record(event)
        return event

    def device_span(
        self,
        name: str,
        step: int,
        start: Event | None,
        end: Event | None,
        sink: Callable[[Span], None] | None = None,
    ) -> None:
        """Note a span of the device lane between two marks; read once the events are reached, and
        then given to `sink`, or to the timeline."""
        if sink is None and self.timeline is not None:
            sink = self.timeline.add
        if start is not None and end is not None and sink is not None:
            self._pending.append((sink, name, step, start, end))

    def collect(self) -> None:
        """Hand on the device spans that are complete; waits for nothing."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        for noted in pending:
            sink, name, step, start, end = noted
            if end.query():
                begin = start.time_us()
                sink(Span("device", name, step, begin, begin + end.us_since(start)))
            else:
                self._pending.append(noted)
