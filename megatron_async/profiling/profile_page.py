"""One self-contained HTML page about a run's steps: pictures, tables, no network.

The lanes are drawn in the browser by the page of the server (`server/page/lanes.js`, copied in).
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from megatron_async.observe.timeline import Timeline
from megatron_async.profiling.gap_histogram import WIDTH, gap_histogram
from megatron_async.profiling.step_gap_files import (
    PERCENTILES,
    device_text,
    did_in_gap,
    idle_text,
    time_text,
)
from megatron_async.profiling.step_gaps import STAGES, GapReport, StepGap

AROUND_GAP = 1.0
"""The window of the longest gap shows so many times its length on either side."""
LEAST_AROUND_US = 30.0
STEPS_AROUND = 2
"""The typical window shows so many steps on either side of its own."""


def profile_page(timeline: Timeline, report: GapReport, facts: Mapping[str, Any]) -> str:
    """The page as HTML.

    Args:
        timeline: of the run.
        report: its gaps.
        facts: what was run; "model" and "workload" among them.
    """
    package = files("megatron_async")
    template = package.joinpath("profiling/profile_page.html").read_text("utf-8")
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
