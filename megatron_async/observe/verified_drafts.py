"""What steps verified of their drafts, as the books report it and counters add it up."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer[Any]]


class FewerDrafts(IntEnum):
    """Why a row verified fewer drafts than `num_speculative_tokens`: of several reasons the one
    that allows the fewest drafts, and of equal ones the first."""

    GRAMMAR = 0
    """The row's request has a grammar."""
    REQUEST = 1
    """The row's request asks for fewer."""
    LENGTH = 2
    """The row's request ends before."""
    NOTHING_FOUND = 3
    """The drafter had no more."""
    BLOCKS = 4
    """There were too few KV blocks for a wider step."""
    NARROW_STEP = 5
    """The step had width 1, because a wider one did not seem worth its time."""


REASONS = 8
"""A limit of drafts times this, plus its reason, is one number: the least of several is the limit
that holds."""


class Verified(NamedTuple):
    """What a step's decode rows verified, without rows of ended requests."""

    limits: IntArray
    """int32 `[rows]`: drafts that the row verified, times 8, plus why not more: a
    `FewerDrafts`."""
    counts: IntArray
    """int32 `[rows]`: tokens that it yields."""

    @property
    def drafted(self) -> IntArray:
        """int32 `[rows]`: drafts that the row verified."""
        drafted: IntArray = self.limits // REASONS
        return drafted

    @property
    def accepted(self) -> IntArray:
        """int32 `[rows]`: verified drafts that equal the tokens of plain decoding."""
        return np.minimum(np.maximum(self.counts - 1, 0), self.drafted)

    def is_drafted(self, row: int) -> bool:
        """Whether a live row of the step, counted from its first decode row, verified drafts."""
        return row < len(self.limits) and bool(self.limits[row] >= REASONS)

    def fewer(self, count: int) -> IntArray:
        """int64 `[reasons]`: rows that verified fewer than `count`, by `FewerDrafts`."""
        reasons = self.limits[self.limits < count * REASONS] % REASONS
        return np.bincount(reasons, minlength=len(FewerDrafts))
