"""Take the bookkeeping of launched plans back, as if they had never been built."""

from __future__ import annotations

import numpy as np

from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.contexts.request_slots import SlotState
from megatron_async.contexts.step_plan import StepPlan
from megatron_async.ops.sampling.slot_records import RowFeature
from megatron_async.requests.inference_request import Status


def take_back(
    context: DynamicInferenceContext, plans: list[StepPlan], repeats_chunks: bool
) -> None:
    """Undo what building `plans` did to the requests that still hold their slots.

    The blocks of the plans go back, because a step that failed may not have told the device whose
    they are; the requests that they admitted wait again. What they paused or evicted stays so: such
    requests are candidates in every step.

    Args:
        context: its books are changed.
        plans: the last ones built, whose steps are over and will not be booked.
        repeats_chunks: whether a prefill chunk may run again. If not, its request is prefilled from
            the start.
    """
    for plan in reversed(plans):
        _take_back_one(plan, context, repeats_chunks)
    context.plan_again(plans[0].step)


def _take_back_one(plan: StepPlan, context: DynamicInferenceContext, repeats_chunks: bool) -> None:
    slots, scheduler = context.slots, context.scheduler
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
    context.blocks.release(updates.blocks[given])

    lengths = np.diff(plan.prefill_starts)
    for row in range(plan.num_rows - 1, plan.num_decode - 1, -1):
        if not live[row]:
            continue
        slot = int(plan.slots[row])
        if plan.produces[row]:
            slots.state[slot] = SlotState.PREFILLING
            scheduler.prefilling.insert(0, slot)  # it was ahead of those that have tokens left
        slots.num_prefilled[slot] = plan.kv_at_most[row] - lengths[row - plan.num_decode]
        starts = plan.prefill_features[row - plan.num_decode] & RowFeature.STARTS
        if starts or not repeats_chunks:
            scheduler.requeue(slot)
