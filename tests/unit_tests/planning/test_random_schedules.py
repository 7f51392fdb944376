"""Random lives of a context under memory pressure, without a model, checked after every action.

The samples are made up, but as a model's are: a function of the request and the position, so that
a request that is evicted and prefilled again must end with the very same tokens.
"""

from collections import Counter, deque
from copy import copy

import numpy as np
import pytest
import torch

from megatron_async.config import InferenceConfig
from megatron_async.devices import CpuDevice
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import transformer_config
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.planning.request_slots import SlotState
from megatron_async.requests.inference_request import DynamicInferenceRequest, Status
from megatron_async.requests.sampling_params import SamplingParams
from tests.support.ready_requests import made_ready

MODEL = transformer_config(DUMMY_SHAPES["tiny"], torch.float32)
BLOCK_GB = 2 * 2 * 4 * 2 * 16 * 4 / 1024**3
STOP = 0
LONGEST = 40
SCHEDULES, GROUPS = 200, 8
STAGES = (1, 1, 2, 4)
"""Of the pipelines that the schedules are for."""


@pytest.fixture(scope="module")
def device():
    device = CpuDevice()
    yield device
    device.close()


def sample(request_id, position):
    """A token from 0 to 96; 0 is the stop token."""
    return (request_id * 7919 + position * 104729 + (request_id ^ position) * 31) % 97


def expected_tokens(request_id, prompt_length, max_length):
    tokens = []
    for position in range(prompt_length, max_length):
        tokens.append(sample(request_id, position))
        if tokens[-1] == STOP:
            break
    return tokens


class Life:
    """One random schedule. `table` is what a device would know: block updates, nothing else."""

    def __init__(self, seed, device, stages=1):
        self.rng = rng = np.random.default_rng(seed)
        self.stages = stages
        model = copy(MODEL)
        model.pipeline_model_parallel_size = stages  # asks for as many micro-batches
        self.context = DynamicInferenceContext(
            model,
            InferenceConfig(
                block_size_tokens=4,
                max_sequence_length=LONGEST,
                num_kv_blocks=int(rng.integers(10, 15)),
                max_requests=int(rng.integers(1, 8)),
                max_tokens=int(rng.integers(8, 40)),
                enable_chunked_prefill=bool(rng.random() < 0.7),
                paused_buffer_size_gb=BLOCK_GB * 3 if rng.random() < 0.3 else None,
            ),
            device,
        )
        self.lookahead = int(rng.integers(0, 4))
        self.has_priorities = bool(rng.random() < 0.5)
        self.in_flight = deque()
        self.requests, self.expected, self.aborted = {}, {}, set()
        self.table, self.zombies = {}, 0

    def add(self):
        context, i = self.context, len(self.requests)
        # Mostly short prompts that grow long: that is what uses up a pool.
        longest = 6 if self.rng.random() < 0.8 else min(30, context.max_tokens)
        prompt_length = int(self.rng.integers(1, longest + 1))
        max_length = min(prompt_length + int(self.rng.integers(1, 40)), LONGEST)
        self.requests[i] = DynamicInferenceRequest(
            request_id=i,
            prompt_tokens=np.full(prompt_length, 100 + i, np.int32),
            sampling_params=SamplingParams(termination_id=STOP),
            priority=int(self.rng.integers(-2, 3)) if self.has_priorities else 0,
        )
        self.expected[i] = expected_tokens(i, prompt_length, max_length)
        context.add_request(made_ready(self.requests[i], max_length), max_length)

    def abort(self):
        """Any unfinished request, wherever it is."""
        context = self.context
        alive = [i for i, r in self.requests.items() if r.status != Status.COMPLETED]
        alive = [i for i in alive if i not in self.aborted]
        if alive:
            i = int(self.rng.choice(alive))
            self.aborted.add(i)
            if context.waiting.remove(i) is None:
                context.release_request(context.slots.requests.index(self.requests[i]))

    def launch(self):
        """Prepare a step; check the plan by itself and against the device's knowledge."""
        oldest = self.oldest_held()
        plan = self.context.prepare_step()
        waiting = [entry.rank for entry in self.context.waiting.in_order()]
        assert oldest not in waiting, "the oldest request was evicted"
        assert not waiting or self.context.waiting.first().rank == waiting[0]
        if plan is None:
            return False
        dims, slots = plan.dims, self.context.slots
        assert dims.tokens <= self.context.max_tokens
        assert len(set(plan.slots.tolist())) == plan.num_rows <= self.context.max_requests
        assert len(set((plan.slots % self.stages).tolist())) == 1, "one micro-batch a step"
        updates = plan.block_updates
        assert set(updates.slots.tolist()) <= set(plan.slots.tolist()), "each row applies its own"
        for slot, index, block in zip(updates.slots, updates.indices, updates.blocks):
            self.table[int(slot), int(index)] = int(block)
        used = []
        for slot, length in zip(plan.slots.tolist(), plan.kv_at_most.tolist()):
            blocks = [self.table[slot, i] for i in range(-(-length // 4))]
            assert blocks == slots.block_table[slot, : len(blocks)].tolist()
            used += blocks
        assert len(set(used)) == len(used), "two rows would write one block"
        ids = [int(slots.request_id[slot]) for slot in plan.slots]
        self.in_flight.append((plan, ids, plan.kv_at_most.copy(), plan.generations.copy()))
        return True

    def resolve(self):
        context = self.context
        plan, ids, lengths, generations = self.in_flight.popleft()
        assert np.array_equal(plan.kv_at_most, lengths), "a plan in flight was changed"
        assert np.array_equal(plan.generations, generations), "a plan in flight was changed"
        samples = [sample(i, int(length)) for i, length in zip(ids, lengths)]
        table = np.array(samples, np.int32)[:, None]
        output = context.update_requests(plan, table, np.ones(len(table), np.int32))
        self.zombies += output.zombie_rows
        for row in np.flatnonzero(output.ended):
            request = context.slots.request_at(output.slots[row])
            context.release_request(output.slots[row])
            request.status = Status.COMPLETED

    def oldest_held(self):
        slots = self.context.slots
        return slots.rank[slots.state != SlotState.FREE].min(initial=10**9)

    def run(self, count):
        context = self.context
        for _ in range(2000):
            if len(self.requests) < count and self.rng.random() < 0.4:
                self.add()
            if self.rng.random() < 0.02:
                self.abort()
            context.check_integrity()
            launched = self.launch()
            context.check_integrity()
            due = len(self.in_flight) - self.lookahead if launched else 1
            for _ in range(min(due, len(self.in_flight))):
                self.resolve()
                context.check_integrity()
            if len(self.requests) == count and not context.has_unfinished_requests():
                break
        while self.in_flight:
            self.resolve()


@pytest.mark.parametrize("group", range(GROUPS))
def test_every_request_ends_with_its_own_tokens(device, group):
    seen = Counter()
    for seed in range(group, SCHEDULES, GROUPS):
        life = Life(seed, device, stages=STAGES[seed // GROUPS % len(STAGES)])
        life.run(count=12)
        context = life.context
        assert not context.has_unfinished_requests(), seed
        assert context.blocks.allocatable == context.blocks.total, seed
        assert context.slots.num_free == context.max_requests, seed
        for i, request in life.requests.items():
            if i in life.aborted:
                booked = request.generated_tokens
                assert booked == life.expected[i][: len(booked)], (seed, i)
            else:
                assert request.status == Status.COMPLETED, (seed, i)
                assert request.generated_tokens == life.expected[i], (seed, i)
        seen += Counter(
            pauses=context.scheduler.pauses,
            evictions=context.scheduler.evictions,
            zombies=life.zombies,
            aborts=len(life.aborted),
        )
    assert min(seen[name] for name in ("pauses", "evictions", "zombies", "aborts")) >= 30, seen
