"""`MicroBatches`: which requests a step may serve when the model is a pipeline of stages.

With p stages, requests are in p micro-batches by slot (`slot % p`), and steps serve these in turn.
So up to p consecutive steps share no request. While one stage computes a step, the previous stage
computes the next step, which does not wait for the samples of the first. Without a pipeline there
is one micro-batch.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from megatron_async.planning.request_slots import RequestSlots


class MicroBatches:
    """Which micro-batch is next, whether it admits a request, and how well stages are used.

    All follows from per-request state, so ranks with the same state agree without messages.

    Attributes:
        bubble: stage times that went by between the beginnings of two steps beyond the one that a
            full pipeline needs, if all stages took equally long; a sum over all steps.
        steps: steps so far.
    """

    def __init__(self, slots: RequestSlots, lookahead: int) -> None:
        self._slots = slots
        self._next = 0
        self.steps = 0
        self.bubble = 0
        count = slots.num_micro_batches
        self._is_member = np.arange(slots.capacity) % count == np.arange(count)[:, None]
        # A clock that ticks in stage times; before the first step there is nothing to wait for.
        self._now = 0
        self._last_start = [-count] * count
        self._starts = deque([-count] * (lookahead + 1), maxlen=lookahead + 1)

    def in_turn(self) -> list[int]:
        """The micro-batches in the order of their turns; the first one with work is served."""
        count = self._slots.num_micro_batches
        return [(self._next + offset) % count for offset in range(count)]

    def members(self, slots: NDArray[np.bool_], micro_batch: int) -> NDArray[np.bool_]:
        """The slots among `slots`, bool `[slots]`, that are in a micro-batch."""
        if len(self._is_member) == 1:
            return slots
        return slots & self._is_member[micro_batch]

    def may_admit(self, micro_batch: int, waiting: int) -> bool:
        """Whether one of `waiting` requests may join a micro-batch. After all admissions the
        micro-batches shall be equally large, so that each stage always has a step to compute."""
        slots = self._slots
        if slots.num_free_in(micro_batch) == 0:
            return False
        held, wanted_elsewhere = slots.num_held_in(micro_batch), 0
        for other in range(slots.num_micro_batches):
            missing = held - slots.num_held_in(other)
            wanted_elsewhere += max(0, min(missing, slots.num_free_in(other)))
        return wanted_elsewhere < waiting

    def took(self, micro_batch: int, feeds_back: bool) -> None:
        """A step of this micro-batch is planned. `feeds_back`: its first stage needs samples of the
        micro-batch's last step."""
        count = self._slots.num_micro_batches
        self._next = (micro_batch + 1) % count
        self.steps += 1
        # Behind the step before it, behind the one whose samples it needs, and behind the one that
        # the host waits for before it prepares this one.
        start = max(self._now + 1, self._starts[0] + count)
        if feeds_back:
            start = max(start, self._last_start[micro_batch] + count)
        if self.steps > 1:
            self.bubble += start - self._now - 1
        self._now = start
        self._last_start[micro_batch] = start
        self._starts.append(start)

    @property
    def bubble_share(self) -> float:
        """Share of its time that a stage is idle because too few steps are in flight."""
        return self.bubble / max(self.bubble + self.steps, 1)
