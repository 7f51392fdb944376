"""One self-contained HTML page about a run's steps: pictures, tables, no network.

The lanes are drawn in the browser by the server page's `server/page/lanes.js`, which is copied in.
How long the device idled before each step is a histogram in SVG with logarithmic bins.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from megatron_async.lab.benchmark_record import distribution
from megatron_async.lab.step_gaps import (
    PERCENTILES,
    STAGES,
    GapReport,
    StepGap,
    device_text,
    did_in_gap,
    idle_text,
    time_text,
)
from megatron_async.observe.timeline import Timeline

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
    which the CPU was late."""
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


AROUND_GAP = 1.0
"""The window of the longest gap shows so many times its length on either side."""
LEAST_AROUND_US = 30.0
STEPS_AROUND = 2
"""The typical window shows so many steps on either side of its own."""


def profile_page(timeline: Timeline, report: GapReport, facts: Mapping[str, Any]) -> str:
    """The page as HTML."""
    package = files("megatron_async")
    template = package.joinpath("lab/profile_page.html").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    worst, typical = report.worst[0], report.typical
    return environment.from_string(template).render(
        facts=dict(facts),
        tiles=_tiles(report, facts),
        stages=list(STAGES.values()),
        worst={
            "step": worst.step,
            "length": _time(worst.gap_us),
            "cause": _cause(worst),
            "window": _spans(timeline, *gap_window(timeline, worst)),
        },
        typical={
            "step": typical.step,
            "length": _time(typical.gap_us),
            "window": _spans(timeline, *step_window(report, typical)),
        },
        gaps=len(report.gaps),
        not_counted=[*idle_text(report), *device_text(facts)],
        histogram=Markup(gap_histogram(report.gaps)),
        times=_times(report),
        rows=[_row(gap) for gap in report.worst],
        lanes=Markup(package.joinpath("server/page/lanes.js").read_text("utf-8")),
        width=WIDTH,
    )


def gap_window(timeline: Timeline, gap: StepGap) -> tuple[float, float]:
    """A window with the gap in the middle: begin and end, microseconds. It ends where the timeline
    does."""
    around = max(AROUND_GAP * gap.gap_us, LEAST_AROUND_US)
    first = min(span.start_us for span in timeline.spans)
    last = max(span.end_us for span in timeline.spans)
    return max(gap.start_us - gap.gap_us - around, first), min(gap.start_us + around, last)


def step_window(report: GapReport, gap: StepGap) -> tuple[float, float]:
    """A window of a few steps around one: begin and end, microseconds."""
    near = [other for other in report.gaps if abs(other.step - gap.step) <= STEPS_AROUND]
    # Not beyond a time in which there was nothing to do.
    first = max((g.start_us for g in report.after_idle if g.step <= gap.step), default=-math.inf)
    last = min((g.start_us for g in report.after_idle if g.step > gap.step), default=math.inf)
    near = [other for other in near if first < other.start_us < last]
    return near[0].start_us - near[0].gap_us, near[-1].start_us + near[-1].device_us


def _spans(timeline: Timeline, start_us: float, end_us: float) -> dict[str, Any]:
    """What `windowPicture` draws: spans that reach into the window, and the device's next ones."""
    device = sorted(timeline.select("device", "device_step").values(), key=lambda s: s.start_us)
    first = bisect(device, start_us, key=lambda span: span.end_us)
    last = bisect(device, end_us, key=lambda span: span.start_us)
    shown = device[max(first - 1, 0) : last + 1]
    shown += [
        span
        for span in timeline.spans
        if span.lane == "cpu" and span.start_us < end_us and span.end_us > start_us
    ]
    spans = [
        (int(s.lane == "device"), s.name, s.step, s.start_us, s.end_us - s.start_us) for s in shown
    ]
    return {"spans": spans, "start": start_us, "end": end_us}


def _time(microseconds: float) -> str:
    return time_text(microseconds, "µs")


def _tiles(report: GapReport, facts: Mapping[str, Any]) -> dict[str, str]:
    gap, device = report.gap_us(), report.device_us()
    cpu = [us for stage, us in report.cpu_us().items() if stage != "wait"]
    return {
        "step, median": _time(device["p50"] or 0.0),
        "gap, median": _time(gap["p50"] or 0.0),
        "gap, 99 %": _time(gap["p99"] or 0.0),
        "longest gap": _time(report.worst[0].gap_us),
        "device busy": f"{report.busy_share:.2%}",
        "launched ahead": f"{report.launched_ahead_share:.1%}",
        "CPU work a step": _time(sum(us["mean"] or 0.0 for us in cpu)),
    }


def _times(report: GapReport) -> dict[str, list[str]]:
    rows = {"device idle before it": report.gap_us(), "on the device": report.device_us()}
    rows |= {f"CPU: {stage}": values for stage, values in report.cpu_us().items()}
    return {name: [_time(us[p] or 0.0) for p in PERCENTILES] for name, us in rows.items()}


def _cause(gap: StepGap) -> str:
    if gap.is_launched_ahead:
        text = (
            "The CPU was in time: the step was launched before the one before it had ended, and "
            "the gap is the device's own"
        )
    elif gap.no_overlap is not None:
        text = f"The step was launched with nothing in flight ({gap.cause})"
    else:
        text = "The CPU was late: the step was launched after the one before had ended"
    did = did_in_gap(gap, "µs")
    return f"{text}. In the gap the CPU did: {did}" if did else text


def _row(gap: StepGap) -> dict[str, Any]:
    return {
        "step": gap.step,
        "gap": _time(gap.gap_us),
        "device": _time(gap.device_us),
        "is_late": not gap.is_launched_ahead,
        "cause": gap.cause,
        "did": did_in_gap(gap, "µs"),
    }
