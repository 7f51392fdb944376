"""Shadows: per-slot device state as it was before a step, for a policy that takes steps back.

Whatever a step changes on the device, and a later step reads before it is written again, must have
a shadow, or be built anew from the tokens that the host knows (`known_tokens`). Keys and values
need neither: a step that is launched again writes the same places. Nor do block tables, sampling
parameters and records: the bookkeeping of the new launch carries them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class ShadowedState(Protocol):
    """Device state that can be put back. Both methods run inside launched work, on the compute
    stream, in the order of the steps."""

    def save(self, entry: int) -> None:
        """Keep the present state as entry `entry` of a ring, over what it held.

        Args:
            entry: 0 .. `InferenceConfig.steps_in_flight` - 1, a step number modulo that.
        """
        ...

    def restore(self, entry: int, slots: Tensor) -> None:
        """Make the state of `slots`, int64 `[rows]`, host memory, what it was when `entry` was
        saved; other slots may have changed since for good."""
        ...


class ShadowRing:
    """Shadows of whole tensors, which suits those of a few bytes a slot.

    Args:
        tensors: `[slots, ...]`, changed in place by steps, never replaced.
        entries: length of the ring.
    """

    def __init__(self, tensors: Sequence[Tensor], entries: int) -> None:
        self._tensors = tensors
        self._rings = [t.new_zeros(entries, *t.shape) for t in tensors]

    def save(self, entry: int) -> None:
        """See `ShadowedState`."""
        for tensor, ring in zip(self._tensors, self._rings, strict=True):
            ring[entry].copy_(tensor)

    def restore(self, entry: int, slots: Tensor) -> None:
        """See `ShadowedState`."""
        slots = slots.to(self._tensors[0].device)
        for tensor, ring in zip(self._tensors, self._rings, strict=True):
            tensor.index_copy_(0, slots, ring[entry].index_select(0, slots))
