"""When a step is launched: at once (`PromptLaunch`), or as late as the device does not wait for it
(`LateLaunch`).

With lookahead 1 the next step is launched as soon as the step before the running one is booked.
A request that arrives while a step runs finds the next step launched already, and joins the one
after it. With `InferenceConfig.late_launch` the launch waits until the running step is nearly done,
so that the request joins the next step. The device is as busy as before if the end of the running
step is foreseen. Steps of one captured shape take nearly the same time, so the times of earlier
steps tell.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, override

from megatron_async.engine.arrival import Answer, ask
from megatron_async.engine.listener import EngineListener
from megatron_async.observe.statistics import EngineStatistics

if TYPE_CHECKING:
    from megatron_async.planning.dynamic_context import DynamicInferenceContext
    from megatron_async.planning.step_plan import StepPlan
    from megatron_async.step.text_generation_controller import LaunchedStep

MARGIN_US = 1000.0
MARGIN_SHARE = 0.15
"""A launch is due so many microseconds before the expected end of the running step, and this share
of the step's expected time. So steps of a millisecond are launched at once."""
HOST_MARGIN_US = 2500.0
"""`MARGIN_US` where steps run on the cores that the launch needs. On two cores a token of the demo
model, with steps of 5.5 ms, took up to 15 % longer with 1,000 (docs/records/whole_steps.md,
2026-11-28)."""
GROWTH = 1.02
"""The expected time of a shape follows a shorter step at once, and a longer one by at most this
factor: a host that is late sees steps end late."""
BACK_OFF_US = 500.0
"""Added to the margin after a launch that was late, and doubled after each further one."""
MOST_BACK_OFF_US = 20_000.0
RECOVERY = 0.99
"""Factor by which a launch in time shrinks what was added."""
TICK_S = 1e-3
"""An event loop's timers may be so late; what is left is waited for by giving other coroutines
their turn. Not where steps run on the same cores: it would take one of them."""

Shape = tuple[int, int, int, int]
"""What steps of about the same time have in common: decode rows, tokens, width, sampling mode."""


def launches_late(context: DynamicInferenceContext) -> bool:
    """Whether an engine's launches wait: `InferenceConfig.late_launch`, or what None means there.

    Replicas that share experts wait for each other in each step, each with an end of its own in
    view. These are the same step's: on two H100s first tokens came after 29 to 32 instead of 39 ms
    (docs/records/whole_steps.md, 2026-11-28).
    """
    wanted = context.config.late_launch
    return context.config.lookahead == 1 if wanted is None else wanted


def launching_of(
    context: DynamicInferenceContext,
    in_flight: deque[LaunchedStep],
    statistics: EngineStatistics,
    listeners: list[EngineListener],
) -> PromptLaunch:
    """When the launches of an engine are due; a `LateLaunch` is put among its listeners."""
    if not launches_late(context):
        return PromptLaunch()
    late = LateLaunch(context, in_flight, statistics)
    listeners.append(late)
    return late


class PromptLaunch(EngineListener):
    """A launch is due at once."""

    def seconds_left(self) -> float:
        """Seconds for which a loop that calls `step_modern` may wait for arrivals before it goes
        on; 0: launch now."""
        return 0.0

    async def until_due(self) -> None:
        """Let other coroutines run until the next launch is due."""


class LateLaunch(PromptLaunch):
    """Foresees the ends of steps, and says how long a launch can wait.

    Args:
        context: of the engine.
        in_flight: the engine's launched steps, oldest first.
        statistics: counts launches that were late.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        in_flight: deque[LaunchedStep],
        statistics: EngineStatistics,
    ) -> None:
        self._context, self._in_flight = context, in_flight
        self._statistics = statistics
        self._now_us = context.device.now_us
        self._margin_us, self._tick_s = MARGIN_US, TICK_S
        if context.device.shares_cores:
            self._margin_us, self._tick_s = HOST_MARGIN_US, 0.0
        self._lasts_us: dict[Shape, float] = {}
        self._launched_us: dict[int, float] = {}
        self._ended_us = 0.0
        self._back_off_us = 0.0
        self._has_backlog = True

    @override
    def seconds_left(self) -> float:
        # None if nothing is in flight, or several steps are; if the running step's shape is new,
        # not captured on a GPU, whose launch takes long, or has prompts on a CPU; and if requests
        # or rests of prompts were left over by the last step, so that an arrival would not join the
        # next one.
        if len(self._in_flight) != 1 or self._has_backlog:
            return 0.0
        plan = self._in_flight[0].plan
        lasts_us = self._lasts_us.get(_shape_of(plan))
        if lasts_us is None:
            return 0.0
        begin_us = max(self._ended_us, self._launched_us.get(plan.step, 0.0))
        margin_us = self._margin_us + MARGIN_SHARE * lasts_us + self._back_off_us
        return max(begin_us + lasts_us - margin_us - self._now_us(), 0.0) / 1e6

    @override
    async def until_due(self) -> None:
        while (left := self.seconds_left()) > 0:
            await asyncio.sleep(left - self._tick_s if left > 2 * self._tick_s else 0)

    @override
    def launching(self, plan: StepPlan) -> None:
        # A step that failed says so when it is resolved.
        if self._in_flight and ask(self._in_flight[-1].ready) is Answer.REACHED:
            self._statistics.late_launches += 1
            self._back_off_us = min(max(2 * self._back_off_us, BACK_OFF_US), MOST_BACK_OFF_US)
        else:
            self._back_off_us *= RECOVERY

    @override
    def launched(self, plan: StepPlan | None) -> None:
        context = self._context
        if plan is not None:
            self._launched_us[plan.step] = self._now_us()
        is_full = context.slots.num_free == 0
        self._has_backlog = bool(context.waiting or context.scheduler.prefilling or is_full)

    @override
    def resolved(self, step: LaunchedStep) -> None:
        now, launched_us = self._now_us(), self._launched_us.pop(step.plan.step, None)
        before, self._ended_us = self._ended_us, now
        if launched_us is None or step.error is not None or not self._is_foreseen(step.plan):
            return
        took_us, shape = now - max(before, launched_us), _shape_of(step.plan)
        expected = self._lasts_us.get(shape, took_us)
        self._lasts_us[shape] = min(took_us, GROWTH * expected)

    def _is_foreseen(self, plan: StepPlan) -> bool:
        """Whether the step's shape is one of few, and its launch is quick."""
        dims, captures_graphs = plan.dims, self._context.device.captures_graphs
        return dims.is_captured or (dims.is_decode_only and not captures_graphs)


def _shape_of(plan: StepPlan) -> Shape:
    dims = plan.dims
    return dims.decode_rows, dims.tokens, dims.width, int(plan.sampling_mode)
