"""How long the host takes for each stage of a step, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CpuTimes:
    """The host's time by stage, microseconds; waiting for the device is not counted.

    The defaults are those of an H200's host (docs/records/whole_steps.md, "Steady decode",
    lookahead 1).
    """

    prepare_us: float = 28.0
    """`prepare_step`."""
    launch_us: float = 84.0
    """Bookkeeping copy and launch of a captured step; measured while each step had a copy."""
    resolve_us: float = 38.0
    """`update_requests` and `emit`."""
    eager_launch_us: float = 0.0
    """Launching the kernels of a step that is not captured, one by one."""
    add_us: float = 60.0
    """Taking in one request."""
    turnaround_us: float = 40.0
    """From the end of a step's last kernel to the host's going on: the event, and the waking of the
    thread; measured while samples came by a copy."""
