"""Kernel timelines of an engine's steps, from torch.profiler: how long the device idles between
steps, and which kernels a step waits for.

Kernels of a captured step overlap: dependent launch starts one while the kernel before it still
runs, so durations add up to more than the step. What a step waits for is the time from the end of
all kernels before to a kernel's own end.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile


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


@dataclass(frozen=True)
class KernelShare:
    """What one kernel, at one place of a step, adds to the step. Times are microseconds."""

    name: str
    after: str
    """Name of the kernel that begins before it: tells uses of one kernel apart."""
    calls: float
    """Calls a step."""
    waited_us: float
    """Time a step from the end of all kernels before to this one's end, idle time included."""
    run_us: float
    """Time a step from the kernel's start to its end, waits for other kernels included."""

    def __str__(self) -> str:
        return (
            f"{self.waited_us:>10.1f}{self.calls:>7.1f}{self.waited_us / self.calls:>9.2f}"
            f"{self.run_us / self.calls:>9.2f}  {self.name[:44]:<44} after {self.after[:40]}"
        )


HEADER = f"{'us a step':>10}{'calls':>7}{'us each':>9}{'run':>9}  kernel"
"""Header of a table of `KernelShare` lines."""


def kernel_shares(activities: Iterable[DeviceActivity], steps: int) -> list[KernelShare]:
    """Divide the time of a run of steps among its kernels; `waited_us` adds up to all of it.

    Args:
        activities: kernels and copies of `steps` steps, in any order.
        steps: at least 1.

    Returns:
        Those that are waited for longest first.
    """
    ordered = sorted(activities, key=lambda activity: activity.start_us)
    waited: dict[tuple[str, str], float] = defaultdict(float)
    run: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    before, last_end = "", ordered[0].start_us if ordered else 0.0
    for activity in ordered:
        key = (activity.name, before)
        waited[key] += max(activity.end_us - last_end, 0.0)
        run[key] += activity.end_us - activity.start_us
        calls[key] += 1
        before, last_end = activity.name, max(activity.end_us, last_end)
    shares = [
        KernelShare(name, after, calls[name, after] / steps, time / steps, run[name, after] / steps)
        for (name, after), time in waited.items()
    ]
    return sorted(shares, key=lambda share: -share.waited_us)


FIRST_KERNEL = "_unpack_kernel"
"""Part of the name of the kernel that every step begins with (`device_state/unpack_step.py`)."""


def profile_device(run: Callable[[], None]) -> profile:
    """Run steps under torch.profiler, kernels of graph replays included, and wait for the GPU.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("profiling kernels needs a CUDA device, and torch finds none.")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return profiler


def device_activities(profiler: profile) -> list[DeviceActivity]:
    """Kernels and copies of a finished profile."""
    return [
        DeviceActivity(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
