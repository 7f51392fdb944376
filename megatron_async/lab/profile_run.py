"""Run a workload with the step timeline on, and write what it shows into a folder."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from megatron_async.lab.profile_page import profile_page
from megatron_async.lab.profile_workload import ProfileWorkload
from megatron_async.lab.step_gaps import GapReport, gap_record, gap_text, step_gaps
from megatron_async.lab.trace_server import serve_trace
from megatron_async.lab.workloads import Churn, start_steady_decode
from megatron_async.observe.timeline import Timeline

if TYPE_CHECKING:
    from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
    from megatron_async.llm import LLM

Bar = Callable[[int], None]
"""Told of progress."""


ESTIMATED_FROM = 8
"""Steps whose mean time is what the others are expected to take."""
LONG_S = 5
"""Seconds: shorter waits are not announced."""


def record_workload(llm: LLM, workload: ProfileWorkload, progress: bool = False) -> Timeline:
    """Run a workload, warmed up.

    Args:
        llm: idle, with `timeline=True` and the workload's `engine_settings`. It is closed, so that
            the last steps are complete.
        workload: what to run.
        progress: show a bar.

    Returns:
        the timeline of the run without its warm-up.
    """
    timeline = llm.timeline
    assert timeline is not None, "LLM(timeline=True) is needed"
    total = workload.requests if workload.name == "trace" else workload.steps
    unit = "request" if workload.name == "trace" else "step"
    with _bar(total, unit, progress) as bar:
        run = _prepare(llm.engine, workload)
        first = timeline.now_us()
        run(bar.update if progress is False else _Estimate(bar, workload).update)
    llm.close()
    return timeline.since(first)


def _prepare(engine: DynamicInferenceEngine, workload: ProfileWorkload) -> Callable[[Bar], None]:
    """Warm up; return what runs the rest and tells of it."""
    if workload.name == "trace":
        vocabulary = engine.controller.vocab_size
        # All at once: the batch passes through many sizes on its way down.
        serve_trace(engine, workload.trace(vocabulary, math.inf))

        def serve(bar: Bar) -> None:
            trace = workload.trace(vocabulary, workload.rate)
            serve_trace(engine, trace, lambda finished, _: bar(finished))

        return serve

    churn = None
    if workload.name == "churn":
        batch, prompt, finishes = workload.batch, workload.prompt_tokens, workload.finishes
        churn = Churn(engine, batch, prompt, finishes, workload.seed)
        churn.ramp_up()
    else:
        start_steady_decode(
            engine, workload.batch, workload.prompt_tokens, workload.steps, workload.seed
        )

    def run(bar: Bar) -> None:
        for _ in range(workload.steps):
            if churn is not None:
                churn.before_step()
            report = engine.step_modern()
            if churn is not None:
                churn.after_step(report)
            bar(1)

    return run


class _Estimate:
    """Moves a bar on, and says after the first steps how long the others will take, once and
    whether stderr is a terminal or not."""

    def __init__(self, bar: Any, workload: ProfileWorkload) -> None:
        self._bar = bar
        self._workload = workload
        self._steps = 0
        self._begin = time.perf_counter()

    def update(self, count: int) -> None:
        """Count `count` more."""
        self._bar.update(count)
        self._steps += count
        steps = self._workload.steps
        if self._workload.name == "trace" or self._steps != ESTIMATED_FROM or steps <= self._steps:
            return
        step_s = (time.perf_counter() - self._begin) / self._steps
        left = round(step_s * (steps - self._steps))
        if left >= LONG_S:
            shown = f"{left // 60} min {left % 60} s" if left >= 60 else f"{left} s"
            text = f"{steps} steps of {step_s:.2f} s: about {shown} (--steps N takes fewer)"
            tqdm.write(text, file=sys.stderr)


def _bar(total: int, unit: str, progress: bool) -> AbstractContextManager[Any]:
    return tqdm(total=total, unit=unit, desc="profile", disable=None if progress else True)


def write_profile(folder: Path, timeline: Timeline, facts: Mapping[str, Any]) -> GapReport:
    """Write `timeline.json` (for Perfetto), `gaps.txt`, `gaps.json` and `index.html`.

    Returns:
        the gap report.

    Raises:
        ValueError: the timeline has fewer than two steps.
    """
    report = step_gaps(timeline)
    timeline.save(folder / "timeline.json")
    (folder / "gaps.txt").write_text(gap_text(report, facts), "utf-8")
    (folder / "gaps.json").write_text(json.dumps(gap_record(report, facts), indent=1) + "\n")
    (folder / "index.html").write_text(profile_page(timeline, report, facts), "utf-8")
    return report
