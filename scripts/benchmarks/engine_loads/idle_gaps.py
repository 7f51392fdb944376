"""The GPU's idle time between steps of a load.

A process that has profiled once launches more slowly from then on, so this comes after all
timings, or on an engine whose timings are not wanted.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_async.profiling.gpu_profile import (
    FIRST_KERNEL,
    GapReport,
    device_activities,
    gap_report,
    profile_device,
)


def gaps_of(step: Callable[[], object], steps: int) -> GapReport:
    """The gap report of so many calls of `step`; needs a CUDA device."""

    def run() -> None:
        for _ in range(steps):
            step()

    return gap_report(device_activities(profile_device(run)), FIRST_KERNEL)
