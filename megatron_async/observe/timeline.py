"""The in-process step timeline: spans on a CPU lane and a device lane, as Chrome/Perfetto JSON.

Open the file at https://ui.perfetto.dev or chrome://tracing.

`StepWindow`: a timeline of the next few steps, which then removes itself from the engine.

A watcher of an engine needs a picture a few times a second, not all steps: the cost of
spans falls on few steps of many.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MAX_SPANS = 1_000_000
"""Spans kept; a timeline is for looking at, not for logging a day."""

NO_OVERLAP = "no overlap: "
"""Begin of the name of a moment (a span without length) that says why a step did not overlap."""


class Span(NamedTuple):
    """One named range. Times are microseconds on `time.perf_counter_ns`'s clock."""

    lane: str
    """"cpu", "device" or "copy"."""
    name: str
    step: int
    """Step number, -1 where there is none."""
    start_us: float
    end_us: float


class Timeline:
    """Collects spans; appending is thread-safe (a list append is atomic)."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.dropped = 0

    def add(self, span: Span) -> None:
        """Keep a span, or count it as dropped once the timeline is full."""
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self.dropped += 1

    @staticmethod
    def now_us() -> float:
        """Now, on the clock of the spans."""
        return time.perf_counter_ns() / 1e3

    def since(self, start_us: float) -> Timeline:
        """A timeline of the spans that begin at `start_us` or later."""
        later = Timeline()
        later.spans = [span for span in self.spans if span.start_us >= start_us]
        later.dropped = self.dropped
        return later

    def select(self, lane: str, name: str) -> dict[int, Span]:
        """The spans of one lane and name, by step (the last one of a step)."""
        return {s.step: s for s in self.spans if s.lane == lane and s.name == name}

    def save(self, path: str | Path) -> None:
        """Write the timeline as Chrome trace JSON, times relative to its first span.

        Raises:
            OSError: it cannot be written; no part of it is left.
        """
        lanes = {lane: i for i, lane in enumerate(("cpu", "device", "copy"))}
        origin = min((span.start_us for span in self.spans), default=0.0)
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "megatron_async"}}
        ]
        for lane, tid in lanes.items():
            args = {"name": lane}
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": args})
        for span in self.spans:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.lane,
                    "pid": 0,
                    "tid": lanes[span.lane],
                    "ts": round(span.start_us - origin, 3),
                    "dur": round(span.end_us - span.start_us, 3),
                    "args": {"step": span.step},
                }
            )
        other = {"dropped_spans": self.dropped}
        path = Path(path)
        try:
            path.write_text(json.dumps({"traceEvents": events, "otherData": other}))
        except OSError as error:
            if path.is_file():
                path.unlink()
            raise OSError(error.errno, error.strerror, str(path)) from error


STEPS = 8
"""Steps of a window."""
MOST_SPANS = 64 * STEPS
"""Spans of a window; a step has about 12."""


class StepWindow(Timeline):
    """Collects the spans of `STEPS` steps.

    Args:
        full: called on the engine's thread after the last of them. (Spans of the device that come
            later are kept all the same.)
    """

    def __init__(self, full: Callable[[], None]) -> None:
        super().__init__()
        self._full = full
        self._steps_left = STEPS

    def add(self, span: Span) -> None:
        """Keep a span, or count it as dropped once the window has `MOST_SPANS`."""
        if len(self.spans) < MOST_SPANS:
            self.spans.append(span)
        else:
            self.dropped += 1
        if span.lane == "cpu" and span.name == "step":
            self._steps_left -= 1
            if not self._steps_left:
                self._full()
