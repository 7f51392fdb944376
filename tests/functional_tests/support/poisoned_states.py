"""Recurrent states that nobody owns hold NaN: whoever reads what a slot's last owner left is found
out."""

from __future__ import annotations

import math
from functools import partial

from megatron_async import DynamicInferenceEngine
from megatron_async.contexts.step_plan import IntArray
from megatron_async.device_state.recurrent_state import RecurrentState


def poison_states(engine: DynamicInferenceEngine) -> None:
    """Fill the states of all slots of an engine, and from now on of each that is released, and
    those of the dummy slot.

    It happens on the compute stream, in order with the steps: those in flight when a slot is
    released may still use its state, later ones may not. Without recurrent layers nothing happens.
    """
    context = engine.context
    state = context.gpu_view.states.find(RecurrentState)
    if state is None:
        return
    release = context.slots.release

    def poison(rows: slice) -> None:
        for pools in state._layers:
            for pool in pools:
                pool[rows] = math.nan

    def release_and_poison(slot: int) -> IntArray:
        blocks = release(slot)
        context.device.compute.launch(partial(poison, slice(slot, slot + 1)))
        return blocks

    context.slots.release = release_and_poison  # type: ignore[method-assign]
    context.device.compute.launch(partial(poison, slice(None)))
