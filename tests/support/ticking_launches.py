"""Late launches that wait by looks at the clock, on a host of any speed."""

from __future__ import annotations

import itertools

from megatron_async.engines.late_launch import LateLaunch, PromptLaunch


class TickingLaunches:
    """Makes a `LateLaunch` wait however fast or busy the host is: each look at its clock finds a
    millisecond gone, it has no margin, and no launch counts as late.

    Attributes:
        waits: how often a launch was found not to be due.
        is_waiting: whether a launch waits now.
    """

    def __init__(self, late: PromptLaunch) -> None:
        assert isinstance(late, LateLaunch), "launches of this engine do not wait"
        self.waits, self.is_waiting = 0, False
        ticks = itertools.count()
        seconds_left = late.seconds_left

        def counted() -> float:
            left = seconds_left()
            self.is_waiting = left > 0
            self.waits += self.is_waiting
            return left

        late._margin_us = 0.0
        late._now_us = lambda: 1000.0 * next(ticks)
        late.seconds_left = counted  # type: ignore[method-assign]
        late.launching = lambda plan: None  # type: ignore[method-assign]
