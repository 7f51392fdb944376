"""Recurrent states that nobody owns hold NaN: whoever reads what a row's last owner left is found
out."""

from __future__ import annotations

import math
from functools import partial

from megatron_async import DynamicInferenceEngine
from megatron_async.contexts.step_plan import IntArray
from megatron_async.device_state.recurrent_state import RecurrentState


def poison_states(engine: DynamicInferenceEngine) -> None:
    """Fill all rows of an engine's state pools, that of the dummy slot too, and from now on each
    that is released.

    It happens on the compute stream, in order with the steps: those in flight when a row is
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

    def poison_later(row: int) -> None:
        context.device.compute.launch(partial(poison, slice(row, row + 1)))

    def release_and_poison(slot: int) -> IntArray:
        blocks = release(slot)
        poison_later(slot)
        return blocks

    class PoisonedRows(list[int]):
        """Free rows."""

        def append(self, row: int) -> None:
            super().append(row)
            poison_later(row)

    cache = context.prefix_cache
    if cache is not None and cache.states is not None:
        cache.states._free = PoisonedRows(cache.states._free)
    else:
        context.slots.release = release_and_poison  # type: ignore[method-assign]
    context.device.compute.launch(partial(poison, slice(None)))
