"""Ownership of KV blocks, on the CPU: a stack of free block ids."""

from __future__ import annotations

import numpy as np

from megatron_async.contexts.step_plan import IntArray


class KVBlockAllocator:
    """Hands out and takes back blocks 0 .. total - 1.

    Blocks may be handed out again as soon as they are back: steps run in the order of their launch,
    so an in-flight step that still uses a block is done with it before a later step writes it.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        # The top of the stack is its end; the lowest ids are handed out first.
        self._stack = np.arange(total - 1, -1, -1, dtype=np.int32)
        self._free = total

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return self._free

    def allocate(self, count: int) -> IntArray:
        """Take `count` blocks: int32 `[count]`. The caller has made sure that they are there."""
        assert 0 <= count <= self._free, f"{count} blocks asked for, {self._free} free"
        left = self._free - count
        blocks = self._stack[left : self._free][::-1].copy()
        self._free = left
        return blocks

    def release(self, blocks: IntArray) -> None:
        """Give blocks back."""
        count = len(blocks)
        assert self._free + count <= self.total, "more blocks released than exist"
        self._stack[self._free : self._free + count] = blocks
        self._free += count

    def free_blocks(self) -> IntArray:
        """Ids of the free blocks, for the integrity check."""
        return self._stack[: self._free]
