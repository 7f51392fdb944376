"""Data that a step leaves on the device, by slot, for later steps.

Data that a step changes, and that a later step reads before writing it, is a *slot state*: one file
with a subclass of `PerSlotState`, and one line in `make_gpu_view`. Keys and values are no slot
state, because they are read where an earlier step has written them and nowhere else.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatron_async.device_state.device_slots import DeviceSlots
from megatron_async.device_state.kv_cache import PagedKVCache
from megatron_async.ops.all_ops import Ops
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.ops.step_tensors import StepTensors


class StateStep(Protocol):
    """What a slot state may read of a step.

    Attributes:
        step, dims: tensors and shape of the step.
        ops: of the engine.
        slots: arrays by slot.
        kv_cache: the paged cache.
        bookkeeping: int32 `[steps in flight, words]`: what the host has sent.
        sample_ring: int32 `[steps in flight, rows, words]`: what rows yield.
    """

    step: StepTensors
    dims: BatchDimensions
    ops: Ops
    slots: DeviceSlots
    kv_cache: PagedKVCache
    bookkeeping: Tensor
    sample_ring: Tensor


class PerSlotState:
    """One kind of state. Methods but `allocate` and `release` run inside launched work, on the
    compute stream, in the order of the steps; a subclass overrides those that concern it.

    `begin_chunks` must reset a state when its slot gets a new owner.
    """

    @property
    def bytes_per_slot(self) -> int:
        """Device memory of one slot that `allocate` takes."""
        return 0

    @property
    def bytes_of_snapshots(self) -> int:
        """Device memory that `allocate` takes beside the slots'."""
        return 0

    def allocate(self) -> None:
        """Take the tensors of the view's `Pools`: once the sum of all states is known to fit, and
        again after each `release`."""

    def release(self) -> None:
        """Let go of the tensors, before the pools are released: the engine is suspended."""

    def begin_step(self, view: StateStep) -> None:
        """Runs after the unpacking of every step, as a part of captured work."""

    def begin_chunks(self, view: StateStep, mode: SamplingMode) -> None:
        """Runs after the unpacking of a step with prefill chunks, as a part of captured work. A row
        with the feature STARTS has a request's first chunk since it got its slot, wherever in its
        prompt the chunk begins: data of the slot's previous owner must be reset."""


class SlotStates(list[PerSlotState]):
    """All slot states of an engine."""

    def find[State: PerSlotState](self, kind: type[State]) -> State | None:
        """The state of this kind; None if there is none."""
        return next((state for state in self if isinstance(state, kind)), None)

    @property
    def bytes_per_slot(self) -> int:
        """Device memory of one slot that `allocate` takes, over all states."""
        return sum(state.bytes_per_slot for state in self)

    def num_bytes(self, slots: int) -> int:
        """Device memory that `allocate` takes: of these slots, of the dummy slot, of snapshots."""
        return (slots + 1) * self.bytes_per_slot + self.bytes_of_snapshots

    @property
    def bytes_of_snapshots(self) -> int:
        """Device memory that `allocate` takes beside the slots', over all states."""
        return sum(state.bytes_of_snapshots for state in self)

    def allocate(self) -> None:
        """Take the memory of all states."""
        for state in self:
            state.allocate()

    def release(self) -> None:
        """Let go of the tensors of all states."""
        for state in self:
            state.release()
