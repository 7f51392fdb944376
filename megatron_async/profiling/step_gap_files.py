"""The gap report for people and for programs: text and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_async.profiling.step_gaps import GapReport, StepGap

PERCENTILES = ("p50", "p90", "p99")


def time_text(microseconds: float, micro: str = "us") -> str:
    """A time with three digits and its unit: "1.23 us", "45.6 ms", "7.89 s"."""
    value, unit = microseconds, micro
    for larger in ("ms", "s"):
        if value >= 999.5:
            value, unit = value / 1e3, larger
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f} {unit}"


def gap_cause(gap: StepGap, micro: str = "us") -> str:
    """What the CPU did in a gap, in a line."""
    did = ", ".join(f"{name} {time_text(us, micro)}" for name, us in gap.in_gap_us.items())
    if gap.is_launched_ahead:
        return f"launched ahead; CPU: {did}" if did else "launched ahead"
    return f"CPU late: {did}" if did else "CPU late"


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
        "",
        "longest gaps, each before the step that is named, and what the CPU did meanwhile",
    ]
    for gap in report.worst:
        lines.append(f"  step {gap.step:>6} {time_text(gap.gap_us):>10}  {gap_cause(gap)}")
    return "\n".join(lines) + "\n"


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
        "worst_steps": [gap.step for gap in report.worst],
        "steps": [
            {
                "step": gap.step,
                "gap_us": gap.gap_us,
                "device_us": gap.device_us,
                "is_launched_ahead": gap.is_launched_ahead,
                "cpu_us": dict(gap.cpu_us),
                "in_gap_us": dict(gap.in_gap_us),
            }
            for gap in report.gaps
        ],
    }
