"""Plans that are taken back leave the books as they were; no model, made-up samples."""

from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_async import (
    DynamicInferenceContext,
    DynamicInferenceRequest,
    InferenceConfig,
    SamplingParams,
    Status,
)
from megatron_async.device_state.slot_states import PerSlotState, SlotStates
from megatron_async.devices import CpuDevice
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import transformer_config
from megatron_async.planning.request_slots import SlotState
from megatron_async.rollback.policy import take_back
from megatron_async.rollback.slot_shadows import SlotShadows, tensors_in
from tests.support.ready_requests import made_ready

MODEL = transformer_config(DUMMY_SHAPES["tiny"], torch.float32)
STOP = 0
SCHEDULES = 60


@pytest.fixture(scope="module")
def device():
    device = CpuDevice()
    yield device
    device.close()


def make_context(device, **settings):
    sizes = {"max_requests": 4, "max_tokens": 12, "num_kv_blocks": 40, **settings}
    sizes["enable_prefix_caching"] = False  # as the policy has it
    config = InferenceConfig(block_size_tokens=4, max_sequence_length=40, **sizes)
    return DynamicInferenceContext(MODEL, config, device)


def add(context, number, prompt_length, max_length):
    request = DynamicInferenceRequest(
        request_id=number,
        prompt_tokens=np.full(prompt_length, 100 + number, np.int32),
        sampling_params=SamplingParams(termination_id=STOP),
    )
    context.add_request(made_ready(request, max_length), max_length)
    return request


def sample(number, position):
    """A token from 0 to 60; 0 is the stop token."""
    return (number * 7919 + position * 104729 + (number ^ position) * 31) % 61


def resolve(context, plan):
    numbers = [context.slots.request_id[slot] for slot in plan.slots]
    samples = [sample(int(n), int(p)) for n, p in zip(numbers, plan.kv_at_most, strict=True)]
    table = np.array(samples, np.int32)[:, None]
    output = context.update_requests(plan, table, np.ones(len(table), np.int32))
    for slot in output.slots[output.ended]:
        request = context.slots.request_at(slot)
        context.release_request(slot)
        request.status = Status.COMPLETED


def books(context):
    """What scheduling reads, by request: slots and blocks may be others."""
    slots = context.slots
    held = {
        int(slots.request_id[slot]): (
            SlotState(int(slots.state[slot])).name,
            int(slots.num_known[slot]),
            int(slots.at_least(slot)),
            int(slots.at_most(slot)),
            int(slots.num_prefilled[slot]) if slots.state[slot] == SlotState.PREFILLING else None,
            int(slots.num_blocks[slot]),
        )
        for slot in np.flatnonzero(slots.state != SlotState.FREE)
    }
    waiting = [entry.request_id for entry in context.waiting.in_order()]
    prefilling = [int(slots.request_id[slot]) for slot in context.scheduler.prefilling]
    return held, waiting, prefilling, context.blocks.allocatable, context._plan_builder.next_step


def contents(plan, context):
    """A plan without its slots and blocks."""
    numbers = context.slots.request_id[plan.slots]
    fields = (numbers, plan.kv_at_most, plan.produces, plan.prefill_starts, plan.prefill_token_ids)
    return plan.step, plan.num_decode, [field.tolist() for field in fields]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_books_are_as_before_and_the_same_steps_follow(device, count):
    """Without memory pressure exactly so: admissions, chunks, block boundaries, length limits."""
    seen = Counter()
    for seed in range(16):
        rng = np.random.default_rng(seed)
        context = make_context(device)
        for number in range(9):
            prompt = int(rng.integers(1, 14))
            add(context, number, prompt, prompt + int(rng.integers(1, 20)))
        booked = deque()
        while context.has_unfinished_requests():
            before = books(context)
            plans = [plan for _ in range(count) if (plan := context.prepare_step()) is not None]
            was = [contents(plan, context) for plan in plans]
            seen["admitted"] += len(before[1]) - len(context.waiting)
            seen["chunks"] += sum(int((~plan.produces).sum()) for plan in plans)
            seen["blocks"] += sum(len(plan.block_updates.slots) for plan in plans)
            take_back(context, plans, repeats_chunks=True)
            context.check_integrity()
            assert books(context) == before, seed
            again = [context.prepare_step() for _ in plans]
            assert [contents(plan, context) for plan in again] == was, seed
            booked.extend(again)
            while booked:
                resolve(context, booked.popleft())
    assert min(seen[name] for name in ("admitted", "chunks", "blocks")) > 50, seen


def test_random_lives_with_plans_taken_back(device):
    """Under memory pressure every request still ends with its tokens, and books balance."""
    seen = Counter()
    for seed in range(SCHEDULES):
        rng = np.random.default_rng(seed)
        context = make_context(
            device,
            num_kv_blocks=int(rng.integers(10, 15)),
            enable_chunked_prefill=bool(rng.random() < 0.7),
            max_tokens=int(rng.integers(14, 30)),
            paused_buffer_size_gb=1e-9 if rng.random() < 0.3 else None,
        )
        lookahead, in_flight, requests, limits = int(rng.integers(1, 4)), deque(), [], []
        for _ in range(2000):
            if len(requests) < 10 and rng.random() < 0.4:
                prompt = int(rng.integers(1, 7 if rng.random() < 0.8 else 14))
                limits.append((prompt, min(prompt + int(rng.integers(1, 40)), 40)))
                requests.append(add(context, len(requests), *limits[-1]))
            plan = context.prepare_step()
            if plan is not None:
                in_flight.append(plan)
            if in_flight and rng.random() < 0.15:
                first = int(rng.integers(len(in_flight)))
                plans = [in_flight.pop() for _ in range(len(in_flight) - first)][::-1]
                take_back(context, plans, repeats_chunks=True)
                seen["taken back"] += 1
            elif in_flight and (plan is None or len(in_flight) > lookahead):
                resolve(context, in_flight.popleft())
            context.check_integrity()
            if len(requests) == 10 and not context.has_unfinished_requests():
                break
        assert not context.has_unfinished_requests(), seed
        for number, (request, (start, end)) in enumerate(zip(requests, limits, strict=True)):
            tokens = [sample(number, position) for position in range(start, end)]
            stop = tokens.index(STOP) + 1 if STOP in tokens else len(tokens)
            assert request.generated_tokens == tokens[:stop], (seed, number)
        seen += Counter(pauses=context.scheduler.pauses, evictions=context.scheduler.evictions)
    assert min(seen[name] for name in ("taken back", "pauses", "evictions")) > 30, seen


def test_shadows_of_small_states():
    """Two states join between steps; one is too large."""
    states = SlotStates()
    slots = SimpleNamespace(last_token=torch.arange(4), length=torch.ones(4, dtype=torch.int32))
    shadows = SlotShadows(SimpleNamespace(slots=slots, states=states), entries=3)
    shadows.save(3)
    small, large = PerSlotState(), PerSlotState()
    small.tensors = {"a": [torch.zeros(4, 2)]}
    large.tensor = torch.zeros(4, 65)
    states += [small, large]
    slots.last_token += 1
    small.tensors["a"][0] += 1
    shadows.save(5)
    for tensor in (slots.last_token, slots.length, *tensors_in(vars(small)), large.tensor):
        tensor.fill_(9)
    shadows.restore(5, torch.tensor([0, 1]))
    assert slots.last_token.tolist() == [1, 2, 9, 9]
    assert slots.length.tolist() == [1, 1, 9, 9]
    assert small.tensors["a"][0].tolist() == [[1.0] * 2] * 2 + [[9.0] * 2] * 2
    shadows.restore(3, torch.tensor([1]))
    assert slots.last_token.tolist() == [1, 1, 9, 9]
    assert small.tensors["a"][0][1].tolist() == [1.0, 1.0]
    assert (large.tensor == 9).all()


@pytest.mark.parametrize(
    ("tensors", "is_lost"),
    [
        ([torch.zeros(4, 64)], False),
        ([torch.zeros(4, 65)], True),
        ([torch.zeros(4, 64), torch.zeros(4, 1)], True),
        ([torch.zeros(4), torch.zeros(2, 4)], True),
        ([torch.zeros(())], True),
        ([], True),
    ],
)
def test_requests_whose_state_is_not_put_back_are_lost(device, tensors, is_lost):
    """A state that is not `[slots + 1, ...]`, has more than 256 bytes a slot, or shows nothing; a
    free slot has lost nothing."""
    context = make_context(device, max_requests=3)
    add(context, 0, 3, 9)
    plan = context.prepare_step()
    shadows = SlotShadows(context.gpu_view, entries=1)
    assert not len(shadows.lost(context.slots, np.arange(3)))
    other = PerSlotState()
    other.tensors = tensors
    context.gpu_view.states.append(other)
    lost = shadows.lost(context.slots, np.arange(3)).tolist()
    assert lost == (plan.slots.tolist() if is_lost else [])
