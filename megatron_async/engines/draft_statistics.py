"""Counters of drafts: how many were verified and accepted, by position, and why rows had fewer."""

from __future__ import annotations

import numpy as np

from megatron_async.contexts.draft_books import FewerDrafts, Verified
from megatron_async.contexts.step_plan import IntArray


class DraftStatistics:
    """Counts since the engine was made, for live decode rows, with tokens after an end included.

    Args:
        count: most drafts of a row.

    Attributes:
        drafted, accepted: int64 `[drafts]`: drafts that steps verified, and those that were what
            plain decoding says, by their position in the row.
        fewer: int64 `[reasons]`: rows that verified fewer than `count`, by `FewerDrafts`.
    """

    def __init__(self, count: int = 0) -> None:
        self.drafted = np.zeros(count, dtype=np.int64)
        self.accepted = np.zeros(count, dtype=np.int64)
        self.fewer = np.zeros(len(FewerDrafts), dtype=np.int64)

    def count(self, verified: Verified) -> None:
        """Add a step."""
        self.fewer += verified.fewer
        if not verified.drafted.any():
            return
        self.drafted += self._by_position(verified.drafted)
        self.accepted += self._by_position(verified.accepted)

    def _by_position(self, drafts: IntArray) -> IntArray:
        """How many rows have a draft at each position, int64 `[drafts]`."""
        exactly = np.bincount(drafts, minlength=len(self.drafted) + 1)
        by_position: IntArray = exactly[:0:-1].cumsum()[::-1]
        return by_position

    def as_dict(self) -> dict[str, float | int]:
        """The entries of `engine.stats()` about drafts."""
        drafted, accepted = int(self.drafted.sum()), int(self.accepted.sum())
        rows = int(self.drafted[0]) if len(self.drafted) else 0
        return {
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "mean_accepted_length": 1 + accepted / rows if rows else 0.0,
            **{f"drafted_tokens_at_{i}": int(n) for i, n in enumerate(self.drafted, 1)},
            **{f"accepted_tokens_at_{i}": int(n) for i, n in enumerate(self.accepted, 1)},
            **{f"fewer_drafts_{reason}": n for reason, n in self.fewer_by_reason.items()},
        }

    @property
    def fewer_by_reason(self) -> dict[str, int]:
        """`fewer` by the names of its reasons."""
        names = (reason.name.lower() for reason in FewerDrafts)
        return dict(zip(names, map(int, self.fewer), strict=True))
