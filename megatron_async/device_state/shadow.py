"""`ShadowRing`: small per-slot device state as it was before a step, for a policy that takes steps
back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


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
        """Keep the tensors as entry `entry`, over what it held; launched work."""
        for tensor, ring in zip(self._tensors, self._rings, strict=True):
            ring[entry].copy_(tensor)

    def restore(self, entry: int, slots: Tensor) -> None:
        """Put the rows of `slots`, int64 `[rows]`, host memory, back to what they were when `entry`
        was saved; launched work."""
        slots = slots.to(self._tensors[0].device)
        for tensor, ring in zip(self._tensors, self._rings, strict=True):
            tensor.index_copy_(0, slots, ring[entry].index_select(0, slots))
