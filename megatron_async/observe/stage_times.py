"""How long the stages of a step take: histograms with fixed logarithmic buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

BUCKETS_PER_OCTAVE = 2
FIRST_OCTAVE = 10
"""The first bucket ends at 2**10 ns, 1 microsecond."""
LAST_OCTAVE = 34
"""The last bucket but one ends at 2**34 ns, 17 seconds; the last holds what is longer."""

BOUNDS_NS: tuple[float, ...] = tuple(
    2.0 ** (half / BUCKETS_PER_OCTAVE)
    for half in range(FIRST_OCTAVE * BUCKETS_PER_OCTAVE, LAST_OCTAVE * BUCKETS_PER_OCTAVE + 1)
)
"""Upper bounds of all buckets but the last, nanoseconds: two buckets for each doubling."""

_FIRST = FIRST_OCTAVE * BUCKETS_PER_OCTAVE
_LAST = len(BOUNDS_NS)


def _no_counts() -> list[int]:
    return [0] * (len(BOUNDS_NS) + 1)


@dataclass(slots=True)
class TimeHistogram:
    """Times, counted by bucket; what is between two bounds is not told apart."""

    counts: list[int] = field(default_factory=_no_counts)
    """How many times lie in each bucket, one more than `BOUNDS_NS`."""

    def add(self, nanoseconds: int) -> None:
        """Count one time."""
        # The bits of the square number the half octaves, without a logarithm.
        bucket = (nanoseconds * nanoseconds).bit_length() - _FIRST
        if bucket < 0:
            bucket = 0
        elif bucket > _LAST:
            bucket = _LAST
        self.counts[bucket] += 1

    @property
    def count(self) -> int:
        """Times counted."""
        return sum(self.counts)

    def percentile_us(self, share: float) -> float:
        """The time, microseconds, that `share` (0 to 1) of all times do not exceed, taken as spread
        evenly inside their bucket; 0 where there are none."""
        return percentile_ns(self.counts, share) / 1e3


def percentile_ns(counts: Sequence[int], share: float) -> float:
    """`TimeHistogram.percentile_us` of bucket counts, nanoseconds. The last bucket has no end: its
    times are given as its beginning."""
    wanted, before = share * sum(counts), 0
    if not wanted:
        return 0.0
    for bucket, count in enumerate(counts[:-1]):
        if before + count >= wanted:
            low = BOUNDS_NS[bucket - 1] if bucket else 0.0
            return low + (BOUNDS_NS[bucket] - low) * (wanted - before) / count
        before += count
    return BOUNDS_NS[-1]
