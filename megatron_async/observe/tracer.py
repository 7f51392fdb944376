"""Named ranges: one call marks a stage for NVTX and for the step timeline.

With `InferenceConfig.nvtx` the thread that does the work pushes NVTX ranges. What a thread does for
one step lies in a range that names the step, such as `Decode step 12 rows 64` (`Tracer.of_step`).
The timeline's device lane comes from timed events on a GPU; on a CPU device the stages really run
on the stream's thread, so their ranges are the device lane. docs/observing.md lists the stages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import torch

from megatron_async.devices import Device, Event, Stream
from megatron_async.devices.cpu import current_stream_name
from megatron_async.errors import ConfigurationError
from megatron_async.observe.timeline import Span, Timeline

PARTS = "forward_pass", "sampling", "feed_back", "drafting"
"""Parts of a step that a graph captures, in their order, and whose ends are marked."""
_LANES = {None: "cpu", "compute": "device", "copy": "copy"}


class NamedStep(Protocol):
    """A step by its name."""

    @property
    def step(self) -> int:
        """Number of the step."""

    @property
    def kind(self) -> str:
        """Decode, Prefill, Mixed or Dummy."""

    @property
    def num_rows(self) -> int:
        """Rows of requests."""


class _NoRange:
    """Costs nothing when nobody looks: a `with` calls no function in Python, 12 times a step."""

    __enter__ = staticmethod(bool)
    __exit__ = staticmethod("".format)
    """Takes what a `with` gives, and returns what is false."""


_NO_RANGE = _NoRange()


class _Range:
    """A stage: a span of the timeline, and in NVTX a range of its thread."""

    __slots__ = ("_name", "_nvtx", "_start", "_step", "_timeline")

    def __init__(self, nvtx: bool, timeline: Timeline | None, name: str, step: int) -> None:
        self._nvtx, self._timeline, self._name, self._step = nvtx, timeline, name, step

    def __enter__(self) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_push(self._name)
        self._start = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        if self._timeline is not None:
            lane = _LANES[current_stream_name()]
            start, end = self._start / 1e3, time.perf_counter_ns() / 1e3
            self._timeline.add(Span(lane, self._name, self._step, start, end))
        if self._nvtx:
            torch.cuda.nvtx.range_pop()


class _Thread(threading.local):
    step: tuple[Tracer, int] | None = None
    """Tracer and step of this thread's innermost `_StepRange`."""
    awaits = False
    """Whether an `_AwaitedStage` is pushed on this thread."""


_thread = _Thread()


class _StepRange:
    """One thread's work for one step. Inside a range of the same step nothing is pushed."""

    __slots__ = ("_before", "_step", "_text")

    def __init__(self, tracer: Tracer, step: int, text: str) -> None:
        self._step, self._text = (tracer, step), text

    def __enter__(self) -> None:
        self._before = _thread.step
        if self._before != self._step:
            torch.cuda.nvtx.range_push(self._text)
        _thread.step = self._step

    def __exit__(self, *_: object) -> None:
        _thread.step = self._before
        if self._before != self._step:
            torch.cuda.nvtx.range_pop()


class _AwaitedStage:
    """A stage of a step in which other coroutines use the thread. Of those that are open at once
    the first is pushed; the others may end in any order, so they are ranges of the process."""

    __slots__ = ("_id", "_name", "_of_step", "_step", "_tracer", "_within")

    def __init__(self, tracer: Tracer, name: str, step: int, of_step: _StepRange) -> None:
        self._tracer, self._name, self._step, self._of_step = tracer, name, step, of_step

    def __enter__(self) -> None:
        self._id: int | None = None
        if _thread.awaits:
            self._id = torch.cuda.nvtx.range_start(self._name)
        else:
            _thread.awaits = True
            self._of_step.__enter__()
        is_pushed = self._id is None
        self._within = _Range(is_pushed, self._tracer.timeline, self._name, self._step)
        self._within.__enter__()

    def __exit__(self, *_: object) -> None:
        self._within.__exit__()
        if self._id is not None:
            torch.cuda.nvtx.range_end(self._id)
        else:
            self._of_step.__exit__()
            _thread.awaits = False


class _DeviceStage:
    """A part of a step's device work: a range, a span of the device lane, and a mark at its end."""

    __slots__ = ("_name", "_range", "_start", "_step", "_stream", "_tracer")

    def __init__(self, tracer: Tracer, name: str, step: int, stream: Stream) -> None:
        self._tracer, self._name, self._step, self._stream = tracer, name, step, stream
        self._range = tracer.range(name, step)

    def __enter__(self) -> None:
        self._start = self._tracer.mark(self._stream, self._step)
        self._range.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tracer = self._tracer
        if kind is None and tracer.nvtx and self._name in PARTS:
            tracer.mark_end(self._name)
        self._range.__exit__()
        if kind is None:
            end = tracer.mark(self._stream, self._step)
            tracer.device_span(self._name, self._step, self._start, end)


class Tracer:
    """Source of named ranges for one engine.

    Args:
        device: the engine's device.
        timeline: where spans go, or None to keep none.
        nvtx: push NVTX ranges, and mark where the parts of captured steps end.

    Raises:
        ConfigurationError: this torch has no NVTX.
    """

    def __init__(
        self, device: Device, timeline: Timeline | None = None, nvtx: bool = False
    ) -> None:
        if nvtx and not hasattr(torch._C, "_nvtx"):
            raise ConfigurationError(
                f"nvtx=True needs a CUDA build of torch, and torch {torch.__version__} is none: "
                "install one (it runs without a GPU too), or leave nvtx out."
            )
        self._device = device
        self._is_gpu = device.torch_device.type == "cuda"
        self.nvtx = nvtx
        self.timeline = timeline
        self._pending: list[tuple[Callable[[Span], None], str, int, Event, Event]] = []

    def range(self, name: str, step: int = -1) -> _Range | _NoRange:
        """A context manager around one stage. What belongs to no step (-1), such as a graph's
        capture, has no range."""
        if step >= 0 and (self.nvtx or self.timeline is not None):
            return _Range(self.nvtx, self.timeline, name, step)
        return _NO_RANGE

    def awaited(self, name: str, plan: NamedStep) -> _AwaitedStage | _Range | _NoRange:
        """`of_step` and `range` around an `await`: other coroutines go on inside."""
        of_step = self.of_step(plan)
        if isinstance(of_step, _StepRange):
            return _AwaitedStage(self, name, plan.step, of_step)
        return self.range(name, plan.step)

    def call(self, step: int) -> _Range | _NoRange:
        """`range` around a call of the loop, for the timeline alone: the call launches `step`, but
        resolves another one."""
        return _NO_RANGE if self.timeline is None else _Range(False, self.timeline, "step", step)

    def of_step(self, plan: NamedStep) -> _StepRange | _NoRange:
        """An NVTX range around what this thread does for one step: its kind, number and rows."""
        if not self.nvtx:
            return _NO_RANGE
        return _StepRange(self, plan.step, f"{plan.kind} step {plan.step} rows {plan.num_rows}")

    def planning(self, step: int) -> _StepRange | _NoRange:
        """`of_step` of a step whose kind is not known before it is planned."""
        return _StepRange(self, step, f"Plan step {step}") if self.nvtx else _NO_RANGE

    def stage(self, name: str, step: int, stream: Stream) -> _DeviceStage | _NoRange:
        """A context manager around a part of a step's work on `stream`: a range of the thread that
        launches it, a span of the device lane, and a mark in the stream where it ends."""
        if self.nvtx or self.timeline is not None:
            return _DeviceStage(self, name, step, stream)
        return _NO_RANGE

    def mark_end(self, stage: str) -> None:
        """Mark the end of a part of a step in the device's timeline: on a GPU by a kernel named for
        the part, which captured steps replay; on a CPU by an NVTX mark of the stream's thread."""
        if self._is_gpu:
            from megatron_async.ops.step_markers import launch_marker

            launch_marker(stage)
        else:
            torch.cuda.nvtx.mark(f"{stage}_ends")

    def note(self, name: str, step: int) -> None:
        """Note a moment of the host's in the timeline, if there is one."""
        if self.timeline is not None:
            now = self.timeline.now_us()
            self.timeline.add(Span("cpu", name, step, now, now))

    def mark(self, stream: Stream, step: int) -> Event | None:
        """A timed event here in the stream, when a timeline wants the device lane of a GPU (and not
        while a graph is captured, which belongs to no step)."""
        if self.timeline is None or not self._is_gpu or step < 0:
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
