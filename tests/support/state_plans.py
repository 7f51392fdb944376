"""No step writes a row of the state pools that another of its rows reads or writes. A CPU takes a
step's chunks one after the other and would not show it; a GPU takes them at once."""

from __future__ import annotations

from typing import Any

from megatron_async import DynamicInferenceEngine
from megatron_async.contexts.step_plan import StepPlan


def watch_state_plans(engine: DynamicInferenceEngine) -> None:
    """Check every plan of an engine as it is launched."""
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
