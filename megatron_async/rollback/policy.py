"""The policies for steps in flight when a request that they serve ends: `Invalidation` books them
all, `Rollback` takes them back.

Rollback launches ahead as if no request ended. It is the design of Megatron-LM pull request 4558,
kept beside the policy "reconcile" to compare the two in one engine. When a request ends
unexpectedly, the engine waits for the first step in flight that serves it and for all later steps,
and discards them. It restores the device's small per-slot state and the bookkeeping from before
that step, and plans and launches the step again without the request. Requests with larger state are
prefilled again. Samples depend only on seed and position, so the other requests get the same tokens
again.

An eviction discards nothing. It is decided when a step is planned, so the rows in flight of an
evicted request are zombies here too.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import numpy as np
import torch

from megatron_async.observe.statistics import EngineStatistics, NoOverlapReason
from megatron_async.ops.sampling.slot_records import RowFeature
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.planning.request_slots import SlotState
from megatron_async.planning.step_plan import StepPlan
from megatron_async.requests.inference_request import Status
from megatron_async.rollback.slot_shadows import SlotShadows
from megatron_async.step.text_generation_controller import LaunchedStep


class Invalidation:
    """The policy "reconcile": every step is booked. Rows of requests that have ended are recognised
    by (slot, generation) and dropped: zombie rows. The policy waits for nothing and repeats
    nothing.

    The engine reports events to its policy, and asks which steps to discard. Another policy
    overrides all methods.

    Attributes:
        takes_back: whether steps in flight may be taken back, so that they must be booked before an
            update of weights.
    """

    takes_back = False

    @property
    def is_draining(self) -> bool:
        """Whether no step may be launched before those in flight are resolved or discarded."""
        return False

    def before_launch(self, plan: StepPlan) -> None:
        """The step of `plan` is launched next."""

    def before_release(self, slot: int) -> None:
        """The request in `slot` has ended: with its last token, by an abort or by a failed step. It
        loses its slot next."""

    def forget(self) -> None:
        """The steps in flight are dropped, and no request holds a slot."""

    def discards(self, step: LaunchedStep) -> bool:
        """Whether `step`, just removed from the steps in flight, must not be booked; its work is
        done."""
        return False


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
    given = np.isin(updates.slots, decode)  # to each at most one, the last in its tables
    slots.num_blocks[updates.slots[given]] -= 1
    if slots.windows is not None:
        slots.windows.end[decode] = slots.num_blocks[decode]
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
        # What later chunks did not need of windows is given away.
        if starts or not repeats_chunks or slots.windows is not None:
            scheduler.requeue(slot)


class Rollback(Invalidation):
    """Takes steps in flight back when a request that they serve has ended.

    Args:
        context: whose plans are taken back.
        in_flight: the engine's, oldest first.
        statistics: counts what is discarded.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        in_flight: deque[LaunchedStep],
        statistics: EngineStatistics,
    ) -> None:
        self._context = context
        self._shadows = SlotShadows(context.gpu_view, context.config.steps_in_flight)
        self._in_flight = in_flight
        self._statistics = statistics
        self._first: int | None = None
        """Number of the first step to be discarded; None when there is none."""
        self._discarded: list[LaunchedStep] = []
        self.takes_back = True

    @property
    def is_draining(self) -> bool:
        return self._first is not None

    def before_launch(self, plan: StepPlan) -> None:
        """Keep the device's small state as it is before the step, by copies on the compute
        stream."""
        self._context.device.compute.launch(partial(self._shadows.save, plan.step))

    def before_release(self, slot: int) -> None:
        """Find the first step in flight that serves the request in `slot`."""
        generation = self._context.slots.generation[slot]
        for step in self._in_flight:
            plan = step.plan
            if self._first is not None and plan.step >= self._first:
                return
            if ((plan.slots == slot) & (plan.generations == generation)).any():
                self._first = plan.step
                return

    def forget(self) -> None:
        self._first, self._discarded = None, []

    def discards(self, step: LaunchedStep) -> bool:
        """Collect the steps to be discarded; with the last of them, take all back."""
        if self._first is None or step.plan.step < self._first:
            return False
        self._discarded.append(step)
        self._statistics.discarded_steps += 1
        self._statistics.discarded_rows += step.plan.num_rows
        if not self._in_flight:
            self._take_back()
        return True

    def _take_back(self) -> None:
        assert self._first is not None
        context, plans = self._context, [step.plan for step in self._discarded]
        compute, books, shadows = context.device.compute, context.slots, self._shadows
        for plan in reversed(plans):  # so that each slot's earliest shadow is the last word
            live = plan.slots[books.generation[plan.slots] == plan.generations]
            slots = torch.from_numpy(live.astype(np.int64))
            compute.launch(partial(shadows.restore, plan.step, slots))
        take_back(context, plans, shadows.repeats_chunks)
        served = np.unique(np.concatenate([plan.slots for plan in plans]))
        for slot in shadows.lost(books, served):
            context.scheduler.requeue(int(slot))
        if any(step.error is not None for step in self._discarded):
            # One that failed before it had updated the block tables lets the steps after it write
            # into blocks of others: prefill all again.
            context.evict_all()
        self._first, self._discarded = None, []
        self._statistics.note_no_overlap(NoOverlapReason.ROLLED_BACK)


def make_invalidation(
    context: DynamicInferenceContext, in_flight: deque[LaunchedStep], statistics: EngineStatistics
) -> Invalidation:
    """The policy that `InferenceConfig.invalidation` names; the arguments are those of
    `Rollback`."""
    if context.config.invalidation == "rollback":
        return Rollback(context, in_flight, statistics)
    return Invalidation()
