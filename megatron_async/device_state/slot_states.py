"""What a step leaves on the device, by slot, for the steps behind it.

Whatever a step changes there, and a later step reads before it is written again, is a *slot state*:
one file with a subclass of `PerSlotState`, and one line in `make_gpu_view`. Keys and values are
none (a step that is launched again writes the same places), nor are block tables and records (the
bookkeeping of each launch carries them).
"""

from __future__ import annotations

from collections.abc import Iterable
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

    A state must be put right by `begin_chunks` when its slot changes hands. Under the policy
    "rollback" it is either put back (`save` and `restore`) or built anew (`rebuild`).
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
        """Take the memory: at first once the sum of all states is known to fit, and again after a
        `release`."""

    def release(self) -> None:
        """Give the memory back, contents and all: the engine is suspended, and holds no request."""

    def begin_step(self, view: ContextGPUView) -> None:
        """Behind the unpacking of every step, as a part of captured work."""

    def begin_chunks(self, view: ContextGPUView, mode: SamplingMode) -> None:
        """Behind the unpacking of a step with prefill chunks, as a part of captured work. A row
        with the feature STARTS has a request's first chunk since it got its slot, wherever in its
        prompt that begins: what the slot's last owner left is not to be seen.

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


class SlotStates:
    """All states of an engine: what is asked of it, each of them does."""

    def __init__(self, states: Iterable[PerSlotState] = ()) -> None:
        self._states = list(states)

    def add(self, state: PerSlotState) -> None:
        """One more."""
        self._states.append(state)

    def find[State: PerSlotState](self, kind: type[State]) -> State | None:
        """The state of this kind; None if there is none."""
        return next((state for state in self._states if isinstance(state, kind)), None)

    @property
    def bytes_per_slot(self) -> int:
        """Device memory of one slot that `allocate` takes, over all states."""
        return sum(state.bytes_per_slot for state in self._states)

    def num_bytes(self, slots: int) -> int:
        """Device memory that `allocate` takes: of these slots, of the dummy slot, of snapshots."""
        return (slots + 1) * self.bytes_per_slot + self.bytes_of_snapshots

    @property
    def bytes_of_snapshots(self) -> int:
        """Device memory that `allocate` takes beside that of slots, over all states."""
        return sum(state.bytes_of_snapshots for state in self._states)

    def allocate(self) -> None:
        """Take the memory."""
        for state in self._states:
            state.allocate()

    def release(self) -> None:
        """Give the memory back."""
        for state in self._states:
            state.release()

    def begin_step(self, view: ContextGPUView) -> None:
        """Let the step begin."""
        for state in self._states:
            state.begin_step(view)

    def begin_chunks(self, view: ContextGPUView, mode: SamplingMode) -> None:
        """Let the rows of a step with prefill chunks begin."""
        for state in self._states:
            state.begin_chunks(view, mode)

    def save(self, entry: int) -> None:
        """Keep the present state as an entry of a ring."""
        for state in self._states:
            state.save(entry)

    def restore(self, entry: int, slots: Tensor) -> None:
        """Put the state of some slots back."""
        for state in self._states:
            state.restore(entry, slots)

    def rebuild(self, known: KnownTokens) -> None:
        """Build the state of some slots anew."""
        for state in self._states:
            state.rebuild(known)


class FeedbackState(PerSlotState):
    """What sampling hands to the next step: last token, length and drafts. The last chunk of a
    request sets them all, so a first chunk finds nothing to reset.

    Args:
        slots: where they are.
        entries: length of the ring in which they are kept; 0 where nothing is ever put back.
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
