"""When a step is worth being wide: tokens that drafts are expected to bring against the time that
verifying them takes.

A narrow step of R rows yields R tokens. A wide one takes 1 + x times as long and yields G tokens
more. It is the faster one where (R + G) / (1 + x) > R, so where G > x R.

*G.* A row whose newest report has n drafts, the first of which was right with share p lately, is
expected to bring p + p^2 + ... + p^n. (Behind a right draft the next is right more often than the
first was: on edited text 0.91 and 0.95 behind 0.81. So this is on the safe side.) A report is older
than the step that is planned by the steps in flight; a text that repeats itself goes on doing so.

*x.* A step reads all weights whatever its rows are, so tokens cost little up to where products
take longer than reading: 2 bytes a weight at 4.3 TB/s against 2 operations a weight and token at
700 Tflop/s, 160 tokens on an H200. Each draft costs a share of attention, of norms and of the
sampler on top: `SHARE` of a step, as the targets of verify steps say (1.12 at 1 draft, 1.20 at 3).

Where drafts are never right, a request loses some eight wide steps until p is small enough, a fifth
of a narrow step each; on other text a step is wide only while it wins. Sums are integers, so
that every machine decides alike.
"""

from __future__ import annotations

import numpy as np

from megatron_async.contexts.step_plan import IntArray

ONE = 4096
"""Probability 1."""
LEARNING_SHIFT = 3
"""A new observation moves a share by 1/8 of the difference."""
FREE_TOKENS = 160
"""Query tokens of a step that cost no more than one does."""
SHARE = ONE // 20
"""Of a narrow step's time: what a wide one takes longer, once and for each draft."""
_STEPS = 64
"""Probabilities that are told apart."""
_MOST = 64
"""Drafts of a row, in the table."""


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
    """Tokens that drafts are expected to bring, int64 `[rows]`, of `ONE`.

    Args:
        found: integers `[rows]`: drafts of each row.
        right: integers `[rows]`: how often its first draft was right, of `ONE`.
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
    """What a wide step takes longer than one of width 1, of `ONE` such steps."""
    narrow, wide = max(rows, FREE_TOKENS), max(rows * width, FREE_TOKENS)
    return ONE * (wide - narrow) // narrow + SHARE * width
