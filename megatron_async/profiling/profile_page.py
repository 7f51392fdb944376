"""One self-contained HTML page about a run's steps: pictures, tables, no script, no network."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from megatron_async.profiling.gap_histogram import gap_histogram
from megatron_async.profiling.lanes_picture import lanes_picture
from megatron_async.profiling.step_gap_files import PERCENTILES, time_text
from megatron_async.profiling.step_gaps import STAGES, GapReport, StepGap
from megatron_async.profiling.timeline import Timeline

AROUND_GAP = 2.5
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
    template = files("megatron_async.profiling").joinpath("profile_page.html").read_text("utf-8")
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
            "picture": Markup(lanes_picture(timeline, *gap_window(worst))),
        },
        typical={
            "step": typical.step,
            "length": _time(typical.gap_us),
            "picture": Markup(lanes_picture(timeline, *step_window(report, typical))),
        },
        gaps=len(report.gaps),
        histogram=Markup(gap_histogram(report.gaps)),
        times=_times(report),
        rows=[_row(gap) for gap in report.worst],
    )


def gap_window(gap: StepGap) -> tuple[float, float]:
    """A window in which the gap fills the middle: begin and end, microseconds."""
    around = max(AROUND_GAP * gap.gap_us, LEAST_AROUND_US)
    return gap.start_us - gap.gap_us - around, gap.start_us + around


def step_window(report: GapReport, gap: StepGap) -> tuple[float, float]:
    """A window of a few steps around one: begin and end, microseconds."""
    index = report.gaps.index(gap)
    first = report.gaps[max(index - STEPS_AROUND, 0)]
    last = report.gaps[min(index + STEPS_AROUND, len(report.gaps) - 1)]
    return first.start_us - first.gap_us, last.start_us + last.device_us


def _time(microseconds: float) -> str:
    return time_text(microseconds, "µs")


def _tiles(report: GapReport, facts: Mapping[str, Any]) -> dict[str, str]:
    gap, device = report.gap_us(), report.device_us()
    cpu = [us for stage, us in report.cpu_us().items() if stage != "wait"]
    return {
        "step on the device, median": _time(device["p50"] or 0.0),
        "gap, median": _time(gap["p50"] or 0.0),
        "gap, 99 %": _time(gap["p99"] or 0.0),
        "longest gap": _time(report.worst[0].gap_us),
        "device busy": f"{report.busy_share:.2%}",
        "launched ahead": f"{report.launched_ahead_share:.1%}",
        "CPU work a step, mean": _time(sum(us["mean"] or 0.0 for us in cpu)),
    }


def _times(report: GapReport) -> dict[str, list[str]]:
    rows = {"device idle before it": report.gap_us(), "on the device": report.device_us()}
    rows |= {f"CPU: {stage}": values for stage, values in report.cpu_us().items()}
    return {name: [_time(us[p] or 0.0) for p in PERCENTILES] for name, us in rows.items()}


def _did(gap: StepGap) -> str:
    return ", ".join(f"{name} {_time(us)}" for name, us in gap.in_gap_us.items())


def _cause(gap: StepGap) -> str:
    if gap.is_launched_ahead:
        text = "The step was launched ahead, so the device had it when the one before ended"
    else:
        text = "The CPU was late: the step was launched after the one before had ended"
    did = _did(gap)
    return f"{text}. In the gap the CPU did: {did}" if did else text


def _row(gap: StepGap) -> dict[str, Any]:
    return {
        "step": gap.step,
        "gap": _time(gap.gap_us),
        "device": _time(gap.device_us),
        "is_late": not gap.is_launched_ahead,
        "did": _did(gap),
    }
