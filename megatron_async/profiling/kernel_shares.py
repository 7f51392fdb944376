"""Which kernels a step waits for, from the kernel timeline of a profiler.

Kernels of a captured step overlap: dependent launch starts one while the kernel before it still
runs, so durations add up to more than the step. What a step waits for is the time from the end of
all kernels before to a kernel's own end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_async.profiling.gap_report import DeviceActivity


@dataclass(frozen=True)
class KernelShare:
    """What one kernel, at one place of a step, adds to the step. Times are microseconds."""

    name: str
    after: str
    """Name of the kernel that begins before it: tells uses of one kernel apart."""
    calls: float
    """Of a step."""
    waited_us: float
    """Of a step: from the end of all kernels before to this kernel's end, idle time included."""
    run_us: float
    """Of a step: from the kernel's start to its end, waits for other kernels included."""

    def __str__(self) -> str:
        return (
            f"{self.waited_us:>10.1f}{self.calls:>7.1f}{self.waited_us / self.calls:>9.2f}"
            f"{self.run_us / self.calls:>9.2f}  {self.name[:44]:<44} after {self.after[:40]}"
        )


HEADER = f"{'us a step':>10}{'calls':>7}{'us each':>9}{'run':>9}  kernel"
"""Of a table of `KernelShare` lines."""


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
