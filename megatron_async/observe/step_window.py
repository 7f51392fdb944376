"""`StepWindow`: a timeline of the next few steps, which then removes itself from the engine.

Somebody who watches an engine needs a picture a few times a second, not all steps: the cost of
spans falls on few steps of many.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_async.observe.timeline import Span, Timeline

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
