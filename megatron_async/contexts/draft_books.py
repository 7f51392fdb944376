"""`DraftBooks`: what booked steps have told of drafts, by slot.

Every step drafts, also one of width 1, and reports its drafts in the sample ring. The books keep
the newest report of each request, hold the tokens that come next against it, and say what became of
the drafts that a step verified.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_async.contexts.request_slots import RequestSlots
from megatron_async.contexts.step_plan import IntArray, StepPlan
from megatron_async.contexts.width_choice import LEARNING_SHIFT, ONE, is_wide_worth_it
from megatron_async.ops.sampling.slot_records import RowFeature


class FewerDrafts(IntEnum):
    """Why a row verified fewer drafts than the engine's number: of several reasons the one that
    allows the fewest, and of equal ones the first."""

    GRAMMAR = 0
    """Its request has a grammar."""
    REQUEST = 1
    """Its request asks for fewer."""
    LENGTH = 2
    """Its request ends before."""
    NOTHING_FOUND = 3
    """The drafter had no more."""
    BLOCKS = 4
    """There were too few KV blocks for a wider step."""
    NARROW_STEP = 5
    """The step had width 1, because a wider one did not seem worth its time."""


class Verified(NamedTuple):
    """What became of the drafts of a step's decode rows; rows of ended requests are left out."""

    drafted: IntArray
    """int32 `[rows]`: drafts that the row brought."""
    accepted: IntArray
    """int32 `[rows]`: those of them that were what plain decoding says."""
    fewer: IntArray
    """int64 `[reasons]`: rows that brought fewer than they could, by `FewerDrafts`."""


class DraftBooks:
    """Reports of drafts, and the width of the next step that follows from them.

    Everything here follows from booked steps, in integers: ranks that book the same steps, and
    replays on other machines, choose the same widths.

    Args:
        slots: per-request state.
        count: most drafts of a row.
        chooses_widths: whether steps may be narrow because that seems faster.

    Attributes:
        chooses_widths: as given; benchmarks change it.
    """

    def __init__(self, slots: RequestSlots, count: int, chooses_widths: bool) -> None:
        self._slots = slots
        self._count = count
        self.chooses_widths = chooses_widths
        self._generation = np.full(slots.capacity, -1, dtype=np.int64)
        """Of the request that the slot's entries are of."""
        self._found = np.zeros(slots.capacity, dtype=np.int32)
        """Drafts that the newest report has."""
        self._first = np.zeros(slots.capacity, dtype=np.int32)
        """The first of them."""
        self._right = np.zeros(slots.capacity, dtype=np.int32)
        """How often that was right lately: of `ONE`."""

    def width_for(self, wants: NDArray[np.bool_]) -> int:
        """The width of the step that is planned.

        Args:
            wants: bool `[slots]`: the rows that want to decode.
        """
        most = self._slots.max_width
        if not self.chooses_widths:
            return most
        rows = int(np.count_nonzero(wants))
        drafting = wants & (self._found > 0)
        drafting &= self._generation == self._slots.generation
        if not np.count_nonzero(drafting):
            return 1
        found, right = self._found[drafting], self._right[drafting]
        return most if is_wide_worth_it(rows, most, found, right) else 1

    def book(
        self, plan: StepPlan, sampled: IntArray, counts: IntArray, drafts: IntArray
    ) -> Verified:
        """Take a resolved step in; before its tokens are booked.

        Args:
            plan: of the step.
            sampled: int32 `[rows, most tokens of a row]`.
            counts: int32 `[rows]`.
            drafts: int32 `[rows, drafts]`: for the next step, -1 from where on there is none.
        """
        slots = self._slots
        live = (slots.generation[plan.slots] == plan.generations) & plan.produces
        owners = plan.slots[live]
        is_known = self._generation[owners] == slots.generation[owners]
        found = np.where(is_known, self._found[owners], 0)
        verified = self._verify(plan, live, found, counts)
        self._learn(owners, is_known, found, sampled[live, 0], counts[live])
        reported = drafts[live]
        self._generation[owners] = slots.generation[owners]
        self._found[owners] = np.minimum.accumulate(reported >= 0, axis=1).sum(axis=1)
        self._first[owners] = reported[:, 0]
        return verified

    def _verify(
        self, plan: StepPlan, live: NDArray[np.bool_], found: IntArray, counts: IntArray
    ) -> Verified:
        slots, decoding = self._slots, live[: plan.num_decode]
        rows = np.flatnonzero(decoding)
        owners, found = plan.slots[rows], found[: len(rows)]
        allowed = slots.drafts[owners]
        in_step = np.full(len(rows), plan.width - 1)
        by_grammar = (slots.features[owners] & RowFeature.CONSTRAINED) != 0
        limits = np.stack((
            np.where(by_grammar, 0, self._count),
            allowed,
            np.maximum(slots.max_length[owners] - slots.num_known[owners] - 1, 0),
            found,
            in_step if plan.short_of_blocks else np.full(len(rows), self._count),
            in_step,
        ))  # fmt: skip
        drafted = limits.min(axis=0)
        reasons = limits.argmin(axis=0)[drafted < self._count]
        return Verified(
            drafted,
            np.clip(counts[rows] - 1, 0, drafted),
            np.bincount(reasons, minlength=len(FewerDrafts)),
        )

    def _learn(
        self,
        owners: IntArray,
        is_known: NDArray[np.bool_],
        found: IntArray,
        tokens: IntArray,
        counts: IntArray,
    ) -> None:
        """Hold the next tokens against the drafts that were reported before them, whether a step
        verified these or not."""
        self._right[owners[~is_known]] = ONE // 2
        told = (found > 0) & (counts > 0)
        rows = owners[told]
        target = np.where(self._first[rows] == tokens[told], ONE, 0)
        self._right[rows] += (target - self._right[rows]) >> LEARNING_SHIFT
