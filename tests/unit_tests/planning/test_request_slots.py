"""Slots of requests, and micro-batches: requests join evenly, and the clock of the bubble says what
a drawing says."""

import numpy as np
import pytest

from megatron_async import DynamicInferenceRequest, SamplingParams
from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.ops.sampling.slot_records import RowFeature
from megatron_async.planning.admission import ARRIVALS, MAX_PRIORITY, AdmissionQueue, rank_of
from megatron_async.planning.micro_batches import MicroBatches
from megatron_async.planning.request_slots import NO_TOKEN, RequestSlots, SlotState
from tests.support.ready_requests import made_ready


@pytest.fixture
def slots():
    return RequestSlots(capacity=3, max_sequence_length=16, max_blocks=4)


def request(request_id, prompt=(1, 2, 3), generated=(), **params):
    return DynamicInferenceRequest(
        request_id=request_id,
        prompt_tokens=np.array(prompt, np.int32),
        generated_tokens=list(generated),
        sampling_params=SamplingParams(**params),
    )


def acquire(slots, request_id=0, **kwargs):
    return slots.acquire(made_ready(request(request_id, **kwargs), 10), request_id, max_length=10)


def test_a_slot_is_released_to_the_next_generation(slots):
    slot = acquire(slots, 7)
    assert slots.num_free == 2
    assert slots.state[slot] == SlotState.PREFILLING
    assert slots.request_at(slot).request_id == slots.request_id[slot] == 7
    slots.block_table[slot, :2], slots.num_blocks[slot] = (8, 9), 2
    generation = slots.generation[slot]
    released = slots.release(slot)
    assert released.tolist() == [8, 9]
    slots.block_table[slot] = 0
    assert released.tolist() == [8, 9], "the caller's own copy"
    assert slots.generation[slot] == generation + 1
    assert slots.state[slot] == SlotState.FREE
    assert slots.num_blocks[slot] == 0
    with pytest.raises(AssertionError, match=f"slot {slot} is free"):
        slots.request_at(slot)
    assert acquire(slots, 8) == slot
    assert slots.generation[slot] == generation + 1


def test_an_evicted_request_brings_its_tokens_back(slots):
    slot = acquire(slots, prompt=(4, 5), generated=(6, 7, 8))
    assert slots.num_known[slot] == slots.at_least(slot) == slots.at_most(slot) == 5
    assert slots.tokens[slot, :5].tolist() == [4, 5, 6, 7, 8]
    assert slots.prompt_length[slot] == 2
    assert slots.num_prefilled[slot] == 0
    assert slots.generated_tokens(slot) == [6, 7, 8]
    assert all(type(token) is int for token in slots.generated_tokens(slot))


def test_stop_ids_grow_and_leave_nothing_to_the_next_owner(slots):
    first = acquire(slots, 0, termination_id=2)
    second = acquire(slots, 1, termination_id=None, stop_token_ids=[5, 6, 7])
    assert slots.stop_ids[first].tolist() == [2, NO_TOKEN, NO_TOKEN, NO_TOKEN]
    assert slots.stop_ids[second].tolist() == [NO_TOKEN, 5, 6, 7]
    slots.release(second)
    assert acquire(slots, 2, termination_id=9) == second
    assert slots.stop_ids[second].tolist() == [9, NO_TOKEN, NO_TOKEN, NO_TOKEN]


def test_a_slot_has_the_mode_and_the_features_of_its_request(slots):
    assert slots.sampling_mode[acquire(slots, 0)] == SamplingMode.SOFTMAX
    slot = acquire(slots, 1, temperature=0.0, presence_penalty=0.5)
    assert slots.sampling_mode[slot] == SamplingMode.PROCESSED
    assert slots.features[slot] == RowFeature.PENALTIES
    slots.release(slot)
    assert acquire(slots, 2, temperature=0.0) == slot
    assert slots.sampling_mode[slot] == SamplingMode.GREEDY
    assert slots.features[slot] == 0


def waiting(request, rank):
    request.rank, request.max_length = rank, 10
    return request


def test_the_queue_keeps_the_order_of_service():
    queue = AdmissionQueue()
    for rank in (3, 4, 7):
        queue.add(waiting(request(10 + rank), rank))
    for rank in (5, 1, 9):
        evicted = waiting(request(10 + rank, generated=(1, 1)), rank)
        queue.add(evicted)
        assert evicted.num_known == 5
    assert queue.num_known == 3 * 3 + 3 * 5
    assert queue.remove(99) is None
    assert queue.remove(14).rank == 4
    assert queue.first().rank == 1
    assert queue.num_known == 2 * 3 + 3 * 5
    assert [queue.pop().rank for _ in range(len(queue))] == [1, 3, 5, 7, 9]
    assert queue.num_known == 0


def test_the_queue_forgets_what_was_taken_out():
    queue = AdmissionQueue()
    queue.add(waiting(request(0), 10**6))
    for rank in range(1000):  # one id, used again and again, always before the request above
        queue.add(waiting(request(1), rank))
        assert queue.first().rank == rank
        assert queue.remove(1).rank == rank
    assert len(queue) == 1
    assert len(queue._heap) < 100, "entries of removed requests pile up"
    assert queue.first().request_id == 0
    queue.add(waiting(request(2), 5))
    queue.add(waiting(request(3), 4))
    assert [each.rank for each in queue.in_order()] == [4, 5, 10**6]


def test_priority_comes_before_arrival():
    order = [(0, 5), (7, 5), (2, 0), (3, 0), (1, -1)]
    ranks = [rank_of(arrival, priority) for arrival, priority in order]
    assert ranks == sorted(ranks)
    lowest = rank_of(ARRIVALS - 1, -MAX_PRIORITY)
    highest = rank_of(0, MAX_PRIORITY)
    assert -(2**63) <= highest < lowest < 2**63


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
