"""`PrefillPace`: how many prompt tokens a step may have, so that running requests keep their pace.

Prompt tokens that join a step of decode rows make the step longer, and each running request waits
for it. With `InferenceConfig.target_tpot_ms`, a step gets as many prompt tokens as fit the target,
by the times of booked steps. Without this option, no `PrefillPace` is made.
"""

from __future__ import annotations

from typing import override

import numpy as np

from megatron_async.captured_steps.graph_shapes import LEAST_PREFILL_TOKENS
from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.contexts.request_slots import ALL, SlotState
from megatron_async.contexts.step_output import StepOutput
from megatron_async.contexts.step_plan import StepPlan
from megatron_async.engines.listener import EngineListener
from megatron_async.engines.step_costs import StepCosts, StepWork
from megatron_async.observe.statistics import EngineStatistics
from megatron_async.text_generation_controllers.text_generation_controller import LaunchedStep

FIRST_TOKENS = 256
"""Prompt tokens of a step before their cost is known; halved after each step that is late."""
GROWTH = 2.0
"""A step has at most so many times the prompt tokens of recent steps: beyond that, the fit is
uncertain."""
LATE, IN_TIME = 0.98, 1.001
"""Factors by which a late step and one in time change the planned share of the target. So one step
in twenty may be late, whatever the error of the fit."""
LEAST_SHARE = 0.7
FORGET = 0.05
"""Weight of a step in the mean of tokens that a row yields."""


class PrefillPace(EngineListener):
    """Listens to steps, and says what the next one may have.

    Args:
        context: of the engine; `config.target_tpot_ms` is set.
        statistics: counts steps that took longer than that.
    """

    def __init__(self, context: DynamicInferenceContext, statistics: EngineStatistics) -> None:
        target = context.config.target_tpot_ms
        assert target is not None
        self._context = context
        self._statistics = statistics
        # With micro-batches a request's next token comes with the next step of its own.
        self._target_us = 1e3 * target / context.slots.num_micro_batches
        self._now_us = context.device.now_us
        self._costs = StepCosts()
        self._works: dict[int, StepWork] = {}
        self._before_us: float | None = None
        self._tokens_a_row = self._share = 1.0
        self._first_tokens = FIRST_TOKENS

    def limit(self) -> int:
        """Most prompt tokens of the next step, if it has decode rows; at least
        `LEAST_PREFILL_TOKENS`, so that no prompt waits for ever."""
        context, slots = self._context, self._context.slots
        runs = slots.state >= SlotState.DECODING
        rows, kv = int(np.count_nonzero(runs)), int(slots.at_least(ALL)[runs].sum())
        prefilling = context.scheduler.prefilling
        position = int(slots.num_prefilled[prefilling[0]]) if prefilling else 0
        rows = -(-rows // slots.num_micro_batches)
        work = StepWork(1, 0, rows * slots.max_width, kv // slots.num_micro_batches, 0)
        aim_us = self._share * self._target_us * self._tokens_a_row
        room = self._costs.prefill_tokens_in(aim_us, work, position)
        if room is None:
            return min(self._first_tokens, context.max_tokens)
        room = min(room, GROWTH * max(self._costs.most_seen, LEAST_PREFILL_TOKENS))
        shapes = context.graph_shapes
        fitting = shapes.prefill_that_fits(work.decode_tokens, room, LEAST_PREFILL_TOKENS)
        return min(fitting, context.max_tokens)

    @override
    def launched(self, plan: StepPlan | None) -> None:
        if plan is not None and plan.num_decode:
            self._works[plan.step] = StepWork.of(plan)

    @override
    def booked(self, output: StepOutput) -> None:
        if self._context.slots.max_width > 1 and len(output.request_ids):
            mean = len(output.tokens) / len(output.request_ids)
            self._tokens_a_row += FORGET * (mean - self._tokens_a_row)

    @override
    def resolved(self, step: LaunchedStep) -> None:
        now, before = self._now_us(), self._before_us
        self._before_us = now
        work = self._works.pop(step.plan.step, None)
        # Rows that decode had a token in a step before, so the engine was at work since then.
        if work is None or before is None or step.error is not None:
            return
        self._costs.add(work, now - before)
        is_late = now - before > self._target_us * self._tokens_a_row
        self._statistics.late_steps += is_late
        if work.prefill_tokens > LEAST_PREFILL_TOKENS:
            share = self._share * (LATE if is_late else IN_TIME)
            self._share = min(max(share, LEAST_SHARE), 1.0)
            if is_late:
                self._first_tokens = max(self._first_tokens // 2, LEAST_PREFILL_TOKENS)
