"""Where a device idles between steps, from the kernel timeline of a profiler."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class DeviceActivity(NamedTuple):
    """One kernel or copy on the device; microseconds."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class GapReport:
    """Device time of a run of steps. Times are microseconds."""

    steps: int
    step_us: float
    """Median from the first kernel of a step to the first of the next."""
    gap_us: float
    """Median idle time between a step's last kernel and the next step's first: no kernel runs;
    the bookkeeping copy falls into it."""
    gap_p99_us: float
    busy_share: float
    """Share of the whole time in which a kernel ran."""
    kernels: float
    """Kernels a step."""

    def __str__(self) -> str:
        return (
            f"{self.steps} steps of {self.step_us:.1f} us and {self.kernels:.0f} kernels; device "
            f"idle between steps: median {self.gap_us:.1f} us, 99 % {self.gap_p99_us:.1f} us; busy "
            f"{self.busy_share:.1%}"
        )


def gap_report(activities: Iterable[DeviceActivity], first_kernel: str) -> GapReport:
    """Cut a kernel timeline into steps and measure what lies between them.

    Args:
        activities: kernels and copies, in any order. Copies count as no work.
        first_kernel: part of the name of the kernel that every step begins with, and runs once.

    Raises:
        ValueError: fewer than two steps are found.
    """
    kernels = sorted((a for a in activities if not _is_copy(a)), key=lambda a: a.start_us)
    begins = [i for i, kernel in enumerate(kernels) if first_kernel in kernel.name]
    if len(begins) < 2:
        raise ValueError(
            f"{len(begins)} kernels are named like {first_kernel!r}: at least two steps are needed."
        )
    starts = [kernels[i].start_us for i in begins]
    gaps = [max(kernels[i].start_us - _end(kernels[:i], i), 0.0) for i in begins[1:]]
    inside = kernels[begins[0] : begins[-1]]
    busy = sum(kernel.end_us - kernel.start_us for kernel in inside)
    ordered = sorted(gaps)
    return GapReport(
        steps=len(gaps),
        step_us=statistics.median(b - a for a, b in pairwise(starts)),
        gap_us=statistics.median(gaps),
        gap_p99_us=ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)],
        busy_share=busy / (starts[-1] - starts[0]),
        kernels=len(inside) / len(gaps),
    )


def _end(before: Sequence[DeviceActivity], count: int) -> float:
    """When the last of the kernels before a step ended; the latest few are enough, in order."""
    return max(kernel.end_us for kernel in before[max(count - 8, 0) :])


def _is_copy(activity: DeviceActivity) -> bool:
    return activity.name.startswith(("Memcpy", "Memset"))
