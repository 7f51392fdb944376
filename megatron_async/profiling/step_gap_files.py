"""The gap report for people and for programs: text and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_async.profiling.step_gaps import GapReport, StepGap

PERCENTILES = ("p50", "p90", "p99")

LEAST_SHARE = 0.05
"""What took a smaller part of a gap is not named."""


def time_text(microseconds: float, micro: str = "us") -> str:
    """A time with three digits and its unit: "1.23 us", "45.6 ms", "7.89 s"."""
    value, unit = microseconds, micro
    for larger in ("ms", "s"):
        if value >= 999.5:
            value, unit = value / 1e3, larger
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f} {unit}"


def did_in_gap(gap: StepGap, micro: str = "us") -> str:
    """What the CPU did in a gap, longest first, without trifles."""
    least = LEAST_SHARE * gap.gap_us
    return ", ".join(
        f"{name} {time_text(us, micro)}" for name, us in gap.in_gap_us.items() if us >= least
    )


def gap_text(report: GapReport, facts: Mapping[str, Any]) -> str:
    """The report as text.

    Args:
        report: of the run.
        facts: what was run; printed first.
    """
    width = max(map(len, facts))
    lines = [f"{name:<{width}}  {value}" for name, value in facts.items()]
    lines += ["", f"{'a step':<22}" + "".join(f"{name:>12}" for name in PERCENTILES)]
    rows = {"device idle before it": report.gap_us(), "time on the device": report.device_us()}
    rows |= {f"CPU: {stage}": values for stage, values in report.cpu_us().items()}
    for name, values in rows.items():
        cells = (time_text(values[p] or 0.0) for p in PERCENTILES)
        lines.append(f"{name:<22}" + "".join(f"{cell:>12}" for cell in cells))
    lines += [
        "",
        f"device busy {report.busy_share:.2%}; {report.launched_ahead_share:.1%} of "
        f"{len(report.gaps)} steps were launched before the step before them ended",
        *idle_text(report),
        *device_text(facts),
        "",
        "longest gaps, each before the step that is named, and what the CPU did meanwhile",
    ]
    for gap in report.worst:
        head = f"  step {gap.step:>6} {time_text(gap.gap_us):>10}"
        lines.append(f"{head}  {gap.cause:<15}  {did_in_gap(gap)}".rstrip())
    return "\n".join(lines) + "\n"


def idle_text(report: GapReport) -> list[str]:
    """A line about the steps whose gaps are not counted; none where there are none."""
    if not report.after_idle:
        return []
    idle = time_text(sum(gap.gap_us for gap in report.after_idle))
    return [f"not counted: {len(report.after_idle)} times there was nothing to do, {idle} in all"]


def device_text(facts: Mapping[str, Any]) -> list[str]:
    """What the device is, where gaps mean another thing by that."""
    if facts.get("device") != "CPU":
        return []
    return [
        "the device is a thread of this CPU: a gap before a step that was launched in time is its "
        "wait for a core, which nothing in the engine could make shorter"
    ]


def gap_record(report: GapReport, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The report for JSON; times are microseconds, of each step those of `StepGap`.

    Args:
        report: of the run.
        facts: what was run.
    """
    return {
        "facts": dict(facts),
        "gap_us": {**report.gap_us(), "max": report.worst[0].gap_us},
        "device_us": report.device_us(),
        "cpu_us": report.cpu_us(),
        "busy_share": report.busy_share,
        "launched_ahead_share": report.launched_ahead_share,
        "idle_us": {gap.step: gap.gap_us for gap in report.after_idle},
        "worst_steps": [gap.step for gap in report.worst],
        "steps": [
            {
                "step": gap.step,
                "gap_us": gap.gap_us,
                "device_us": gap.device_us,
                "is_launched_ahead": gap.is_launched_ahead,
                "no_overlap": gap.no_overlap,
                "cpu_us": dict(gap.cpu_us),
                "in_gap_us": dict(gap.in_gap_us),
            }
            for gap in report.gaps
        ],
    }
