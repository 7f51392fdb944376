"""Small borders of recurrent states, limits by step, launches that wait by looks at the clock, and
a check of rows that one step reads and writes."""

import itertools
from collections.abc import Callable
from typing import Any

from megatron_async import DynamicInferenceEngine
from megatron_async.device_state import state_table
from megatron_async.engine.late_launch import LateLaunch, PromptLaunch
from megatron_async.engine.listener import EngineListener
from megatron_async.ops.recurrent import recurrent_pools, reference_parts
from megatron_async.ops.recurrent.recurrent_pools import FlushRule
from megatron_async.planning import dynamic_context
from megatron_async.planning.step_plan import StepPlan

GRID = 4
MODULES = (dynamic_context, state_table, recurrent_pools, reference_parts)


def use_small_grid(change: Callable[[Any, str, Any], None] = setattr) -> None:
    """Recurrent states of engines that are made later (others must not run meanwhile) are written,
    and can be kept, every 4 tokens instead of every 16 and 128: short sequences have as many
    borders as long ones then. For plain torch; kernels have their own."""
    for module in MODULES:
        change(module, "GRID", GRID)
    change(FlushRule.__new__, "__defaults__", (GRID, 0, False, False))


LIMITS = (10**6, 10**6, 5, 1, 10**6, 9)
"""Prompt tokens that steps with decode rows may have, by turns."""


class StepLimits(EngineListener):
    """Sets the limit of prompt tokens of each next step, as `target_tpot_ms` does, but by step and
    not by a clock: the same each time."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._context = engine.context
        engine.listeners.append(self)

    def launched(self, plan: StepPlan | None) -> None:
        context = self._context
        context.scheduler.prefill_limit = LIMITS[context.next_step % len(LIMITS)]


class TickingLaunches:
    """Makes a `LateLaunch` wait however fast or busy the host is: each look at its clock finds a
    millisecond gone, it has no margin, and no launch counts as late. `waits` counts launches that
    were not due."""

    def __init__(self, late: PromptLaunch) -> None:
        assert isinstance(late, LateLaunch), "launches of this engine do not wait"
        self.waits, self.is_waiting = 0, False
        ticks = itertools.count()
        seconds_left = late.seconds_left

        def counted() -> float:
            left = seconds_left()
            self.is_waiting = left > 0
            self.waits += self.is_waiting
            return left

        late._margin_us = 0.0
        late._now_us = lambda: 1000.0 * next(ticks)
        late.seconds_left = counted  # type: ignore[method-assign]
        late.launching = lambda plan: None  # type: ignore[method-assign]


def watch_state_plans(engine: DynamicInferenceEngine) -> None:
    """Check every plan of an engine as it is launched: no step writes a row of the state pools that
    another of its rows reads or writes. A CPU takes a step's chunks one after the other and would
    not show it; a GPU takes them at once."""
    context = engine.context
    transfer = context.transfer_bookkeeping_to_gpu

    def check(plan: StepPlan) -> None:
        states = plan.states
        if states is not None:
            assert context.prefix_cache is not None
            assert context.prefix_cache.states is not None
            decoding = context.prefix_cache.states.of_slot[plan.slots[: plan.num_decode]]
            dests = states.chunk_dest[states.chunk_dest >= 0]
            written = [*states.write_rows, *dests, *states.save_rows, *decoding]
            assert len(set(written)) == len(written), "two write one row"
            for number, row in enumerate(states.read_rows):
                others = [*written[:number], *written[number + 1 :]]
                assert row not in others, "a row is read, and written by another"

    def check_and_transfer(plan: StepPlan, *arguments: Any) -> None:
        check(plan)
        transfer(plan, *arguments)

    context.transfer_bookkeeping_to_gpu = check_and_transfer  # type: ignore[method-assign]
