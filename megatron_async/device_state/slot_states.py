"""Data that a step leaves on the device, by slot, for later steps.

Data that a step changes, and that a later step reads before writing it, is a *slot state*: one file
with a subclass of `PerSlotState`, and one line in `make_gpu_view`. Keys and values are no slot
state, because a step that is launched again writes the same places. Neither are block tables and
records, because the bookkeeping of each launch contains them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megatron_async.device_state.shadow import ShadowRing

if TYPE_CHECKING:
    from megatron_async.device_state.device_slots import DeviceSlots
    from megatron_async.device_state.gpu_view import ContextGPUView
    from megatron_async.ops.sampling.sampling import SamplingMode
    from megatron_async.rollback.known_tokens import KnownTokens


class PerSlotState:
    """One kind of state. Methods but `allocate` and `release` run inside launched work, on the
    compute stream, in the order of the steps; a subclass overrides those that concern it.

    `begin_chunks` must reset a state when its slot gets a new owner. Under the policy "rollback" a
    state is either put back (`save` and `restore`) or computed again (`rebuild`).
    """

    @property
    def bytes_per_slot(self) -> int:
        """Device memory of one slot that `allocate` takes."""
        return 0

    @property
    def bytes_of_snapshots(self) -> int:
        """Device memory that `allocate` takes beside that of slots."""
        return 0

    def allocate(self) -> None:
        """Allocate the memory: once the sum of all states is known to fit, and again after each
        `release`."""

    def release(self) -> None:
        """Free the memory, contents included: the engine is suspended, and holds no request."""

    def begin_step(self, view: ContextGPUView) -> None:
        """Runs after the unpacking of every step, as a part of captured work."""

    def begin_chunks(self, view: ContextGPUView, mode: SamplingMode) -> None:
        """Runs after the unpacking of a step with prefill chunks, as a part of captured work. A row
        with the feature STARTS has a request's first chunk since it got its slot, wherever in its
        prompt the chunk begins: data of the slot's previous owner must be reset.

        Args:
            view: the step.
            mode: of its sampling.
        """

    def save(self, entry: int) -> None:
        """Keep the present state as entry `entry` of a ring, over what it held.

        Args:
            entry: 0 .. `InferenceConfig.steps_in_flight` - 1, a step number modulo that.
        """

    def restore(self, entry: int, slots: Tensor) -> None:
        """Make the state of `slots`, int64 `[rows]`, host memory, what it was when `entry` was
        saved; other slots may have changed since for good."""

    def rebuild(self, known: KnownTokens) -> None:
        """Make the state of these slots follow from `known` alone."""


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
        """Device memory that `allocate` takes beside that of slots, over all states."""
        return sum(state.bytes_of_snapshots for state in self)

    def allocate(self) -> None:
        """Take the memory of all states."""
        for state in self:
            state.allocate()

    def release(self) -> None:
        """Give the memory of all states back."""
        for state in self:
            state.release()


class FeedbackState(PerSlotState):
    """Last token, length and drafts, which sampling leaves for the next step. The last chunk of a
    prompt sets them all, so a first chunk has nothing to reset.

    Args:
        slots: the device's slots, with these arrays.
        entries: entries of the shadow ring; 0 if nothing is ever put back.
    """

    def __init__(self, slots: DeviceSlots, entries: int) -> None:
        self._tensors = [slots.last_token, slots.length, slots.drafts]
        self._shadows = ShadowRing(self._tensors[:2], entries) if entries else None

    def save(self, entry: int) -> None:
        if self._shadows is not None:
            self._shadows.save(entry)

    def restore(self, entry: int, slots: Tensor) -> None:
        assert self._shadows is not None, "the policy takes nothing back"
        self._shadows.restore(entry, slots)
