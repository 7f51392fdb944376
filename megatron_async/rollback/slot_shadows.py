"""`SlotShadows`: small per-slot device state as it was before each step in flight; and the requests
with larger state, which steps taken back lose.

A slot state knows nothing of this: its tensors are found in its attributes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from megatron_async.device_state.gpu_view import ContextGPUView
from megatron_async.device_state.recurrent_state import RecurrentState
from megatron_async.device_state.sampling_state import SamplingState
from megatron_async.device_state.slot_states import PerSlotState
from megatron_async.ops.sampling.slot_records import RowFeature
from megatron_async.planning.request_slots import RequestSlots, SlotState
from megatron_async.planning.step_plan import IntArray

SHADOWED_BYTES = 256
"""Most bytes of a state for a slot that are copied before each step."""
REMEMBERS = RowFeature.PENALTIES | RowFeature.BAD_WORDS
"""What the requests ask for that `SamplingState` serves."""


class SlotShadows:
    """Copies of whole tensors, a few bytes a slot: of the last tokens and lengths, and of each slot
    state that is small. `save` and `restore` are launched work.

    Args:
        view: with the states, whose tensors steps change in place; a state may join between steps.
        entries: steps that may be in flight.
    """

    def __init__(self, view: ContextGPUView, entries: int) -> None:
        self._view, self._rows = view, len(view.slots.length)
        self._entries: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(entries)]

    def save(self, step: int) -> None:
        """Keep the state as it is before `step`, over what an earlier step's entry held."""
        slots = self._view.slots
        tensors = [slots.last_token, slots.length]
        for state in self._view.states:
            if self._is_small(state):
                tensors += tensors_in(vars(state))
        self._entries[step % len(self._entries)] = [(each, each.clone()) for each in tensors]

    def restore(self, step: int, slots: Tensor) -> None:
        """Put the rows of `slots`, int64 `[rows]`, host memory, back to what they were before
        `step`; other slots may have changed since for good."""
        slots = slots.to(self._view.slots.length.device)
        for tensor, saved in self._entries[step % len(self._entries)]:
            tensor.index_copy_(0, slots, saved.index_select(0, slots))

    @property
    def repeats_chunks(self) -> bool:
        """Whether a prefill chunk may run again: not where a recurrent state includes it."""
        return self._view.states.find(RecurrentState) is None

    def lost(self, books: RequestSlots, slots: IntArray) -> IntArray:
        """Slots of these whose requests have state that is not put back: they must be prefilled
        again. (A recurrent state has the tokens before every position that a decode row may go back
        to.)"""
        held = slots[books.state[slots] != SlotState.FREE]
        for state in self._view.states:
            if isinstance(state, SamplingState):
                continue
            if not isinstance(state, RecurrentState) and not self._is_small(state):
                return held
        return held[(books.features[held] & REMEMBERS) != 0]

    def _is_small(self, state: PerSlotState) -> bool:
        """Whether a state has tensors by slot alone, of at most `SHADOWED_BYTES` for each."""
        tensors = list(tensors_in(vars(state)))
        by_slot = all(each.dim() and len(each) == self._rows for each in tensors)
        num_bytes = sum(each.nbytes for each in tensors)
        return by_slot and 0 < num_bytes <= SHADOWED_BYTES * self._rows


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value: itself, or in lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, each.name) for each in fields(value)])
