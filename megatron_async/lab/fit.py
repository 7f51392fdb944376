"""Fit a machine's times to a recording."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_async.errors import RecordingError
from megatron_async.lab.device_times import CpuTimes, DeviceTimes, Machine, Reach
from megatron_async.lab.recording import Launched, Recording, Resolved

FIRST_STEPS = 2
"""Left out: they compile and warm up."""
LEAST_STEPS = 20
"""Fewer say too little."""


class _Step(NamedTuple):
    work: tuple[int, int, int]
    """Prefill tokens, decode rows, KV tokens."""
    device_us: float
    host_us: tuple[float, float, float]
    """Prepare, launch, resolve."""


def fit_machine(recording: Recording) -> Machine:
    """Times of the machine that made a recording.

    A step's device time is fitted as a + b * prefill tokens + c * decode rows + d * KV tokens, none
    negative, by least squares of relative errors; what all steps had as much of (the rows of a run
    with one prompt) has no coefficient of its own. It is taken from the recorded timeline
    (`LLM(timeline=True)`) where there is one; otherwise it is the time from a step's launch, or
    from the booking of the step before it if that came later, to its own booking, which includes
    the host's delays. The host's times are medians.

    Raises:
        RecordingError: fewer than `LEAST_STEPS` steps to fit to.
    """
    steps = _steps(recording)
    if len(steps) < LEAST_STEPS:
        raise RecordingError(
            f"the recording has {len(steps)} steps to fit times to; {LEAST_STEPS} are needed: "
            "record a longer run."
        )
    reach = Reach.of([step.work for step in steps])
    # What does not vary cannot be told from the base, and lstsq would divide the time among both.
    work = np.array([(1, *step.work) for step in steps], dtype=np.float64) * (1, *reach.varies)
    device_us = np.array([step.device_us for step in steps])
    base, prefill, decode, kv = _fit_positive(work / device_us[:, None], np.ones(len(steps)))
    host = [statistics.median(values) for values in zip(*(s.host_us for s in steps), strict=True)]
    source = f"a recording of {len(steps)} steps on {recording.header['device']}"
    return Machine(
        DeviceTimes(((0.0, base),), prefill_us=prefill, decode_us=decode, kv_us=kv),
        CpuTimes(prepare_us=host[0], launch_us=host[1], resolve_us=host[2]),
        source,
        reach,
    )


def _steps(recording: Recording) -> list[_Step]:
    launched = {e.step: e for e in recording.events if isinstance(e, Launched)}
    steps, before_us = [], 0.0
    for event in recording.events:
        if not isinstance(event, Resolved):
            continue
        launch = launched[event.step]
        resolve_us, now_us = event.times_us
        start_us, end_us = recording.device_spans.get(
            event.step, (max(before_us, launch.times_us[2]), now_us - resolve_us)
        )
        before_us = now_us
        if event.step >= FIRST_STEPS and event.error is None and end_us > start_us:
            host = (launch.times_us[0], launch.times_us[1], resolve_us)
            steps.append(_Step(launch.work, end_us - start_us, host))
    return steps


def _fit_positive(
    columns: NDArray[np.float64], target: NDArray[np.float64]
) -> tuple[float, float, float, float]:
    """Least squares without negative coefficients: the most negative one goes, until none is."""
    kept = list(range(columns.shape[1]))
    while True:
        values, *_ = np.linalg.lstsq(columns[:, kept], target, rcond=None)
        worst = int(np.argmin(values))
        if values[worst] >= 0 or len(kept) == 1:
            break
        kept.pop(worst)
    result = np.zeros(columns.shape[1])
    result[kept] = np.maximum(values, 0)
    a, b, c, d = (float(value) for value in result)
    return a, b, c, d
