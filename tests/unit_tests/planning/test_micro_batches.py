"""Micro-batches: requests join evenly, and the clock of the bubble says what a drawing says."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_async.planning.micro_batches import MicroBatches
from megatron_async.planning.request_slots import RequestSlots
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.sampling_params import SamplingParams
from tests.support.ready_requests import made_ready


def make_slots(count: int, capacity: int = 8) -> RequestSlots:
    return RequestSlots(capacity, 32, 4, count)


def admit(slots: RequestSlots, micro_batch: int) -> int:
    number = slots.capacity - slots.num_free
    request = DynamicInferenceRequest(
        request_id=number, prompt=None, sampling_params=SamplingParams()
    )
    request.prompt_tokens = np.arange(3, dtype=np.int32)
    return slots.acquire(made_ready(request, 9), number, 9, micro_batch)


def join(batches: MicroBatches, slots: RequestSlots, micro_batch: int, waiting: int) -> int:
    """Admit all that may; returns how many are left."""
    while waiting and batches.may_admit(micro_batch, waiting):
        assert admit(slots, micro_batch) % slots.num_micro_batches == micro_batch
        waiting -= 1
    return waiting


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("waiting", [1, 3, 4, 8, 11])
def test_requests_join_evenly(count, waiting):
    slots = make_slots(count)
    batches = MicroBatches(slots, 1)
    left = waiting
    for micro_batch in batches.in_turn():
        left = join(batches, slots, micro_batch, left)
    assert left == max(waiting - 8, 0)
    held = [slots.num_held_in(micro_batch) for micro_batch in range(count)]
    assert max(held) - min(held) <= 1


def test_a_gap_is_filled_first():
    slots = make_slots(2)
    batches = MicroBatches(slots, 1)
    held = [admit(slots, 0) for _ in range(3)] + [admit(slots, 1) for _ in range(3)]
    slots.release(held[1])
    slots.release(held[0])
    assert join(batches, slots, 1, 1) == 1
    assert join(batches, slots, 0, 1) == 0


def test_fewer_slots_than_micro_batches():
    slots = make_slots(3, capacity=2)
    batches = MicroBatches(slots, 1)
    assert [batches.may_admit(micro_batch, 5) for micro_batch in range(3)] == [True, True, False]


def test_turns():
    slots = make_slots(3)
    batches = MicroBatches(slots, 2)
    assert batches.in_turn() == [0, 1, 2]
    batches.took(1, feeds_back=True)
    assert batches.in_turn() == [2, 0, 1]


# (stages, lookahead, micro-batches with work, idle share): stage times drawn by hand
DRAWN = [
    (1, 0, 1, 0.0),
    (2, 0, 2, 1 / 2),
    (2, 1, 2, 0.0),
    (2, 3, 1, 1 / 2),
    (4, 3, 4, 0.0),
    (4, 4, 2, 1 / 2),
    (4, 1, 4, 1 / 2),
    (4, 2, 4, 1 / 4),
    (3, 2, 1, 2 / 3),
]


@pytest.mark.parametrize(("stages", "lookahead", "working", "idle"), DRAWN)
def test_bubble_of_steady_decode(stages, lookahead, working, idle):
    batches = MicroBatches(make_slots(stages), lookahead)
    for step in range(400):
        batches.took(step % working, feeds_back=True)
    assert batches.bubble_share == pytest.approx(idle, abs=0.01)


def test_prefill_does_not_wait_for_samples():
    batches = MicroBatches(make_slots(4), 3)
    for _ in range(100):
        batches.took(0, feeds_back=False)
    assert batches.bubble_share == 0
