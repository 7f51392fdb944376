"""Every combination of model, drafter, number of drafts, lookahead and mode of sampling says what
plain decoding says.

The suite plays some of them, drawn by a seed; all of them, once:

    MEGATRON_ASYNC_ALL_DRAFTS=1 pytest tests/functional_tests/drafts/test_all_drafts.py
"""

import itertools
import os
import random

import pytest

from tests.support.drawn_drafts import MODES, DrawnSchedules
from tests.support.mtp_model import MTP_MODELS

METHODS = ("oracle", "wrong", "fickle", "ngram", "mtp")
COMBINATIONS = list(itertools.product(MTP_MODELS, METHODS, (1, 2, 3, 4), (0, 1, 2), MODES))
DRAWN = 36
"""Cases of these that the suite runs."""


def chosen() -> list[tuple[str, str, int, int, str]]:
    """The combinations that are played."""
    if os.environ.get("MEGATRON_ASYNC_ALL_DRAFTS"):
        return COMBINATIONS
    return random.Random(0).sample(COMBINATIONS, DRAWN)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", METHODS)
def test_every_combination(method: str) -> None:
    """Break it: `feed_back` that yields one token behind the first wrong draft."""
    drawn = DrawnSchedules({name: kind() for name, kind in MTP_MODELS.items()})
    combinations = [each for each in chosen() if each[1] == method]
    for name, _, count, lookahead, mode in combinations:
        seed = COMBINATIONS.index((name, method, count, lookahead, mode))
        drawn.play(seed, name, method, count, lookahead, mode=mode)
    drawn.close()
    seen = drawn.seen
    accepted, drafted = seen["accepted_tokens"], seen["drafted_tokens"]
    assert drafted > 10 * len(combinations)
    least, most = {"oracle": (0.9, 1.0), "wrong": (0.0, 0.0), "fickle": (0.3, 0.8)}.get(
        method, (0.2, 1.0)
    )
    assert least <= accepted / drafted <= most, seen
