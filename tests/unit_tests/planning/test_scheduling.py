"""The context without a model, by hand and in random lives under memory pressure: every decision of
`prepare_step`, every booking."""

from collections import Counter, deque
from copy import copy

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
from megatron_async.devices import CpuDevice
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import transformer_config
from megatron_async.planning.request_slots import SlotState
from tests.support.ready_requests import made_ready

MODEL = transformer_config(DUMMY_SHAPES["tiny"], torch.float32)
TOKEN = 7


@pytest.fixture
def make_context():
    devices = []

    def make(**settings):
        settings = {
            "block_size_tokens": 4,
            "num_kv_blocks": 16,
            "max_requests": 8,
            "max_tokens": 64,
            "max_sequence_length": 64,
            "enable_prefix_caching": False,  # prompts are alike
            **settings,
        }
        device = CpuDevice()
        devices.append(device)
        return DynamicInferenceContext(MODEL, InferenceConfig(**settings), device)

    yield make
    for device in devices:
        device.close()


def add(context, request_id, prompt_length, generate=8, priority=0, **params):
    request = DynamicInferenceRequest(
        request_id=request_id,
        priority=priority,
        prompt_tokens=np.arange(1, prompt_length + 1, dtype=np.int32),
        sampling_params=SamplingParams(temperature=0.0, termination_id=-1, **params),
    )
    max_length = prompt_length + generate
    context.add_request(made_ready(request, max_length), max_length)
    return request


def book(context, plan, token=TOKEN):
    """Resolve a step with one token for every row, and end what ended, as the engine does."""
    ones = np.ones(plan.num_rows, np.int32)
    output = context.update_requests(plan, np.full((plan.num_rows, 1), token, np.int32), ones)
    for slot in output.slots[output.ended]:
        request = context.slots.request_at(slot)
        context.release_request(slot)
        request.status = Status.COMPLETED
    context.check_integrity()
    return output


def ids(context, plan):
    return [context.slots.requests[slot].request_id for slot in plan.slots]


def test_admission_is_in_order_and_joins_the_next_step(make_context):
    context = make_context()
    add(context, 10, 3)
    first = context.prepare_step()
    add(context, 11, 2)  # arrives while the first step is in flight
    second = context.prepare_step()
    assert (first.dims.decode_rows, first.dims.prefill_rows) == (0, 1)
    assert (second.dims.decode_rows, second.dims.prefill_rows) == (1, 1)
    assert ids(context, second) == [10, 11]


def test_token_budget_splits_prompts_and_decode_goes_first(make_context):
    context = make_context(max_tokens=8, num_kv_blocks=32)
    add(context, 0, 2)
    book(context, context.prepare_step())
    add(context, 1, 20)
    lengths, produces = [], []
    for _ in range(3):
        plan = context.prepare_step()
        assert plan.dims.decode_rows == 1
        lengths.append(plan.dims.prefill_lengths)
        produces.append(list(plan.produces))
        book(context, plan)
    assert lengths == [((7, 7),), ((7, 14),), ((6, 20),)]
    assert produces == [[True, False], [True, False], [True, True]]


def test_without_chunking_a_prompt_waits_until_it_fits(make_context):
    context = make_context(max_tokens=8, enable_chunked_prefill=False)
    add(context, 0, 5)
    add(context, 1, 6)
    first = context.prepare_step()
    assert first.dims.prefill_lengths == ((5, 5),)
    second = context.prepare_step()
    assert second.dims.prefill_lengths == ((6, 6),)
    assert second.dims.decode_rows == 1


def test_blocks_are_given_at_boundaries_and_only_changes_are_sent(make_context):
    context = make_context()
    add(context, 0, 3, generate=7)
    table, updates = {}, []
    while context.has_unfinished_requests():
        plan = context.prepare_step()
        changes = plan.block_updates
        updates.append(len(changes.slots))
        for slot, index, block in zip(changes.slots, changes.indices, changes.blocks, strict=True):
            table[int(slot), int(index)] = int(block)
        slot = int(plan.slots[0])
        held = context.slots.block_table[slot, : context.slots.num_blocks[slot]]
        assert [table[slot, i] for i in range(len(held))] == list(held)
        book(context, plan)
    # Positions 0-2 and 3 in the first block, then one block every 4 tokens; the tenth token is
    # never fed back.
    assert updates == [1, 0, 1, 0, 0, 0, 1]
    assert context.blocks.allocatable == context.blocks.total


def test_pause_by_arrival_resume_oldest_first(make_context):
    context = make_context(num_kv_blocks=3)
    requests = [add(context, i, 4, generate=4) for i in range(3)]
    book(context, context.prepare_step())
    # All three want a second block and there is none.
    plan = context.prepare_step()
    # Nobody can run, so the youngest is evicted and the oldest goes on.
    assert ids(context, plan) == [0]
    assert context.scheduler.pauses == 3
    assert context.scheduler.evictions == 1
    assert requests[1].status == Status.ACTIVE_BUT_NOT_GENERATING_TOKENS
    assert requests[2].status == Status.WAITING_IN_QUEUE
    assert requests[2].generated_tokens == [TOKEN]
    add(context, 3, 1)
    while requests[0].status != Status.COMPLETED:
        assert ids(context, plan) == [0], "nobody is admitted or resumed while 1 is starved"
        book(context, plan)
        plan = context.prepare_step()
    assert ids(context, plan)[0] == 1, "the oldest paused request resumes first"


def test_higher_priority_is_admitted_first(make_context):
    context = make_context(max_requests=2)
    for i, priority in enumerate((0, -1, 0, 5)):
        add(context, i, 4, priority=priority)
    assert ids(context, context.prepare_step()) == [3, 0]
    assert [waiting.request_id for waiting in context.waiting.in_order()] == [2, 1]


def test_higher_priority_is_evicted_last(make_context):
    context = make_context(num_kv_blocks=3)
    requests = [add(context, i, 4, generate=4, priority=i) for i in range(3)]
    book(context, context.prepare_step())
    plan = context.prepare_step()  # all want a second block, and there is none
    assert ids(context, plan) == [2]
    assert requests[0].status == Status.WAITING_IN_QUEUE
    assert requests[1].status == Status.ACTIVE_BUT_NOT_GENERATING_TOKENS


def test_an_evicted_request_keeps_its_place_and_its_tokens(make_context):
    context = make_context(num_kv_blocks=3)
    requests = [add(context, i, 4, generate=4) for i in range(3)]
    order = []
    for _ in range(100):
        if not context.has_unfinished_requests():
            break
        plan = context.prepare_step()
        before = {r.request_id for r in requests if r.status == Status.COMPLETED}
        book(context, plan)
        order += sorted({r.request_id for r in requests if r.status == Status.COMPLETED} - before)
    assert order == [0, 1, 2]
    assert all(r.generated_tokens == [TOKEN] * 4 for r in requests)
    assert context.blocks.allocatable == context.blocks.total
    assert context.slots.num_free == 8


def test_zombie_rows_are_dropped_and_slots_reused(make_context):
    context = make_context()
    request = add(context, 0, 3, stop_token_ids=[TOKEN])
    first, second = context.prepare_step(), context.prepare_step()  # two steps in flight
    output = book(context, first)
    assert list(output.ended) == [True]
    assert request.status == Status.COMPLETED
    add(context, 1, 2)
    third = context.prepare_step()
    assert third.slots[0] == first.slots[0], "the slot is handed out again at once"
    assert third.generations[0] == first.generations[0] + 1
    late = book(context, second)
    assert late.zombie_rows == 1
    assert len(late.tokens) == 0
    assert list(book(context, third).request_ids) == [1]


def test_length_limits_waste_no_row(make_context):
    context = make_context()
    add(context, 0, 3, generate=2)
    plans = [context.prepare_step(), context.prepare_step()]
    assert context.prepare_step() is None, "its last token is in flight already"
    assert [list(book(context, plan).ended) for plan in plans] == [[False], [True]]
    assert not context.has_unfinished_requests()


def test_a_plan_never_changes_after_launch(make_context):
    context = make_context(num_kv_blocks=6)
    for i in range(3):
        add(context, i, 4, generate=6)
    plan = context.prepare_step()
    fields = ("slots", "generations", "kv_at_most", "widths", "produces")
    before = {name: getattr(plan, name).copy() for name in fields}
    tokens = plan.prefill_token_ids.copy()
    for _ in range(8):
        later = context.prepare_step()
        if later is not None:
            book(context, later)
    for name in fields:
        assert np.array_equal(getattr(plan, name), before[name]), name
    assert np.array_equal(plan.prefill_token_ids, tokens)


@pytest.mark.parametrize(("spare", "admitted"), [(1, False), (2, False), (3, True)])
def test_admission_leaves_blocks_for_running_requests(make_context, spare, admitted):
    """A block is free, and would hold the new prompt, but a running request will want it."""
    context = make_context(num_kv_blocks=spare + 4, max_sequence_length=16)
    for i in range(2):
        add(context, i, 4, generate=8)
    book(context, context.prepare_step())
    add(context, 2, 4)
    plan = context.prepare_step()
    assert (2 in ids(context, plan)) == admitted
    assert len(context.waiting) == 1 - admitted
    assert context.scheduler.pauses == 0


def test_paused_buffer_limit_evicts_early(make_context):
    bytes_of_a_block = 2 * 2 * 4 * 2 * 16 * 4
    gb = bytes_of_a_block / 1024**3
    context = make_context(num_kv_blocks=4, paused_buffer_size_gb=gb)
    for i in range(4):
        add(context, i, 3, generate=8)
    book(context, context.prepare_step())
    book(context, context.prepare_step())
    plan = context.prepare_step()
    # Blocks of the evicted go to the paused request, not to a waiting one.
    assert ids(context, plan) == [0]
    paused = context.slots.state == SlotState.PAUSED
    assert context.slots.num_blocks[paused].sum() <= 1
    assert context.scheduler.evictions >= 2


def test_abort_of_a_prefilling_request_gives_everything_back(make_context):
    context = make_context(max_tokens=8)
    add(context, 0, 20)
    plan = context.prepare_step()
    context.release_request(int(plan.slots[0]))
    context.check_integrity()
    assert not context.has_unfinished_requests()
    assert book(context, plan).zombie_rows == 1


@pytest.mark.parametrize("damage", ["owned twice", "lost", "free slot", "prefill list"])
def test_the_integrity_check_notices(make_context, damage):
    context = make_context()
    add(context, 0, 6)
    add(context, 1, 6)
    plan = context.prepare_step()
    one, two = plan.slots
    slots = context.slots
    if damage == "owned twice":
        slots.block_table[one, 0] = slots.block_table[two, 0]
    elif damage == "lost":
        slots.num_blocks[one] -= 1
    elif damage == "free slot":
        slots.state[one] = SlotState.FREE
    else:
        slots.state[one] = SlotState.PREFILLING
    with pytest.raises(AssertionError):
        context.check_integrity()


BLOCK_GB = 2 * 2 * 4 * 2 * 16 * 4 / 1024**3
STOP = 0
LONGEST = 40
SCHEDULES, GROUPS = 200, 8
STAGES = (1, 1, 2, 4)
"""Stages of the pipelines that the schedules are for."""


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
