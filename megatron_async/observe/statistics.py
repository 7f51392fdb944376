"""Counters of an engine's life, cheap enough to keep always."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from megatron_async.observe.draft_statistics import DraftStatistics

if TYPE_CHECKING:
    from megatron_async.config import InferenceConfig

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


SLOW_LAUNCH_NS = 1_000_000
"""A replayed step takes a tenth of that, one launched kernel by kernel several times as much."""


class NoOverlapReason(StrEnum):
    """Why a step was launched with nothing in flight. Each such step has exactly one reason."""

    AFTER_IDLE = "after_idle"
    """The engine was idle: there was no step before it to overlap with."""
    DRAINED = "drained"
    """The engine was paused or suspended since the step before."""
    SERIAL = "serial"
    """`lookahead` is 0."""
    NOTHING_TO_PLAN = "nothing_to_plan"
    """Before the steps in flight were resolved, no request could run: all were at their length
    limits, starved of blocks, or not yet there."""
    ROLLED_BACK = "rolled_back"
    """The steps in flight were discarded (policy "rollback")."""
    INTERRUPTED = "interrupted"
    """No other reason: a step was cut short (Ctrl-C, a cancelled `async_step`) and the steps in
    flight were resolved without a launch. An interrupted wait alone leaves `lookahead` of them in
    flight, so this is 0 unless something is wrong."""


@dataclass
class EngineStatistics:
    """Counts since the engine was made. Times are nanoseconds of the engine's own thread, waits not
    counted, where nothing else is said."""

    steps: int = 0
    """Steps launched."""
    dummy_steps: int = 0
    """Steps without rows, included in `steps`: other ranks had work and needed this rank's
    experts."""
    resolved_steps: int = 0
    overlapped_steps: int = 0
    """Steps launched before the step before them was resolved."""
    no_overlap: dict[NoOverlapReason, int] = field(
        default_factory=lambda: dict.fromkeys(NoOverlapReason, 0)
    )
    """The other steps, by reason: with `overlapped_steps` they make up `steps`."""
    last_reason: NoOverlapReason | None = None
    """Why the step launched last did not overlap; None if it did."""
    first_steps: int = 0
    """Steps launched on an idle engine: there was no work for a step before them. Also the first
    steps after a pause or a suspend, which had drained the steps before them."""
    captured_steps: int = 0
    """Steps that replayed a graph; the others launched their kernels one by one."""
    rows: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    """Tokens prefilled, recomputed ones included."""
    drafts: DraftStatistics = field(default_factory=DraftStatistics)
    old_drafts: DraftStatistics = field(default_factory=DraftStatistics)
    """Drafts, of these, in the first steps after each weight update, made by the old weights."""
    weight_updates: int = 0
    zombie_rows: int = 0
    discarded_steps: int = 0
    """Steps launched, taken back and launched again: under the policy "rollback" alone."""
    discarded_rows: int = 0
    """Rows of discarded steps; zombie rows are counted apart."""
    zombie_steps: int = 0
    """Resolved steps of which nothing could be used: all their rows were zombies."""
    failed_steps: int = 0
    finished_requests: int = 0
    finished_in_drafted_rows: int = 0
    """Finished requests whose last row verified drafts."""
    engine_pauses: int = 0
    engine_suspends: int = 0
    failed_requests: int = 0
    """Requests that failed, aborted ones included."""
    aborted_requests: int = 0
    peak_blocks: int = 0
    """Most KV blocks that were held when a step was planned."""
    peak_slots: int = 0
    """Most slots that were held when a step was planned."""
    late_steps: int = 0
    """Steps with decode rows that took longer than `InferenceConfig.target_tpot_ms`."""
    late_launches: int = 0
    """Launches before which the device had run out of work, with `InferenceConfig.late_launch`."""
    slow_launches: int = 0
    """Launches that took the thread more than `SLOW_LAUNCH_NS`."""
    slow_launch_ns: int = 0
    """Total time of these launches."""
    prepare_ns: int = 0
    launch_ns: int = 0
    resolve_ns: int = 0
    busy_s: float = 0.0
    """Seconds spent in steps while there was work."""
    idle: bool = True
    """Whether the last step left nothing to do."""
    drained: bool = False
    """Whether the engine was stopped since the last launch."""
    prepare_times: TimeHistogram = field(default_factory=TimeHistogram)
    launch_times: TimeHistogram = field(default_factory=TimeHistogram)
    resolve_times: TimeHistogram = field(default_factory=TimeHistogram)
    step_times: TimeHistogram = field(default_factory=TimeHistogram)
    """Wall times of whole calls of `step_modern` or `async_step`, waits included."""
    _noted: NoOverlapReason | None = None

    @classmethod
    def of(cls, config: InferenceConfig) -> EngineStatistics:
        """Counters of an engine with these settings, all zero."""
        drafts = (DraftStatistics(config.num_speculative_tokens) for _ in range(2))
        return cls(drafts=next(drafts), old_drafts=next(drafts))

    def note_no_overlap(self, reason: NoOverlapReason) -> None:
        """Say why the next step may not overlap. It counts if that step is launched with nothing in
        flight; of several, the first since the last launch does."""
        if self._noted is None:
            self._noted = reason

    def count_launch(
        self, rows: int, prefill_tokens: int, is_captured: bool, overlapped: bool, lookahead: int
    ) -> None:
        """Count a launched step."""
        self.steps += 1
        self.dummy_steps += rows == 0
        self.captured_steps += is_captured
        self.rows += rows
        self.prefill_tokens += prefill_tokens
        if overlapped:
            self.last_reason = None
            self.overlapped_steps += 1
        else:
            self.last_reason = self._reason(lookahead)
            self.no_overlap[self.last_reason] += 1
        self.first_steps += self.idle or self.drained
        self.idle = self.drained = False
        self._noted = None

    def _reason(self, lookahead: int) -> NoOverlapReason:
        if self.idle:
            return NoOverlapReason.AFTER_IDLE
        if self.drained:
            return NoOverlapReason.DRAINED
        if lookahead == 0:
            return NoOverlapReason.SERIAL
        return self._noted or NoOverlapReason.INTERRUPTED

    def count_prepare(self, nanoseconds: int, blocks: int, slots: int) -> None:
        """Add the time of a `prepare_step`, and how many blocks and slots are held after it, when
        occupancy is at its highest."""
        self.prepare_ns += nanoseconds
        self.prepare_times.add(nanoseconds)
        if blocks > self.peak_blocks:
            self.peak_blocks = blocks
        if slots > self.peak_slots:
            self.peak_slots = slots

    def count_launch_time(self, nanoseconds: int) -> None:
        """Add the time of a launch."""
        self.launch_ns += nanoseconds
        if nanoseconds > SLOW_LAUNCH_NS:
            self.slow_launches += 1
            self.slow_launch_ns += nanoseconds
        self.launch_times.add(nanoseconds)

    def count_resolve(self, nanoseconds: int, is_zombie: bool) -> None:
        """Add the time of a resolve, and whether all of the step's rows were zombies."""
        self.resolve_ns += nanoseconds
        self.resolve_times.add(nanoseconds)
        self.zombie_steps += is_zombie

    def count_step_time(self, seconds: float, idle: bool) -> None:
        """Add a step's wall time; `idle` says whether work is left."""
        self.busy_s += seconds
        self.step_times.add(int(seconds * 1e9))
        self.idle = idle

    @property
    def overlap_ratio(self) -> float:
        """Share of steps launched before the step before them was resolved. Steps that began a
        burst of work had none before them and are not counted."""
        return self.overlapped_steps / max(self.steps - self.first_steps, 1)

    def overlap_ratio_since(self, before: EngineStatistics) -> float:
        """`overlap_ratio` of the steps that a copy of these statistics, made before, has not."""
        steps, first = self.steps - before.steps, self.first_steps - before.first_steps
        return (self.overlapped_steps - before.overlapped_steps) / max(steps - first, 1)

    def as_dict(
        self, lookahead: int, of_context: Mapping[str, float | int], agreement_ns: int
    ) -> dict[str, float | int]:
        """The mapping that `engine.stats()` returns; docs/observing.md says what each name means.

        Args:
            lookahead: of the engine.
            of_context: counters of the engine's context.
            agreement_ns: nanoseconds that its ranks spent in agreeing on shapes.
        """
        steps = max(self.steps, 1)
        cpu_ns = self.prepare_ns + self.launch_ns + self.resolve_ns
        return {
            "steps": self.steps,
            "dummy_steps": self.dummy_steps,
            "lookahead": lookahead,
            "overlap_ratio": self.overlap_ratio,
            "overlapped_steps": self.overlapped_steps,
            **{f"no_overlap_{reason}": count for reason, count in self.no_overlap.items()},
            "captured_steps": self.captured_steps,
            "late_steps": self.late_steps,
            "late_launches": self.late_launches,
            "slow_launches": self.slow_launches,
            "slow_launch_seconds": self.slow_launch_ns / 1e9,
            "rows": self.rows,
            **self.drafts.as_dict(),
            "drafted_tokens_of_old_weights": int(self.old_drafts.drafted.sum()),
            "accepted_tokens_of_old_weights": int(self.old_drafts.accepted.sum()),
            "zombie_rows": self.zombie_rows,
            "zombie_steps": self.zombie_steps,
            "discarded_steps": self.discarded_steps,
            "discarded_rows": self.discarded_rows,
            "generated_tokens": self.generated_tokens,
            "prefill_tokens": self.prefill_tokens,
            "tokens_per_second": self.generated_tokens / self.busy_s if self.busy_s else 0.0,
            "busy_seconds": self.busy_s,
            "finished_requests": self.finished_requests,
            "finished_in_drafted_rows": self.finished_in_drafted_rows,
            "failed_requests": self.failed_requests,
            "aborted_requests": self.aborted_requests,
            "failed_steps": self.failed_steps,
            "weight_updates": self.weight_updates,
            "engine_pauses": self.engine_pauses,
            "engine_suspends": self.engine_suspends,
            **of_context,
            "slots_in_use_peak": self.peak_slots,
            "kv_blocks_in_use_peak": self.peak_blocks,
            "cpu_us_per_step": cpu_ns / 1e3 / steps,
            "prepare_us_per_step": self.prepare_ns / 1e3 / steps,
            "launch_us_per_step": self.launch_ns / 1e3 / steps,
            "resolve_us_per_step": self.resolve_ns / 1e3 / steps,
            "agreement_us": agreement_ns / 1e3 / steps,
            "agreement_seconds": agreement_ns / 1e9,
            **_percentiles("prepare", self.prepare_times),
            **_percentiles("launch", self.launch_times),
            **_percentiles("resolve", self.resolve_times),
            **_percentiles("step", self.step_times),
        }


class CountedEngine(Protocol):
    """An engine, as its counters are read."""

    statistics: EngineStatistics
    in_flight: deque[Any]

    def stats(self) -> Mapping[str, float | int]:
        """Counters and ratios since the engine was made."""


def _percentiles(stage: str, times: TimeHistogram) -> dict[str, float]:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {f"{stage}_us_{name}": times.percentile_us(share) for name, share in shares.items()}
