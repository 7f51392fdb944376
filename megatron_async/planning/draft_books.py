"""`DraftBooks`: reports of drafts from booked steps, by slot.

Every step drafts, also one of width 1, and reports its drafts in the sample ring. `DraftBooks`
keeps the newest report of each request, compares it with the next tokens, and counts which verified
drafts were accepted.

When a step should be wide: the expected gain in tokens from drafts against the time to verify
them.

A narrow step of R rows yields R tokens. A wide one takes 1 + x times as long and yields G tokens
more. It is the faster one where (R + G) / (1 + x) > R, so where G > x R.

*G.* A row whose newest report has n drafts, the first of which was right with share p lately, is
expected to gain p + p^2 + ... + p^n. (After a right draft the next one is right more often than the
first: on edited text 0.91 and 0.95 after 0.81. So the estimate is low.) A report is some steps old,
namely the steps in flight; text that repeats itself usually continues to. For the same reason a row
whose newest report has none may have drafts when the step runs: h (1 + p + ... + p^(n-1)) tokens
are expected of it, if a step lately had a right first draft with share h.

*x.* A step reads all weights for any number of rows. So tokens cost little until products take
longer than reading. Measured on Llama-3.1-8B's shape (docs/records/speculation.md, products.md):
64 rows that verify 1 or 3 drafts take 1.20 and 1.70 of a plain step, and products of 512 rows 2.5
times as long as of 16: `FREE_TOKENS` and `DOUBLING_TOKENS`. In addition verifying costs a share of
attention, norms and sampler: 1 row takes 1.07 with 1 draft and 1.10 with 3 (`ONCE`, `EACH`;
SmolLM2-135M: 1.05 with 3).

If drafts are never right, a request runs some eight wide steps until p is small enough, and loses a
tenth of a narrow step in each. On other text a step is wide only while this is faster. Sums are
integers, so that every machine decides alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async.observe.verified_drafts import REASONS, FewerDrafts, Verified
from megatron_async.ops.sampling.slot_records import RowFeature
from megatron_async.planning.request_slots import RequestSlots
from megatron_async.planning.step_plan import IntArray, StepPlan

ONE = 4096
"""Probability 1."""
LEARNING_SHIFT = 3
"""A new observation moves a share by 1/8 of the difference."""
FREE_TOKENS = 80
"""A step of up to this many query tokens takes as long as a step of one."""
DOUBLING_TOKENS = 270
"""Further query tokens that together take as long as a step of one."""
ONCE = ONE // 20
"""Share of a narrow step's time, in units of 1 / `ONE`, that a wide step takes longer."""
EACH = ONE // 60
"""Share for each draft, in the same units."""
_STEP_SHIFT = 6
"""Probabilities are rounded to 64 steps: units of 1 / `ONE` shifted by so many bits."""


class ExpectedGain:
    """How many tokens a wide step is expected to gain.

    Args:
        count: most drafts of a row.
    """

    def __init__(self, count: int) -> None:
        steps = (ONE >> _STEP_SHIFT) + 1
        self._columns = count + 1
        chance = np.arange(steps, dtype=np.int64)
        table = np.zeros((steps, self._columns), dtype=np.int64)
        power = np.full(steps, ONE, dtype=np.int64)
        for drafts in range(1, self._columns):
            power = power * chance // (steps - 1)
            table[:, drafts] = table[:, drafts - 1] + power
        # Tokens expected of n drafts at probability p, at [p * columns + n]: NumPy finds an entry
        # by one number in a quarter of the time that two take.
        self._table = table.ravel()

    def of(self, found: IntArray, right: IntArray, hits: IntArray, allowed: IntArray) -> IntArray:
        """Expected gain from rows, int64 `[rows]`, in units of 1 / `ONE`.

        Args:
            found: integers `[rows]`: drafts of each row's newest report.
            right: integers `[rows]`: how often its first draft was right, in units of 1 / `ONE`.
            hits: integers `[rows]`: how many of its steps had a first draft that was right, in the
                same units.
            allowed: integers `[rows]`: most drafts that the row may have; 0 only without hits.
        """
        line = (right >> _STEP_SHIFT) * self._columns
        with_drafts = np.count_nonzero(found)
        if with_drafts == len(found):
            return self._table.take(line + found)
        gain: IntArray = hits * (ONE + self._table.take(line + allowed - 1)) // ONE
        if with_drafts:
            gain = np.where(found > 0, self._table.take(line + found), gain)
        return gain

    def of_row(self, found: int, right: int, hits: int, allowed: int) -> int:
        """`of` one row."""
        line = (right >> _STEP_SHIFT) * self._columns
        if found:
            return int(self._table[line + found])
        return hits * (ONE + int(self._table[line + allowed - 1])) // ONE


def is_wide_worth_it(rows: int, width: int, gain: int) -> bool:
    """Whether a step of this width is expected to yield more tokens in its time than one of width
    1.

    Args:
        rows: that decode.
        width: of the wide step.
        gain: the sum of their `ExpectedGain`.
    """
    return gain > extra_time(rows, width) * rows


def extra_time(rows: int, width: int) -> int:
    """Extra time of a wide step, in units of 1 / `ONE` of the time of a step of width 1."""
    narrow = max(rows - FREE_TOKENS, 0)
    wide = max(rows * width - FREE_TOKENS, 0)
    more = ONE * (wide - narrow) // (DOUBLING_TOKENS + narrow)
    return more + ONCE + EACH * (width - 1)


FEW_ROWS = 4
"""Up to this many rows are booked one by one, in 5 microseconds each: arrays take 20 for any
number, and, after a wait that has emptied the caches, 80."""


FOUND, FIRST, RIGHT, HITS, GAIN, MOST = range(6)
"""Rows of what is kept of requests: the number of drafts in the newest report and its first draft;
running shares of first drafts that were right, and of steps that had a right one, and the expected
gain in tokens of a wide step, in units of 1 / `ONE`; and the most drafts that the request may have,
as in `Verified.limits`."""
# NumPy takes an `IntEnum` for an unknown object, for microseconds.
_BY_GRAMMAR, _BY_REQUEST, _BY_LENGTH, _BY_FINDING, _BY_BLOCKS, _BY_STEP = map(int, FewerDrafts)
_ONE = np.int32(ONE)


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
        self._expected = ExpectedGain(count)
        self.chooses_widths = chooses_widths
        self._generation = np.full(slots.capacity, -1, dtype=np.int64)
        """Generation of the request to which the slot's entries belong."""
        self._entries = np.zeros((MOST + 1, slots.capacity), dtype=np.int32)
        """int32 `[MOST + 1, slots]`: one array, as a call of NumPy takes as long as its work on
        many rows."""

    def width_for(self, wants: NDArray[np.bool_]) -> int:
        """The width of the step that is planned.

        Args:
            wants: bool `[slots]`: the rows that want to decode.
        """
        most = self._slots.max_width
        if not self.chooses_widths:
            return most
        drafting = wants & (self._generation == self._slots.generation)
        gain = int(self._entries[GAIN, drafting].sum())
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
        if len(plan.slots) <= FEW_ROWS:
            return self._book_few(plan, sampled, counts, drafts)
        slots, owners, generation = self._slots, plan.slots, plan.generations
        decoding, live = plan.num_decode, slots.generation[owners] == generation
        if decoding < len(owners):
            live &= plan.produces
        if not live.all():
            owners, generation, sampled = owners[live], generation[live], sampled[live]
            counts, drafts = counts[live], drafts[live]
            decoding = int(np.count_nonzero(live[:decoding]))
        entries = self._entries.take(owners, axis=1)
        is_known = self._generation[owners] == generation
        if not is_known.all():
            entries[:, ~is_known] = self._new_entries(owners[~is_known])
            self._generation[owners] = generation
        limits = self._limits(plan, owners[:decoding], entries[:, :decoding])
        before, first, right, hits, gain, most = entries
        # Compared with the drafts reported before, whether a step verified these or not.
        had = before > 0
        target = (had & (first == sampled[:, 0])) * _ONE
        right += _step_to(right, target) * had
        hits += _step_to(hits, target)
        (drafts >= 0).sum(axis=1, out=before)
        first[:] = drafts[:, 0]
        gain[:] = self._expected.of(before, right, hits, most // REASONS)
        self._entries[:, owners] = entries
        return Verified(limits, counts[:decoding].copy())

    def _book_few(
        self, plan: StepPlan, sampled: IntArray, counts: IntArray, drafts: IntArray
    ) -> Verified:
        """`book`, row by row."""
        slots, limits, yielded = self._slots, [], []
        by_step = self._limit_of(plan)
        for row, slot in enumerate(plan.slots.tolist()):  # sync-ok: NumPy, of few rows
            generation = plan.generations[row]
            decodes = row < plan.num_decode
            if slots.generation[slot] != generation or not (decodes or plan.produces[row]):
                continue
            if self._generation[slot] != generation:
                self._entries[:, slot] = self._new_entries(np.array([slot]))[:, 0]
                self._generation[slot] = generation
            found, first, right, hits, _, most = self._entries[:, slot].tolist()  # sync-ok: NumPy
            if decodes:
                left = max(int(slots.max_length[slot] - slots.num_known[slot]) - 1, 0)
                limit = min(most, found * REASONS + _BY_FINDING, left * REASONS + _BY_LENGTH)
                limits.append(min(limit, by_step))
                yielded.append(counts[row])
            target = ONE if found and first == sampled[row, 0] else 0
            right += _step_to(right, target) if found else 0
            hits += _step_to(hits, target)
            report = drafts[row].tolist()  # sync-ok: NumPy
            found = sum(draft >= 0 for draft in report)
            gain = self._expected.of_row(found, right, hits, most // REASONS)
            self._entries[:MOST, slot] = found, report[0], right, hits, gain
        return Verified(np.array(limits, dtype=np.int32), np.array(yielded, dtype=np.int32))

    def _new_entries(self, owners: IntArray) -> IntArray:
        """Entries of requests of which nothing is known."""
        slots = self._slots
        entries = np.zeros((MOST + 1, len(owners)), dtype=np.int32)
        entries[RIGHT] = ONE // 2
        by_grammar = (slots.features[owners] & RowFeature.CONSTRAINED) != 0
        asked = np.minimum(slots.drafts[owners], self._count) * REASONS + _BY_REQUEST
        entries[MOST] = np.where(by_grammar, _BY_GRAMMAR, asked)
        return entries

    def _limits(self, plan: StepPlan, owners: IntArray, entries: IntArray) -> IntArray:
        """Drafts that decode rows verified, and why not more: `Verified.limits`."""
        slots = self._slots
        left = np.maximum(slots.max_length[owners] - slots.num_known[owners] - 1, 0)
        limits = np.minimum(entries[MOST], entries[FOUND] * REASONS + _BY_FINDING)
        limits = np.minimum(limits, left * REASONS + _BY_LENGTH)
        by_step: IntArray = np.minimum(limits, self._limit_of(plan))
        return by_step

    def _limit_of(self, plan: StepPlan) -> int:
        """The limit that a step sets to all its rows."""
        return (plan.width - 1) * REASONS + (_BY_BLOCKS if plan.short_of_blocks else _BY_STEP)


def _step_to(share: Any, target: Any) -> Any:
    """How far a running share moves to a new observation: integers, or arrays of them."""
    return (target - share) >> LEARNING_SHIFT
