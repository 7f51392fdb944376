"""Launch a planned step: its bookkeeping, its device work, the masks that its grammars wait for."""

from __future__ import annotations

import time
from collections import deque

from megatron_async.contexts.step_plan import StepPlan
from megatron_async.engines.grammar_masks import send_masks
from megatron_async.engines.invalidation import Invalidation
from megatron_async.engines.observer import EngineObserver
from megatron_async.engines.rank_group import RankGroup
from megatron_async.engines.request_registry import RequestRegistry
from megatron_async.engines.statistics import EngineStatistics
from megatron_async.profiling.step_log import StepLog
from megatron_async.text_generation_controllers.text_generation_controller import (
    LaunchedStep,
    TextGenerationController,
)


class StepLaunching:
    """Nothing here waits.

    Args:
        controller: runs steps on the device.
        in_flight: the engine's launched steps, oldest first.
        requests: the unfinished ones.
        statistics: counts.
        invalidation: is told before a launch.

    Attributes:
        observer: is told of launches.
    """

    def __init__(
        self,
        controller: TextGenerationController,
        in_flight: deque[LaunchedStep],
        requests: RequestRegistry,
        statistics: EngineStatistics,
        invalidation: Invalidation,
    ) -> None:
        self._controller = controller
        self._context = controller.context
        self._in_flight = in_flight
        self._requests = requests
        self._statistics = statistics
        self._invalidation = invalidation
        self._log = StepLog(controller.context, statistics)
        self.observer = EngineObserver()

    def launch(self, plan: StepPlan, group: RankGroup, lookahead: int) -> LaunchedStep:
        """Enqueue the step of a plan behind those in flight, and tell `group` how that went; the
        engine's `lookahead` says whether it could have been launched ahead.

        A launch that raises becomes a step that failed: its resolve ends its requests and no
        others. An interrupt (Ctrl-C) goes on to the caller besides.
        """
        statistics, tracer, start = self._statistics, self._context.tracer, time.thread_time_ns()
        group.planned(plan)
        logged, interrupt = self._log.begin(plan.step), None
        try:
            with tracer.range("transfer_bookkeeping_to_gpu", plan.step):
                self._context.transfer_bookkeeping_to_gpu(plan)
            self._invalidation.before_launch(plan)
            with tracer.range("launch_step", plan.step):
                launched = self._controller.launch_step(plan)
        except BaseException as error:
            group.launch_failed(plan.step, error)
            launched = self._controller.launch_failed_step(plan, error)
            interrupt = None if isinstance(error, Exception) else error
        statistics.count_launch(plan, bool(self._in_flight), lookahead)
        self._log.end(plan, logged)
        self._in_flight.append(launched)
        if launched.awaits_masks:
            self.send_masks()
        statistics.count_launch_time(time.thread_time_ns() - start)
        self.observer.launched(plan)
        if interrupt is not None:
            raise interrupt
        return launched

    def send_masks(self) -> None:
        """Sample constrained rows of steps in flight whose last tokens are known by now."""
        if not any(step.awaits_masks for step in self._in_flight):
            return
        with self._context.tracer.range("send_masks", self._statistics.steps):
            send_masks(self._in_flight, self._context.slots, self._requests, self._controller)

    def give_up_masks(self) -> None:
        """Let steps in flight end without them: a step before them is discarded, and masks would
        depend on tokens that are not booked now."""
        for step in self._in_flight:
            if step.awaits_masks:
                self._controller.sample_constrained(step, 0, is_last=True)
