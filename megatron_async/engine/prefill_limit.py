"""How many prompt tokens a step may have beside running requests, which wait for them.

`PromptShare` is the usual limit. With the products of few tokens a GPU is bound by the weights'
bytes, so some prompt tokens beside running requests cost little; from some hundred on, each token
costs its products, and a step with a long prompt takes several times as long as others. Such a
prompt is prefilled in several steps (chunked prefill as in Sarathi-Serve, OSDI 2024). How many
tokens a step has then is measured when steps are captured. Smaller chunks mean a later first token,
and fewer tokens a second where requests arrive faster than they are served. So the more prompt
tokens wait, the more a step may have: half of them.

`PrefillPace` is the limit with `InferenceConfig.target_tpot_ms`: a step gets as many prompt tokens
as fit the target, by the times of booked steps.
"""

from __future__ import annotations

from typing import override

import numpy as np

from megatron_async.engine.listener import EngineListener
from megatron_async.engine.step_costs import StepCosts, StepWork
from megatron_async.observe.statistics import EngineStatistics
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.planning.graph_shapes import LEAST_PREFILL_TOKENS
from megatron_async.planning.request_slots import ALL, SlotState
from megatron_async.planning.step_output import StepOutput
from megatron_async.planning.step_plan import StepPlan
from megatron_async.step.text_generation_controller import LaunchedStep

SHARE = 0.5
"""A step may always have this share of the prompt tokens that wait, however long it lasts then."""
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


def prefill_limit_of(
    context: DynamicInferenceContext,
    statistics: EngineStatistics,
    listeners: list[EngineListener],
) -> PrefillPace | PromptShare:
    """The limit of an engine; a `PrefillPace` is put among its listeners."""
    if context.config.target_tpot_ms is None:
        return PromptShare(context)
    pace = PrefillPace(context, statistics)
    listeners.append(pace)
    return pace


class PromptShare:
    """Limits prompt tokens of steps that have decode rows.

    Args:
        context: of the engine.
    """

    def __init__(self, context: DynamicInferenceContext) -> None:
        self._context = context

    def limit(self) -> int:
        """Most prompt tokens of the next step, if it has decode rows; at least
        `LEAST_PREFILL_TOKENS`, or `mixed_step_tokens` where these are fewer. While no prompt waits,
        the limit stays what it is."""
        context, slots, scheduler = self._context, self._context.slots, self._context.scheduler
        config, shapes = context.config, context.graph_shapes
        tokens = config.mixed_step_tokens or shapes.mixed_step_tokens
        if tokens is None or not config.enable_chunked_prefill:
            return scheduler.prefill_limit
        started = scheduler.prefilling
        waits = context.waiting.num_known
        if started:
            waits += int((slots.num_known[started] - slots.num_prefilled[started]).sum())
        if not waits:
            return scheduler.prefill_limit
        rows = -(-np.count_nonzero(slots.may_decode()) // slots.num_micro_batches)
        decode = int(rows) * slots.max_width
        least = min(LEAST_PREFILL_TOKENS, tokens)
        room = max(tokens - decode, SHARE * waits)
        return min(shapes.prefill_that_fits(decode, room, least), config.max_tokens)


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
