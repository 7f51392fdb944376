"""When a step should be wide: the expected gain in tokens from drafts against the time to verify
them.

A narrow step of R rows yields R tokens. A wide one takes 1 + x times as long and yields G tokens
more. It is the faster one where (R + G) / (1 + x) > R, so where G > x R.

*G.* A row whose newest report has n drafts, the first of which was right with share p lately, is
expected to gain p + p^2 + ... + p^n. (After a right draft the next one is right more often than the
first: on edited text 0.91 and 0.95 after 0.81. So the estimate is low.) A report is some steps old,
namely the steps in flight; text that repeats itself usually continues to.

*x.* A step reads all weights for any number of rows. So tokens cost little until products take
longer than reading: 2 bytes a weight at 4.3 TB/s against 2 operations a weight and token at
700 Tflop/s, 160 tokens on an H200. In addition each draft costs a share of attention, norms and
sampler: `SHARE` of a step, from the targets of verify steps (1.12 at 1 draft, 1.20 at 3).

If drafts are never right, a request runs some eight wide steps until p is small enough, and loses a
fifth of a narrow step in each. On other text a step is wide only while this is faster. Sums are
integers, so that every machine decides alike.
"""

from __future__ import annotations

import numpy as np

from megatron_async.contexts.step_plan import IntArray

ONE = 4096
"""Probability 1."""
LEARNING_SHIFT = 3
"""A new observation moves a share by 1/8 of the difference."""
FREE_TOKENS = 160
"""A step of up to so many query tokens takes as long as a step of one."""
SHARE = ONE // 20
"""Share of a narrow step's time, in units of 1 / `ONE`, that a wide step takes longer: once, and
again for each draft."""
_STEPS = 64
"""Number of steps into which probabilities are rounded."""
_MOST = 64
"""Most drafts of a row in the table."""


def _expected() -> IntArray:
    """Tokens expected of n drafts at probability p, times `ONE`, int64 `[p, n]`."""
    table = np.zeros((_STEPS + 1, _MOST + 1), dtype=np.int64)
    for step in range(_STEPS + 1):
        chance, sum_ = ONE, 0
        for count in range(1, _MOST + 1):
            chance = chance * step // _STEPS
            sum_ += chance
            table[step, count] = sum_
    return table


_EXPECTED = _expected()


def expected_gain(found: IntArray, right: IntArray) -> IntArray:
    """Expected gain in tokens from drafts, int64 `[rows]`, in units of 1 / `ONE`.

    Args:
        found: integers `[rows]`: drafts of each row.
        right: integers `[rows]`: how often its first draft was right, in units of 1 / `ONE`.
    """
    gain: IntArray = _EXPECTED[right * _STEPS // ONE, np.minimum(found, _MOST)]
    return gain


def is_wide_worth_it(rows: int, width: int, gain: int) -> bool:
    """Whether a step of this width is expected to yield more tokens in its time than one of width
    1.

    Args:
        rows: that decode.
        width: of the wide step.
        gain: the sum of their `expected_gain`.
    """
    return gain > extra_time(rows, width) * rows


def extra_time(rows: int, width: int) -> int:
    """Extra time of a wide step, in units of 1 / `ONE` of the time of a step of width 1."""
    narrow, wide = max(rows, FREE_TOKENS), max(rows * width, FREE_TOKENS)
    return ONE * (wide - narrow) // narrow + SHARE * width
