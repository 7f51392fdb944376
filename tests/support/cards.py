"""How many GPUs ("cards") a test runs on, and which of the machine's.

A test says it by `@pytest.mark.gpu` (one) or `@pytest.mark.gpus(4)`; where there are fewer, it is
skipped. `scripts/test.sh --gpus` runs pytest once for each of `SIZES`, with `--cards 2/4`: the
tests of 2 cards, on a machine with 4. Then each worker sees cards of its own: two tests of 2 cards
run side by side there, and a test of 4 alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest

SIZES = (1, 2, 4)
"""Cards of a test; test.sh has the same numbers."""


class Cards(NamedTuple):
    """What `--cards EACH/THERE` says: cards of each test of this run, and of the machine."""

    each: int
    there: int

    @staticmethod
    def parse(text: str) -> Cards:
        """Raises UsageError unless the text is two such numbers."""
        each, _, there = text.partition("/")
        if not (each.isdecimal() and there.isdecimal() and int(each) in SIZES):
            raise pytest.UsageError(
                f"--cards {text}: write 2/4 for the tests of 2 cards on a machine with 4; a test "
                f"has one of {SIZES}."
            )
        return Cards(int(each), int(there))

    def runs(self, needed: int) -> bool:
        """Whether a test that needs so many cards belongs to this run. Tests that need more
        than there are belong to the run of one card, which says why it skips them."""
        return (1 if needed > self.there else needed) == self.each

    def of_worker(self, number: int, names: Sequence[str] = ()) -> list[str]:
        """The cards that a worker sees, of `names` in CUDA_VISIBLE_DEVICES (none: their numbers);
        workers beyond the last card begin again at the first."""
        names = names or [str(card) for card in range(self.there)]
        first = self.each * (number % max(self.there // self.each, 1))
        return list(names[first : first + self.each])


def needed_by(item: pytest.Item) -> int:
    """The cards of a test, 0 for none; a UsageError if its mark's number is not one of `SIZES`."""
    mark = item.get_closest_marker("gpus")
    if mark is None:
        return int(item.get_closest_marker("gpu") is not None)
    if mark.kwargs or len(mark.args) != 1 or mark.args[0] not in SIZES:
        raise pytest.UsageError(f"{item.nodeid}: gpus({mark.args}) must have one of {SIZES}.")
    return int(mark.args[0])


def on_cards(cases: Iterable[Any]) -> list[Any]:
    """Cases (tuples of values, or numbers of ranks alone) whose last value is the number of their
    ranks, each of which has a card."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=pytest.mark.gpus(row[-1])) for row in rows]


def lack_of(needed: int, there: int) -> str:
    """Why a test is skipped, or ""."""
    return f"needs {needed} GPU(s), {there} here" if needed > there else ""
