"""`DraftBooks`: reports of drafts from booked steps, by slot.

Every step drafts, also one of width 1, and reports its drafts in the sample ring. `DraftBooks`
keeps the newest report of each request, compares it with the next tokens, and counts which verified
drafts were accepted.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_async.contexts.request_slots import RequestSlots
from megatron_async.contexts.step_plan import IntArray, StepPlan
from megatron_async.contexts.width_choice import (
    LEARNING_SHIFT,
    ONE,
    expected_gain,
    is_wide_worth_it,
)
from megatron_async.ops.sampling.slot_records import RowFeature


class FewerDrafts(IntEnum):
    """Why a row verified fewer drafts than `num_speculative_tokens`: of several reasons the one
    that allows the fewest drafts, and of equal ones the first."""

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
    """Verified and accepted drafts of a step's decode rows, without rows of ended requests."""

    drafted: IntArray
    """int32 `[rows]`: drafts that the row verified."""
    accepted: IntArray
    """int32 `[rows]`: verified drafts that equal the tokens of plain decoding."""
    fewer: IntArray
    """int64 `[reasons]`: rows that verified fewer drafts than the most, by `FewerDrafts`."""


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
        """Generation of the request to which the slot's entries belong."""
        self._found = np.zeros(slots.capacity, dtype=np.int32)
        """Number of drafts in the newest report."""
        self._first = np.zeros(slots.capacity, dtype=np.int32)
        """The first draft of the newest report."""
        self._right = np.zeros(slots.capacity, dtype=np.int32)
        """Running share of first drafts that were right, in units of 1 / `ONE`."""
        self._gain = np.zeros(slots.capacity, dtype=np.int64)
        """Expected gain in tokens from the newest report's drafts, in units of 1 / `ONE`."""
        self._limits = np.zeros((len(FewerDrafts), slots.capacity), dtype=np.int32)
        """Scratch memory: most drafts of each row, by reason."""

    def width_for(self, wants: NDArray[np.bool_]) -> int:
        """The width of the step that is planned.

        Args:
            wants: bool `[slots]`: the rows that want to decode.
        """
        most = self._slots.max_width
        if not self.chooses_widths:
            return most
        drafting = wants & (self._generation == self._slots.generation)
        gain = int(self._gain[drafting].sum())
        rows = int(np.count_nonzero(wants)) if gain else 0
        return most if gain and is_wide_worth_it(rows, most, gain) else 1

    def book(
        self, plan: StepPlan, sampled: IntArray, counts: IntArray, drafts: IntArray
    ) -> Verified:
        """Record a resolved step, before its tokens are booked.

        Args:
            plan: of the step.
            sampled: int32 `[rows, most tokens of a row]`.
            counts: int32 `[rows]`: how many tokens each row yields.
            drafts: int32 `[rows, drafts]`: for the next step, -1 from the first missing draft on.
        """
        slots, owners, decoding = self._slots, plan.slots, plan.num_decode
        live = (slots.generation[owners] == plan.generations) & plan.produces
        if not live.all():
            owners, sampled = owners[live], sampled[live]
            counts, drafts = counts[live], drafts[live]
            decoding = int(np.count_nonzero(live[:decoding]))
        generation = slots.generation[owners]
        is_known = self._generation[owners] == generation
        found = np.where(is_known, self._found[owners], 0)
        verified = self._verify(plan, owners[:decoding], found[:decoding], counts[:decoding])
        right = self._learnt(owners, is_known, found, sampled[:, 0], counts)
        found = (drafts >= 0).sum(axis=1)
        self._generation[owners] = generation
        self._found[owners] = found
        self._first[owners] = drafts[:, 0]
        self._right[owners] = right
        self._gain[owners] = expected_gain(found, right)
        return verified

    def _verify(
        self, plan: StepPlan, owners: IntArray, found: IntArray, counts: IntArray
    ) -> Verified:
        slots, in_step = self._slots, plan.width - 1
        limits = self._limits[:, : len(owners)]
        by_grammar = slots.features[owners] & RowFeature.CONSTRAINED
        limits[FewerDrafts.GRAMMAR] = np.where(by_grammar, 0, self._count)
        limits[FewerDrafts.REQUEST] = slots.drafts[owners]
        left = slots.max_length[owners] - slots.num_known[owners] - 1
        limits[FewerDrafts.LENGTH] = np.maximum(left, 0)
        limits[FewerDrafts.NOTHING_FOUND] = found
        limits[FewerDrafts.BLOCKS] = in_step if plan.short_of_blocks else self._count
        limits[FewerDrafts.NARROW_STEP] = in_step
        drafted = np.minimum.reduce(limits)
        reasons = limits.argmin(axis=0)[drafted < self._count]
        return Verified(
            drafted,
            np.minimum(np.maximum(counts - 1, 0), drafted),
            np.bincount(reasons, minlength=len(FewerDrafts)),
        )

    def _learnt(
        self,
        owners: IntArray,
        is_known: NDArray[np.bool_],
        found: IntArray,
        tokens: IntArray,
        counts: IntArray,
    ) -> IntArray:
        """`_right` of the rows, after comparing the next tokens with the drafts reported before
        them, whether a step verified these drafts or not."""
        right = np.where(is_known, self._right[owners], ONE // 2)
        told = (found > 0) & (counts > 0)
        target = np.where(self._first[owners] == tokens, ONE, 0)
        return right + ((target - right) >> LEARNING_SHIFT) * told
