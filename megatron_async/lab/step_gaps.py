"""Where the device idled between steps, and what the CPU did meanwhile, from the step timeline.

The device lane ends and begins where events of the compute stream say so. That is exact to a few
microseconds; for gaps shorter than that, `gpu_profile.py` reads a kernel timeline.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron_async.lab.benchmark_record import distribution
from megatron_async.observe.statistics import NoOverlapReason
from megatron_async.observe.timeline import NO_OVERLAP, Span, Timeline

STAGES = {
    "prepare_step": "prepare",
    "transfer_bookkeeping_to_gpu": "upload",
    "launch_step": "launch",
    "resolve": "wait",
    "update_requests": "book",
    "emit": "emit",
}
"""The ranges into which a step divides the CPU's time, one after another, and their short names."""

WAIT = "wait"
REST_OF_STEP = "rest of step"
"""The engine's time in none of its stages."""
BETWEEN_STEPS = "between steps"
"""The caller's time, or nothing to do."""

NOT_COUNTED = (NoOverlapReason.AFTER_IDLE, NoOverlapReason.DRAINED)
"""Before steps of these reasons there was nothing to do, or the engine was stopped."""

WORST = 10
"""Steps that a report names."""


@dataclass(frozen=True)
class StepGap:
    """One step, and the time before it in which the device had nothing to run. Microseconds."""

    step: int
    start_us: float
    """Begin on the device."""
    device_us: float
    """Time on the device."""
    gap_us: float
    """From the end of the step before to the begin of this one."""
    is_launched_ahead: bool
    """Whether the step was launched when the one before ended. If so the CPU was not late, and the
    gap is the device's own."""
    no_overlap: str | None
    """The engine's reason where it launched the step with nothing in flight (`NoOverlapReason`)."""
    cpu_us: Mapping[str, float]
    """CPU time of this step by stage (short names), wait included."""
    in_gap_us: Mapping[str, float]
    """What the CPU did in the gap: time by stage, `REST_OF_STEP` and `BETWEEN_STEPS`; longest
    first."""

    @property
    def cause(self) -> str:
        """Why the device waited, in two words. Before a step that was launched in time the gap is
        the device's own: a GPU's way from step to step, a CPU's thread that waits for a core."""
        if self.no_overlap is not None:
            return self.no_overlap.replace("_", " ")
        return "device's own" if self.is_launched_ahead else "CPU late"


@dataclass(frozen=True)
class GapReport:
    """Device idle time over a run of steps."""

    gaps: list[StepGap]
    """In order of the steps, at least one. The first step of a run has no gap and is left out."""
    after_idle: list[StepGap]
    """Steps before which there was nothing to do, or the engine was stopped: no figure counts their
    gaps."""

    @property
    def worst(self) -> list[StepGap]:
        """The steps with the longest gaps, longest first."""
        return sorted(self.gaps, key=lambda gap: -gap.gap_us)[:WORST]

    @property
    def typical(self) -> StepGap:
        """A step with the median gap (the lower one, of two)."""
        median = statistics.median_low(gap.gap_us for gap in self.gaps)
        return next(gap for gap in self.gaps if gap.gap_us == median)

    @property
    def busy_share(self) -> float:
        """Share of the time from the first gap to the end of the last step that steps ran."""
        busy = sum(gap.device_us for gap in self.gaps)
        return busy / (busy + sum(gap.gap_us for gap in self.gaps))

    @property
    def launched_ahead_share(self) -> float:
        """Share of steps that were launched when the step before ended."""
        return statistics.fmean(gap.is_launched_ahead for gap in self.gaps)

    def gap_us(self) -> dict[str, float | None]:
        """Mean and percentiles of the gaps; see `distribution`."""
        return distribution(gap.gap_us for gap in self.gaps)

    def device_us(self) -> dict[str, float | None]:
        """Mean and percentiles of the steps' device times."""
        return distribution(gap.device_us for gap in self.gaps)

    def cpu_us(self) -> dict[str, dict[str, float | None]]:
        """Mean and percentiles of each stage's CPU time in a step."""
        return {
            stage: distribution(gap.cpu_us.get(stage, 0.0) for gap in self.gaps)
            for stage in STAGES.values()
        }


def step_gaps(timeline: Timeline) -> GapReport:
    """The gaps of a timeline's steps.

    Raises:
        ValueError: no two steps are found, the second of which followed the first.
    """
    device = sorted(timeline.select("device", "device_step").values(), key=lambda s: s.start_us)
    stages = [s for s in timeline.spans if s.lane == "cpu" and s.name in STAGES]
    occupied = _Occupied(
        stages, (s for s in timeline.spans if s.lane == "cpu" and s.name == "step")
    )
    cpu_us: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    launched: dict[int, float] = {}
    reasons = {s.step: s.name for s in timeline.spans if s.name.startswith(NO_OVERLAP)}
    for span in stages:
        cpu_us[span.step][STAGES[span.name]] += span.end_us - span.start_us
        if span.name == "launch_step":
            launched[span.step] = span.end_us
    gaps: list[StepGap] = []
    after_idle: list[StepGap] = []
    for before, span in pairwise(device):
        reason = reasons.get(span.step)
        gap = StepGap(
            step=span.step,
            start_us=span.start_us,
            device_us=span.end_us - span.start_us,
            gap_us=max(span.start_us - before.end_us, 0.0),
            is_launched_ahead=launched.get(span.step, before.end_us) <= before.end_us,
            no_overlap=None if reason is None else reason.removeprefix(NO_OVERLAP),
            cpu_us=dict(cpu_us[span.step]),
            in_gap_us=occupied.between(before.end_us, span.start_us),
        )
        (after_idle if gap.no_overlap in NOT_COUNTED else gaps).append(gap)
    if not gaps:
        raise ValueError(
            f"the timeline has {len(device)} steps on the device, and none that followed another "
            "while there was work: run more steps, or a higher rate of arrivals."
        )
    return GapReport(gaps, after_idle)


class _Occupied:
    """What the engine's thread did when."""

    def __init__(self, stages: Iterable[Span], steps: Iterable[Span]) -> None:
        self._stages = _Lane(stages)
        self._steps = _Lane(steps)

    def between(self, start: float, end: float) -> dict[str, float]:
        """Time by activity, longest first."""
        if end <= start:
            return {}
        found: dict[str, float] = defaultdict(float)
        for span, overlap in self._stages.overlaps(start, end):
            found[STAGES[span.name]] += overlap
        inside = sum(overlap for _, overlap in self._steps.overlaps(start, end))
        found[REST_OF_STEP] = max(inside - sum(found.values()), 0.0)
        found[BETWEEN_STEPS] = max(end - start - inside, 0.0)
        return {k: us for k, us in sorted(found.items(), key=lambda item: -item[1]) if us > 0}


class _Lane:
    """Spans that follow one another."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans: Sequence[Span] = sorted(spans, key=lambda span: span.start_us)
        self._starts = [span.start_us for span in self._spans]

    def overlaps(self, start: float, end: float) -> Iterable[tuple[Span, float]]:
        """The spans that reach into an interval, each with the time it shares with it."""
        index = max(bisect_right(self._starts, start) - 1, 0)
        while index < len(self._spans) and self._starts[index] < end:
            span = self._spans[index]
            overlap = min(span.end_us, end) - max(span.start_us, start)
            if overlap > 0:
                yield span, overlap
            index += 1


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
    """The report as text."""
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
    """The report for JSON; times are microseconds, each step's as in `StepGap`."""
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
