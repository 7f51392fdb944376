"""How long the device idled before each step, as a histogram in SVG with logarithmic bins.

Colours are classes; the page that holds the picture defines them for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from megatron_async.profiling.benchmark_record import distribution
from megatron_async.profiling.step_gap_files import time_text
from megatron_async.profiling.step_gaps import StepGap

WIDTH, HEIGHT = 1120, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 44
BINS_PER_DECADE = 6
SHORTEST_US = 0.1
"""Shorter gaps, and none at all, are counted here."""
LABEL = 140
"""Room for a percentile's label."""
MARKS = {"median": "p50", "99 %": "p99"}


def gap_histogram(gaps: Sequence[StepGap]) -> str:
    """An SVG element `WIDTH` wide. Steps that were launched ahead are told apart from those for
    which the CPU was late.

    Args:
        gaps: at least one.
    """
    return "\n".join(_Histogram(gaps).elements())


class _Histogram:
    def __init__(self, gaps: Sequence[StepGap]) -> None:
        self._times = sorted(max(gap.gap_us, SHORTEST_US) for gap in gaps)
        self._percentiles = distribution(self._times)
        # Whole decades, so that ticks stand at bin borders.
        self._first = math.floor(math.log10(self._times[0]))
        self._last = max(math.ceil(math.log10(self._times[-1]) + 1e-9), self._first + 1)
        bins = (self._last - self._first) * BINS_PER_DECADE
        self._ahead, self._late = [0] * bins, [0] * bins
        for gap in gaps:
            decades = math.log10(max(gap.gap_us, SHORTEST_US)) - self._first
            number = min(int(decades * BINS_PER_DECADE), bins - 1)
            (self._ahead if gap.is_launched_ahead else self._late)[number] += 1
        highest = max(a + b for a, b in zip(self._ahead, self._late, strict=True))
        self._tick = max(_round_step(highest / 4), 1.0)
        self._top = math.ceil(highest / self._tick) * self._tick

    def elements(self) -> Iterator[str]:
        """The picture, line by line."""
        yield (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="histogram of {len(self._times)} gaps">'
        )
        yield from self._axes()
        for number, (ahead, late) in enumerate(zip(self._ahead, self._late, strict=True)):
            yield from self._column(number, ahead, late)
        yield from self._marks()
        yield "</svg>"

    def _x(self, decades: float) -> float:
        share = (decades - self._first) / (self._last - self._first)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def _y(self, count: float) -> float:
        return HEIGHT - BOTTOM - count / self._top * (HEIGHT - TOP - BOTTOM)

    def _edge(self, number: int) -> float:
        return self._first + number / BINS_PER_DECADE

    def _column(self, number: int, ahead: int, late: int) -> Iterator[str]:
        left, right = self._x(self._edge(number)) + 1, self._x(self._edge(number + 1)) - 1
        span = f"{_edge_text(self._edge(number))} to {_edge_text(self._edge(number + 1))}"
        parts = (("ahead", ahead, 0, "launched ahead"), ("late", late, ahead, "launched late"))
        for kind, count, below, name in parts:
            if count:
                top, bottom = self._y(below + count), self._y(below)
                yield (
                    f'<rect class="column-{kind}" x="{left:.1f}" y="{top:.1f}" '
                    f'width="{right - left:.1f}" height="{max(bottom - top, 1):.1f}">'
                    f"<title>{span}: {count} steps, {name}</title></rect>"
                )

    def _axes(self) -> Iterator[str]:
        for number in range(round(self._top / self._tick) + 1):
            y = self._y(number * self._tick)
            kind = "grid" if number else "axis"
            yield f'<path class="{kind}" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
            label = f"{number * self._tick:.0f}"
            yield f'<text class="tick end" x="{LEFT - 8}" y="{y + 4:.1f}">{label}</text>'
        for decade in range(self._first, self._last + 1):
            x = self._x(decade)
            # The outermost labels stay inside the picture.
            anchor = " end" if decade == self._last else ""
            y = HEIGHT - BOTTOM + 18
            yield f'<path class="axis" d="M{x:.1f} {HEIGHT - BOTTOM}v5"/>'
            yield f'<text class="tick{anchor}" x="{x:.1f}" y="{y}">{_edge_text(decade)}</text>'
        middle = (LEFT + WIDTH - RIGHT) / 2
        yield f'<text class="tick" x="{middle}" y="{HEIGHT - 6}">device idle before a step</text>'
        yield f'<text class="tick start" x="0" y="{TOP - 20}">steps</text>'

    def _marks(self) -> Iterator[str]:
        """Lines at the percentiles. Labels of lines that are close go to either side, and at the
        picture's edge, where both have to go to the same side, to two rows."""
        labels: list[tuple[float, str]] = []
        for (name, key), side in zip(MARKS.items(), ("end", "start"), strict=True):
            time = self._percentiles[key]
            assert time is not None  # there is a gap
            x = self._x(math.log10(time))
            side = "start" if side == "end" and x < LEFT + LABEL else side
            side = "end" if side == "start" and x > WIDTH - RIGHT - LABEL else side
            is_taken = any(there == side and abs(x - other) < LABEL for other, there in labels)
            labels.append((x, side))
            shift = -6 if side == "end" else 6
            y = TOP - 3 - (14 if is_taken else 0)
            yield f'<path class="mark" d="M{x:.1f} {y - 9}V{HEIGHT - BOTTOM}"/>'
            label = f"{name} {time_text(time, 'µs')}"
            yield f'<text class="mark-name {side}" x="{x + shift:.1f}" y="{y}">{label}</text>'


def _round_step(length: float) -> float:
    """The next larger of 1, 2, 5, 10, 20, ... (times a power of ten)."""
    power = 10.0 ** math.floor(math.log10(length))
    return next(f * power for f in (1.0, 2.0, 5.0, 10.0) if f * power >= length * (1 - 1e-9))


def _edge_text(decades: float) -> str:
    """A bin's border; powers of ten without decimals."""
    return time_text(10**decades, "µs").replace(".00 ", " ").replace(".0 ", " ")
