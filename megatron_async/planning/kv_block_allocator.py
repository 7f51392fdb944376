"""Ownership of KV blocks, on the CPU: how many owners each block has, and which have none."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from megatron_async.planning.step_plan import IntArray


class KVBlockAllocator:
    """Hands out and takes back blocks 0 .. total - 1.

    A block has a number of owners. Without an owner it is *free* or *cached*. A cached block is
    kept for its content, and is handed out only when no block is free: the block that has had no
    owner for the longest time first. A released block may be handed out at once: steps run in the
    order of their launch, so a step in flight finishes using a block before a later step writes it.

    Args:
        total: blocks.

    Attributes:
        owners: int32 `[total]`: owners of each block.
        free: number of blocks that have no owner and are not cached.
        forgotten: cached blocks that were handed out, in that order; the prefix cache removes them
            from its index.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.clear()

    def clear(self) -> None:
        """Make all blocks free, whatever they were."""
        total = self.total
        self.owners = np.zeros(total, dtype=np.int32)
        self.forgotten: list[int] = []
        # The top of the stack is its end; the lowest ids are handed out first.
        self._stack = np.arange(total - 1, -1, -1, dtype=np.int32)
        self.free = total
        self._is_remembered = np.zeros(total, dtype=np.bool_)
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Cached blocks, the longest without an owner first."""
        self._num_remembered = self._num_shared = 0

    @property
    def cached(self) -> int:
        """Number of blocks without an owner that are cached."""
        return len(self._cached)

    @property
    def allocatable(self) -> int:
        """Number of blocks without an owner, free or cached."""
        return self.free + len(self._cached)

    @property
    def has_shared(self) -> bool:
        """Whether a block has several owners."""
        return self._num_shared > 0

    def allocate(self, count: int) -> IntArray:
        """Take `count` blocks, int32 `[count]`, each with one owner. The caller has checked that
        there are as many."""
        left = self.allocatable
        assert 0 <= count <= left, f"{count} blocks asked for, {left} there"
        if count > self.free:
            self._forget_oldest(count - self.free)
        left = self.free - count
        blocks = self._stack[left : self.free][::-1].copy()
        self.owners[blocks] = 1
        self.free = left
        return blocks

    def share(self, blocks: IntArray) -> None:
        """One more owner for each of `blocks`, which have owners or are cached; all different."""
        owners = self.owners[blocks]
        assert self._is_remembered[blocks[owners == 0]].all(), "a free block cannot be shared"
        for block in blocks[owners == 0]:
            del self._cached[int(block)]
        self._num_shared += int(np.count_nonzero(owners == 1))
        self.owners[blocks] = owners + 1

    def release(self, blocks: IntArray) -> None:
        """One owner less for each of `blocks`, which are all different."""
        owners = self.owners[blocks] - 1
        assert owners.min(initial=0) >= 0, "a block is released that nobody owns"
        self.owners[blocks] = owners
        if self._num_shared:
            self._num_shared -= int(np.count_nonzero(owners == 1))
            blocks = blocks[owners == 0]
        if self._num_remembered:
            is_remembered = self._is_remembered[blocks]
            # Of a sequence the end is handed out first: what is in front may be of use without it.
            for block in blocks[is_remembered][::-1]:
                self._cached[int(block)] = None
            blocks = blocks[~is_remembered]
        self._push(blocks)

    def remember(self, blocks: IntArray) -> None:
        """Cache `blocks`, which have owners, once they have no owner any more."""
        assert (self.owners[blocks] > 0).all(), "a block without an owner is remembered"
        self._num_remembered += int(np.count_nonzero(~self._is_remembered[blocks]))
        self._is_remembered[blocks] = True

    def forget(self, blocks: IntArray) -> None:
        """Take `remember` back: what `blocks`, all different, hold is of no use any more."""
        known = blocks[self._is_remembered[blocks]]
        self._is_remembered[known] = False
        self._num_remembered -= len(known)
        ownerless = known[self.owners[known] == 0]
        for block in ownerless:
            del self._cached[int(block)]
        self._push(ownerless)

    def count_held(self, tables: list[IntArray]) -> int:
        """Number of different blocks in some owners' tables."""
        if self.has_shared:
            return len(np.unique(np.concatenate(tables))) if tables else 0
        return sum(map(len, tables))

    def ownerless_blocks(self) -> IntArray:
        """Ids of the free blocks, then of the cached ones, for the integrity check."""
        cached = np.fromiter(self._cached, dtype=np.int32, count=len(self._cached))
        return np.concatenate((self._stack[: self.free], cached))

    def _forget_oldest(self, count: int) -> None:
        oldest = [self._cached.popitem(last=False)[0] for _ in range(count)]
        self.forgotten += oldest
        self._is_remembered[oldest] = False
        self._num_remembered -= count
        self._push(np.array(oldest, dtype=np.int32))

    def _push(self, blocks: IntArray) -> None:
        count = len(blocks)
        assert self.free + count <= self.total, "more blocks released than exist"
        self._stack[self.free : self.free + count] = blocks
        self.free += count
