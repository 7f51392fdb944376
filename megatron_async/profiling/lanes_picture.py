"""A window of the step timeline as an SVG picture: a CPU lane, a device lane, and the gaps.

Colours are classes; the page that holds the picture defines them for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from itertools import pairwise

from megatron_async.observe.timeline import Span, Timeline
from megatron_async.profiling.step_gap_files import time_text
from megatron_async.profiling.step_gaps import STAGES

WIDTH = 1120
LEFT, RIGHT = 64, 16
"""Room for the lanes' names, and for the last tick's."""
CALL_Y, CALL_HEIGHT = 8, 5
CPU_Y, DEVICE_Y, LANE_HEIGHT = 17, 77, 40
AXIS_Y = DEVICE_Y + LANE_HEIGHT + 24
HEIGHT = AXIS_Y + 26
LETTER = 6.7
"""Width of a letter, roughly; a text that would not fit its bar is left out."""
LEAST_WIDTH = 1.0
"""Narrower bars would not be seen."""
TICKS = 8


def lanes_picture(timeline: Timeline, start_us: float, end_us: float) -> str:
    """An SVG element `WIDTH` wide.

    Args:
        timeline: of an engine.
        start_us, end_us: the window, on the timeline's clock; the picture's axis begins at 0.
    """
    return "\n".join(_Picture(timeline, start_us, end_us).elements())


class _Picture:
    def __init__(self, timeline: Timeline, start_us: float, end_us: float) -> None:
        self._start, self._end = start_us, end_us
        self._scale = (WIDTH - LEFT - RIGHT) / (end_us - start_us)
        inside = [s for s in timeline.spans if s.start_us < end_us and s.end_us > start_us]
        self._cpu = [s for s in inside if s.lane == "cpu" and s.name in STAGES]
        self._calls = [s for s in inside if s.lane == "cpu" and s.name == "step"]
        device = timeline.select("device", "device_step").values()
        self._device = sorted(device, key=lambda span: span.start_us)

    def elements(self) -> Iterator[str]:
        """The picture, line by line."""
        yield (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="CPU and device over {time_text(self._end - self._start)}">'
        )
        for y, name in ((CPU_Y, "CPU"), (DEVICE_Y, "device")):
            middle = y + LANE_HEIGHT / 2 + 4
            yield f'<rect class="lane" {self._box(self._start, self._end, y, LANE_HEIGHT)}/>'
            yield f'<text class="lane-name" x="0" y="{middle}">{name}</text>'
        yield from self._axis()
        for before, span in pairwise(self._device):
            yield from self._gap(before.end_us, span.start_us)
        for call in self._calls:
            box = self._box(call.start_us, call.end_us, CALL_Y, CALL_HEIGHT)
            yield f'<rect class="call" {box} rx="2">{self._title("call of step", call)}</rect>'
        for span in self._cpu:
            short = STAGES[span.name]
            yield from self._bar(span, CPU_Y, f"stage-{short}", (f"{short} {span.step}", short))
        for number, span in enumerate(self._device):
            shade = f"device-{number % 2}"
            yield from self._bar(span, DEVICE_Y, shade, (f"step {span.step}", str(span.step)))
        yield "</svg>"

    def _x(self, time_us: float) -> float:
        return LEFT + (min(max(time_us, self._start), self._end) - self._start) * self._scale

    def _box(self, start_us: float, end_us: float, y: float, height: float) -> str:
        x = self._x(start_us)
        width = max(self._x(end_us) - x, LEAST_WIDTH)
        return f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}"'

    def _title(self, name: str, span: Span) -> str:
        length = time_text(span.end_us - span.start_us, "µs")
        begin = time_text(max(span.start_us - self._start, 0.0), "µs")
        return f"<title>{escape(name)} {span.step}: {length}, from {begin}</title>"

    def _bar(self, span: Span, y: float, kind: str, names: tuple[str, ...]) -> Iterator[str]:
        """A bar with the first of its names that fits; nothing outside the window."""
        if span.end_us <= self._start or span.start_us >= self._end:
            return
        box = self._box(span.start_us, span.end_us, y, LANE_HEIGHT)
        yield f'<rect class="bar {kind}" {box}>{self._title(span.name, span)}</rect>'
        left, right = self._x(span.start_us), self._x(span.end_us)
        for name in names:
            if len(name) * LETTER + 8 <= right - left:
                x, middle = (left + right) / 2, y + LANE_HEIGHT / 2 + 4
                text = f'<text class="on-{kind}" x="{x:.1f}" y="{middle}">{escape(name)}</text>'
                yield text
                return

    def _gap(self, start_us: float, end_us: float) -> Iterator[str]:
        """A band through both lanes where the device idles, with its length where that fits."""
        if end_us <= max(start_us, self._start) or start_us >= self._end:
            return
        height = DEVICE_Y + LANE_HEIGHT - CALL_Y
        length = time_text(end_us - start_us, "µs")
        yield (
            f'<rect class="gap" {self._box(start_us, end_us, CALL_Y, height)}>'
            f"<title>device idle for {length}</title></rect>"
        )
        left, right = self._x(start_us), self._x(end_us)
        label = f"idle {length}"
        if right - left >= 3:
            yield f'<path class="gap-edge" d="M{left:.1f} {AXIS_Y - 20}H{right:.1f}"/>'
        if right - left >= 24:
            half = len(label) * LETTER / 2
            x = min(max((left + right) / 2, LEFT + half), WIDTH - half)
            yield f'<text class="gap-length" x="{x:.1f}" y="{AXIS_Y - 7}">{label}</text>'

    def _axis(self) -> Iterator[str]:
        length = self._end - self._start
        tick = round_step(length / TICKS)
        yield f'<path class="axis" d="M{LEFT} {AXIS_Y}H{WIDTH - RIGHT}"/>'
        for number in range(int(length / tick * (1 + 1e-9)) + 1):
            x = self._x(self._start + number * tick)
            yield f'<path class="grid" d="M{x:.1f} {CALL_Y}V{AXIS_Y}"/>'
            label = _tick_text(number * tick, tick, length)
            yield f'<text class="tick" x="{x:.1f}" y="{AXIS_Y + 17}">{label}</text>'


def round_step(length: float) -> float:
    """The next larger of 1, 2, 5, 10, 20, ... (times a power of ten)."""
    power = 10.0 ** math.floor(math.log10(length))
    return next(f * power for f in (1.0, 2.0, 5.0, 10.0) if f * power >= length * (1 - 1e-9))


def _tick_text(time_us: float, tick: float, length: float) -> str:
    """All ticks of an axis in one unit, with the digits that tell them apart."""
    scale, unit = (1e6, "s") if length >= 2e6 else (1e3, "ms") if length >= 2e3 else (1.0, "µs")
    decimals = max(0, -math.floor(math.log10(tick / scale) + 1e-9))
    return f"{time_us / scale:.{decimals}f} {unit}" if time_us else "0"
