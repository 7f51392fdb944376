"""Cases of a full product of parameters in which every two values still meet.

A bug that needs three values at once is rarer than the time that all cases take is dear. A test
says so itself, with `@pytest.mark.pairs`; `MEGATRON_ASYNC_ALL_CASES=1` runs the whole product.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

ALL_CASES = "MEGATRON_ASYNC_ALL_CASES"
LEAST = 2
"""Cases that each value is in, if it was in so many."""
Value = tuple[str, int]
"""A parameter's name, and the number of one of its values."""


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The cases that pairs do not need, of tests that are marked."""
    if os.environ.get(ALL_CASES) == "1":
        return []
    tests: defaultdict[tuple[Any, ...], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairs"):
            tests[item.path, item.cls, item.originalname].append(item)
    found: list[pytest.Item] = []
    for cases in tests.values():
        kept = set(needed(values_of(cases)))
        found += [case for number, case in enumerate(cases) if number not in kept]
    return found


def values_of(cases: Sequence[pytest.Function]) -> list[frozenset[Value]]:
    """The values of each case, numbered as they come: not each can be hashed."""
    seen: defaultdict[str, list[Any]] = defaultdict(list)
    found = []
    for case in cases:
        values = set()
        for name, value in case.callspec.params.items():
            if value not in seen[name]:
                seen[name].append(value)
            values.add((name, seen[name].index(value)))
        found.append(frozenset(values))
    return found


def needed(cases: Sequence[frozenset[Value]]) -> list[int]:
    """Which cases to keep: always the one with most pairs that are new; the first of equal ones.
    Every pair of values that is in a case is in one of these, and each value in `LEAST`."""
    pairs = [{tuple(sorted(pair)) for pair in combinations(case, 2)} for case in cases]
    missing = set().union(*pairs)
    wanted = {
        value: min(count, LEAST)
        for value, count in Counter(value for case in cases for value in case).items()
    }
    kept: list[int] = []
    rest = list(range(len(cases)))
    while missing or any(count > 0 for count in wanted.values()):
        best = max(
            rest,
            key=lambda n: (
                len(pairs[n] & missing), sum(wanted[value] > 0 for value in cases[n]), -n
            ),
        )  # fmt: skip
        rest.remove(best)
        kept.append(best)
        missing -= pairs[best]
        for value in cases[best]:
            wanted[value] -= 1
    return kept
