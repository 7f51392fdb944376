"""`TokenRoutes.whole`: what it takes for the usual step is what `split` makes of it, and it leaves
all others alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.serving.messages import Ended, LogProbRows, StepTokens
from megatron_async.serving.step_arrays import StepArrays, by_row
from megatron_async.serving.token_routes import SMALLEST, TokenRoutes

HERE, THERE = 3, 4
"""Replicas."""


def routes(clients: list[int], replicas: list[int]) -> TokenRoutes:
    """Requests 0, 1, ... of these clients, at these replicas; clients call them 100, 101, ..."""
    made = TokenRoutes()
    for place, (client, replica) in enumerate(zip(clients, replicas, strict=True)):
        made.give(made.add(client, 100 + place), replica)
    return made


def step(numbers: list[int], counts: list[int]) -> StepTokens:
    tokens = np.arange(sum(counts), dtype=np.int32)
    return StepTokens(
        np.array(numbers, np.int64).tobytes(), np.array(counts, np.int32).tobytes(),
        tokens.tobytes(),
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 2), st.sampled_from([HERE, THERE])), min_size=1, max_size=4),
    st.data(),
)
def test_it_agrees_with_split(requests: list[tuple[int, int]], data: st.DataObject) -> None:
    """Break it: `whole` that does not look at clients, at the replica, or at numbers."""
    made = [routes([c for c, _ in requests], [r for _, r in requests]) for _ in range(2)]
    rows = data.draw(st.lists(st.integers(0, len(requests)), min_size=1, max_size=4, unique=True))
    count = data.draw(st.integers(0, 2))
    message = step(rows, [count] * len(rows))
    found = made[0].whole(HERE, message)
    parts = dict(made[1].split(HERE, StepArrays.of(message)))
    is_usual = count and rows[-1] < len(requests) and max(rows) < len(requests)
    is_usual = is_usual and {requests[row] for row in rows} in ({(1, HERE)}, {(2, HERE)})
    assert (found is not None) == bool(is_usual)
    if found is not None:
        assert dict([found]) == parts
        assert (made[0].started == made[1].started).all()
    else:
        assert not made[0].started.any()


@pytest.mark.parametrize(
    "broken",
    [
        StepTokens(),
        StepTokens(bytes(8), bytes([1, 0, 0, 0]), b""),
        StepTokens(bytes(7), bytes([1, 0, 0, 0]), bytes(4)),
        StepTokens(bytes(8), bytes([1, 0, 0]), bytes(4)),
        StepTokens(bytes(8), bytes([255, 255, 255, 255]), bytes(4)),
        StepTokens(bytes(8), bytes([2, 0, 0, 0]), bytes(4)),
        StepTokens(bytes(8), bytes([1, 0, 0, 0]) * 2, bytes(4)),
        StepTokens(bytes(8), bytes([1, 0, 0, 0]), bytes(4), LogProbRows(b"", 0, b"")),
    ],
)
def test_it_takes_nothing_that_does_not_fit(broken: StepTokens) -> None:
    assert routes([1], [HERE]).whole(HERE, broken) is None


def test_a_number_at_the_place_of_another_is_nobodys() -> None:
    """Break it: `whole` that does not compare numbers."""
    assert routes([1], [HERE]).whole(HERE, step([SMALLEST], [1])) is None


def test_steps_of_the_same_requests_become_rows() -> None:
    """Break it: `by_row` without `.T`."""
    numbers, tokens = np.array([5, 6], np.int64), np.array([1, 10, 2, 20, 3, 30], np.int32)
    end = Ended(5, "length")
    told = by_row(StepTokens(numbers.tobytes(), b"", tokens.tobytes(), None, [], [end], 3))
    arrays = StepArrays.of(told)
    assert arrays.numbers.tolist() == [5, 6]
    assert arrays.counts.tolist() == [3, 3]
    assert arrays.tokens.tolist() == [1, 2, 3, 10, 20, 30]
    assert told.ends == [end]


@pytest.mark.parametrize(
    ("numbers", "size", "steps"),
    [(b"", 0, 1), (b"", 0, 2**31 - 1), (bytes(8), 4, 2), (bytes(9), 4, 1), (bytes(16), 12, 2)],
)
def test_steps_that_do_not_fit_are_no_steps(numbers: bytes, size: int, steps: int) -> None:
    """A replica that tells them is lost, as with other arrays that do not fit."""
    with pytest.raises(ValueError, match="do not fit together"):
        by_row(StepTokens(numbers, b"", bytes(size), steps=steps))
