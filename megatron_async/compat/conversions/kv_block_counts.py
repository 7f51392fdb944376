"""`KVBlockCounts`: the numbers of Megatron's `KVBlockAllocator`, read from our books."""

from __future__ import annotations

import numpy as np

from megatron_async.contexts.kv_block_allocator import KVBlockAllocator
from megatron_async.contexts.request_slots import RequestSlots, SlotState


class KVBlockCounts:
    """Numbers of blocks; who has which is not Megatron's affair here.

    In Megatron the dummy block is one of `total_count`; so it is here.

    Args:
        blocks: ownership of blocks.
        slots: the requests that hold them.
        max_paused: blocks that paused requests may hold; all of them without a limit.
        enable_prefix_caching: whether blocks without an owner are remembered.
    """

    def __init__(
        self,
        blocks: KVBlockAllocator,
        slots: RequestSlots,
        max_paused: int,
        enable_prefix_caching: bool,
    ) -> None:
        self._blocks = blocks
        self._slots = slots
        self.total_count = blocks.total + 1
        self.dummy_block_idx = blocks.total
        self.paused_count = max_paused if max_paused < blocks.total else 0
        self.active_count = blocks.total - self.paused_count
        self.enable_prefix_caching = enable_prefix_caching

    @property
    def total_avail(self) -> int:
        """Blocks that can be handed out, remembered ones among them."""
        return self._blocks.allocatable

    def get_total_used(self) -> int:
        """Blocks that requests hold."""
        return self._blocks.total - self._blocks.allocatable

    def get_active_used(self) -> int:
        """Blocks that requests hold which are not paused, each counted once."""
        state = self._slots.state
        return self._held((state != SlotState.FREE) & (state != SlotState.PAUSED))

    def get_paused_used(self) -> int:
        """Blocks that paused requests hold, each counted once."""
        return self._held(self._slots.state == SlotState.PAUSED)

    def get_active_avail(self) -> int:
        """Blocks that may still go to requests which are not paused."""
        return self.active_count - self.get_active_used()

    def get_paused_avail(self) -> int:
        """Blocks that paused requests may still hold."""
        return self.paused_count - self.get_paused_used()

    def is_memory_available(self, num_blocks: int) -> bool:
        """Whether so many blocks can be handed out."""
        return self._blocks.allocatable >= num_blocks

    def get_evictable_block_count(self) -> int:
        """Blocks that nobody owns and that are remembered."""
        return self._blocks.cached

    def __str__(self) -> str:
        return (
            f"using: total {self.get_total_used()}/{self._blocks.total}"
            f"; active {self.get_active_used()}/{self.active_count}"
            f"; paused {self.get_paused_used()}/{self.paused_count}"
        )

    def _held(self, is_meant: np.ndarray) -> int:
        slots = np.flatnonzero(is_meant)
        return self._blocks.count_held([self._slots.blocks_of(slot) for slot in slots])
