"""Plan and launch a step: its bookkeeping, its device work, and the masks of its grammars."""

from __future__ import annotations

import time
from collections import deque
from functools import partial

from megatron_async.contexts.step_plan import StepPlan
from megatron_async.contexts.step_shape import StepShape
from megatron_async.engines.late_launch import LateLaunch, launches_late
from megatron_async.engines.listener import EngineListener
from megatron_async.engines.prefill_pace import PrefillPace
from megatron_async.engines.prompt_share import PromptShare
from megatron_async.observe.statistics import EngineStatistics, NoOverlapReason
from megatron_async.observe.tracer import Tracer
from megatron_async.ranks.rank_group import RankGroup
from megatron_async.requests.request_registry import RequestRegistry
from megatron_async.rollback.invalidation import Invalidation
from megatron_async.text_generation_controllers.text_generation_controller import (
    LaunchedStep,
    TextGenerationController,
)


class StepLaunching:
    """Plans a step, copies the plan to the device and launches the step, without waiting.

    Args:
        controller: runs steps on the device.
        in_flight: the engine's launched steps, oldest first.
        requests: the unfinished ones.
        statistics: counts.
        invalidation: is told before a launch.
        listeners: are told of launches.

    Attributes:
        late: where launches wait (`InferenceConfig.late_launch`).
    """

    def __init__(
        self,
        controller: TextGenerationController,
        in_flight: deque[LaunchedStep],
        requests: RequestRegistry,
        statistics: EngineStatistics,
        invalidation: Invalidation,
        listeners: list[EngineListener],
    ) -> None:
        self._controller = controller
        self._context = controller.context
        self._in_flight = in_flight
        self._requests = requests
        self._statistics = statistics
        self._invalidation = invalidation
        self._listeners = listeners
        self._pace: PrefillPace | PromptShare
        if self._context.config.target_tpot_ms is not None:
            self._pace = PrefillPace(self._context, statistics)
            listeners.append(self._pace)
        else:
            self._pace = PromptShare(self._context)
        self.late: LateLaunch | None = None
        if launches_late(self._context):
            self.late = LateLaunch(self._context, in_flight, statistics)
            listeners.append(self.late)

    def seconds_left(self) -> float:
        """Seconds for which a loop that calls `step_modern` may wait for arrivals before it goes
        on, with `late_launch`; else 0."""
        return 0.0 if self.late is None else self.late.seconds_left()

    async def until_due(self) -> None:
        """Let other coroutines run until the next launch is due."""
        if self.late is not None:
            await self.late.until_due()

    def launch_next(
        self, group: RankGroup, lookahead: int, is_compiling: bool
    ) -> LaunchedStep | None:
        """Plan a step and launch it.

        Args:
            group: agrees on the step's shape with other ranks, and logs the launch.
            lookahead: of the engine.
            is_compiling: whether requests wait for their grammars; other ranks count this as work.

        Returns:
            the step; None if nothing can run before a step in flight is resolved (or at all).
        """
        context, statistics, start = self._context, self._statistics, time.thread_time_ns()
        scheduler, tracer, step = context.scheduler, context.tracer, context.next_step
        scheduler.prefill_limit = group.launching(step, self._pace.limit())
        with tracer.planning(step), tracer.range("prepare_step", step):
            plan = context.prepare_step(partial(_agree, tracer, group, is_compiling))
        spent = time.thread_time_ns() - start
        blocks = context.blocks.total - context.blocks.allocatable
        statistics.count_prepare(spent, blocks, context.max_requests - context.slots.num_free)
        if plan is not None:
            return self.launch(plan, group, lookahead)
        stuck = not self._in_flight and context.has_unfinished_requests()
        assert not stuck, "requests are unfinished, but none can run: a bug in scheduling"
        statistics.note_no_overlap(NoOverlapReason.NOTHING_TO_PLAN)
        for listener in self._listeners:
            listener.launched(None)
        return None

    def launch_dummy(
        self, group: RankGroup, lookahead: int, is_compiling: bool
    ) -> LaunchedStep | None:
        """`launch_next` without a request of this rank; None if no other rank needs it."""
        tracer, step = self._context.tracer, self._context.next_step
        with tracer.planning(step), tracer.range("prepare_step", step):
            agree = partial(_agree, tracer, group, is_compiling)
            plan = self._context.prepare_dummy_step(agree)
        return None if plan is None else self.launch(plan, group, lookahead)

    def launch(self, plan: StepPlan, group: RankGroup, lookahead: int) -> LaunchedStep:
        """Enqueue the step of a plan after those in flight, and tell `group` how that went; the
        engine's `lookahead` says whether it could have been launched ahead.

        A launch that raises becomes a step that failed: its resolve ends its requests and no
        others.
        """
        assert len(self._in_flight) <= lookahead, "it would overwrite samples that are not booked"
        statistics, tracer, start = self._statistics, self._context.tracer, time.thread_time_ns()
        group.planned(plan)
        for listener in self._listeners:
            listener.launching(plan)
        with tracer.of_step(plan):
            try:
                with tracer.range("transfer_bookkeeping_to_gpu", plan.step):
                    self._context.transfer_bookkeeping_to_gpu(plan)
                self._invalidation.before_launch(plan)
                with tracer.range("launch_step", plan.step):
                    launched = self._controller.launch_step(plan)
            except Exception as error:
                group.launch_failed(plan.step, error)
                launched = self._controller.launch_failed_step(plan, error)
        statistics.count_launch(
            plan.num_rows,
            len(plan.prefill_token_ids),
            plan.dims.is_captured,
            bool(self._in_flight),
            lookahead,
        )
        self._in_flight.append(launched)
        if launched.awaits_masks:
            self.send_masks()
        statistics.count_launch_time(time.thread_time_ns() - start)
        for listener in self._listeners:
            listener.launched(plan)
        return launched

    def send_masks(self) -> None:
        """Launch the sampling of every constrained row in flight whose earlier tokens are booked.

        Called after every launch and every resolve. So the mask of a request with one sample in
        flight has been sent, and the request may be in the next step: no row waits for another
        row's mask. The samples of a step are copied when all of its rows are sampled; rows of ended
        requests need no mask.
        """
        tracer = self._context.tracer
        for step in self._in_flight:
            if step.awaits_masks:
                with tracer.of_step(step.plan), tracer.range("send_masks", step.plan.step):
                    self._send_masks_of(step)

    def _send_masks_of(self, step: LaunchedStep) -> None:
        slots, plan, rows = self._context.slots, step.plan, step.unsampled_rows
        rows = rows[slots.generation[plan.slots[rows]] == plan.generations[rows]]
        is_known = slots.num_known[plan.slots[rows]] == plan.kv_at_most[rows]
        step.unsampled_rows, rows = rows[~is_known], rows[is_known]
        if len(rows):
            masks = self._controller.masks_for(step, rows)
            for slot, mask in zip(plan.slots[rows], masks, strict=True):
                request_id = int(slots.request_id[slot])
                grammar = self._requests.get(request_id).grammar
                assert grammar is not None, "its feature says that it has one"
                grammar.mask(mask)
                if grammar.is_too_slow:
                    self._requests.is_too_slow(request_id)
        is_last = len(step.unsampled_rows) == 0
        if is_last or len(rows):
            self._controller.sample_constrained(step, len(rows), is_last=is_last)

    def give_up_masks(self) -> None:
        """Let steps in flight end without masks: an earlier step is discarded, and the masks would
        depend on tokens that are not booked now."""
        for step in self._in_flight:
            if step.awaits_masks:
                self._controller.sample_constrained(step, 0, is_last=True)


def _agree(
    tracer: Tracer, group: RankGroup, is_compiling: bool,
    step: int, wanted: StepShape, has_work: bool,
) -> StepShape:  # fmt: skip
    with tracer.range("agree_shape", step if group.agrees else -1):
        return group.agree(step, wanted, has_work or is_compiling)
