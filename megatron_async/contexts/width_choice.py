"""When a step should be wide: the expected gain in tokens from drafts against the time to verify
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

import numpy as np

from megatron_async.contexts.step_plan import IntArray

ONE = 4096
"""Probability 1."""
LEARNING_SHIFT = 3
"""A new observation moves a share by 1/8 of the difference."""
FREE_TOKENS = 80
"""A step of up to so many query tokens takes as long as a step of one."""
DOUBLING_TOKENS = 270
"""So many tokens beyond them take as long as such a step does."""
ONCE = ONE // 20
"""Share of a narrow step's time, in units of 1 / `ONE`, that a wide step takes longer."""
EACH = ONE // 60
"""Such a share for each draft."""
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
