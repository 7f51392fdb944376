"""Counters of drafts: how many were verified and accepted, by position, and why rows had fewer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_async.observe.verified_drafts import FewerDrafts, IntArray, Verified

BATCH = 128
"""Steps that are counted at once: counting one takes as long as counting many."""


class _Counts(NamedTuple):
    drafted: IntArray
    accepted: IntArray
    fewer: IntArray


class DraftStatistics:
    """Counts since the engine was made, for live decode rows, with tokens after an end included."""

    def __init__(self, count: int = 0) -> None:
        self._count = count
        zeros = np.zeros(count, dtype=np.int64)
        # In one attribute, so that other threads read counts and the steps that they lack.
        self._state: tuple[_Counts, list[Verified]] = (
            _Counts(zeros, zeros, np.zeros(len(FewerDrafts), dtype=np.int64)), []
        )  # fmt: skip

    def count(self, verified: Verified) -> None:
        """Add a step."""
        _, steps = self._state
        steps.append(verified)
        if len(steps) >= BATCH:
            self._state = (self._counts(), [])

    def _counts(self) -> _Counts:
        counts, steps = self._state
        if not steps:
            return counts
        limits, yielded = zip(*steps, strict=True)
        rows = Verified(np.concatenate(limits), np.concatenate(yielded))
        return _Counts(
            counts.drafted + self._by_position(rows.drafted),
            counts.accepted + self._by_position(rows.accepted),
            counts.fewer + rows.fewer(self._count),
        )

    @property
    def drafted(self) -> IntArray:
        """Drafts that steps verified, by their position in the row, int64 `[drafts]`."""
        return self._counts().drafted

    @property
    def accepted(self) -> IntArray:
        """Drafts that were what plain decoding says, by position, int64 `[drafts]`."""
        return self._counts().accepted

    @property
    def fewer(self) -> IntArray:
        """Rows that verified fewer than the most, by `FewerDrafts`, int64 `[reasons]`."""
        return self._counts().fewer

    def _by_position(self, drafts: IntArray) -> IntArray:
        """How many rows have a draft at each position, int64 `[drafts]`."""
        exactly = np.bincount(drafts, minlength=self._count + 1)
        by_position: IntArray = exactly[:0:-1].cumsum()[::-1]
        return by_position

    def as_dict(self) -> dict[str, float | int]:
        """The entries of `engine.stats()` about drafts."""
        counts = self._counts()
        drafted, accepted = int(counts.drafted.sum()), int(counts.accepted.sum())
        rows = int(counts.drafted[0]) if self._count else 0
        return {
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "mean_accepted_length": 1 + accepted / rows if rows else 0.0,
            **{f"drafted_tokens_at_{i}": int(n) for i, n in enumerate(counts.drafted, 1)},
            **{f"accepted_tokens_at_{i}": int(n) for i, n in enumerate(counts.accepted, 1)},
            **{f"fewer_drafts_{reason}": n for reason, n in self.fewer_by_reason.items()},
        }

    @property
    def fewer_by_reason(self) -> dict[str, int]:
        """`fewer` by the names of its reasons."""
        names = (reason.name.lower() for reason in FewerDrafts)
        return dict(zip(names, map(int, self.fewer), strict=True))
