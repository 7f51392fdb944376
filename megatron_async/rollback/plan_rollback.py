"""Take the bookkeeping of a launched plan back, as if it had never been built."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_async.contexts.kv_block_allocator import KVBlockAllocator
from megatron_async.contexts.request_slots import RequestSlots, SlotState
from megatron_async.contexts.step_plan import StepPlan
from megatron_async.ops.sampling.slot_records import RowFeature
from megatron_async.requests.inference_request import Status


def take_back(
    plan: StepPlan,
    slots: RequestSlots,
    blocks: KVBlockAllocator,
    prefilling: list[int],
    requeue: Callable[[int], None],
    repeats_chunks: bool = True,
) -> None:
    """Undo what building `plan` did to the requests that still hold their slots.

    The plans built after it must have been taken back before, and none of its samples be booked.
    Its blocks go back, because a step that failed may not have told the device whose they are; the
    requests that it admitted wait again. What it paused or evicted stays so: such requests are
    candidates in every step.

    Args:
        plan: of a step whose device work is over.
        slots, blocks, prefilling: the context's, changed in place.
        requeue: takes everything from the request in a slot and queues it again.
        repeats_chunks: whether a prefill chunk may run again. Not with recurrent layers, whose
            state includes the chunk already: the request is prefilled from the start.
    """
    live = slots.generation[plan.slots] == plan.generations
    rows = plan.slots[live]
    for slot in rows[slots.state[rows] == SlotState.PAUSED]:
        slots.request_at(slot).status = Status.ACTIVE_AND_GENERATING_TOKENS
    yields = live & plan.produces
    slots.count_back(plan.slots[yields], plan.widths[yields])

    decode = plan.slots[: plan.num_decode][live[: plan.num_decode]]
    slots.state[decode] = SlotState.DECODING
    updates = plan.block_updates
    given = np.isin(updates.slots, decode)  # to each at most one, the last in its table
    slots.num_blocks[updates.slots[given]] -= 1
    blocks.release(updates.blocks[given])

    lengths = np.diff(plan.prefill_starts)
    for row in range(plan.num_rows - 1, plan.num_decode - 1, -1):
        if not live[row]:
            continue
        slot = int(plan.slots[row])
        if plan.produces[row]:
            slots.state[slot] = SlotState.PREFILLING
            prefilling.insert(0, slot)  # it was ahead of those that have tokens left
        slots.num_prefilled[slot] = plan.kv_at_most[row] - lengths[row - plan.num_decode]
        starts = plan.prefill_features[row - plan.num_decode] & RowFeature.STARTS
        if starts or not repeats_chunks:
            requeue(slot)
