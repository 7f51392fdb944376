"""Plans that are taken back leave the books as they were; no model, made-up samples."""

from collections import Counter, deque

import numpy as np
import pytest
import torch

from megatron_async.config import InferenceConfig
from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.contexts.request_slots import SlotState
from megatron_async.device_state.shadow import ShadowRing
from megatron_async.devices import CpuDevice
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import transformer_config
from megatron_async.requests.inference_request import DynamicInferenceRequest, Status
from megatron_async.requests.sampling_params import SamplingParams
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
    waiting = [entry.request.request_id for entry in context.waiting.in_order()]
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
            context.take_back(plans)
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
                context.take_back([in_flight.pop() for _ in range(len(in_flight) - first)][::-1])
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


def test_a_ring_of_shadows():
    tensors = torch.arange(4), torch.zeros(2, 3)
    ring = ShadowRing(tensors, entries=3)
    ring.save(0)
    for tensor in tensors:
        tensor += 1
    ring.save(2)
    for tensor in tensors:
        tensor.fill_(9)
    ring.restore(2, torch.tensor([0, 1]))
    assert [tensor.tolist() for tensor in tensors] == [[1, 2, 9, 9], [[1.0] * 3] * 2]
    ring.restore(0, torch.tensor([1]))
    assert [tensor.tolist() for tensor in tensors] == [[1, 1, 9, 9], [[1.0] * 3, [0.0] * 3]]
