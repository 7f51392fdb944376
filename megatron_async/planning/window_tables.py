"""`WindowTables`: which blocks the layers with a window hold, of each slot's request.

A query at position p sees the keys from p - window + 1 on. So once all queries to come stand at p
or behind, the blocks that end before that key are of no use: they go back, and a later step may
write them, because it runs later. Blocks of windows are given chunk by chunk, while full layers
have those of all known tokens from the admission on: a long prompt holds a window of blocks, and
those of a chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_async.device_state.cache_layout import BlockNeeds
from megatron_async.planning.step_plan import IntArray


class WindowTables:
    """The tables of window layers.

    Args:
        needs: of a sequence.
        capacity: slots.
        columns: of each block table.

    Attributes:
        needs: as given.
        per_block: tables with a window: blocks that are given together.
        first: int32 `[kinds, slots]`: the first block of a slot's tables that is held.
        end: int32 `[slots]`: the end of those held.
    """

    def __init__(self, needs: BlockNeeds, capacity: int, columns: int) -> None:
        self.needs, self._columns = needs, columns
        self.per_block = len(needs.windows) - needs.full
        self.first = np.zeros((len(needs.kinds), capacity), dtype=np.int32)
        self.end = np.zeros(capacity, dtype=np.int32)

    def clear(self, slot: int | slice = slice(None)) -> None:
        """Nothing is held."""
        self.first[:, slot] = 0
        self.end[slot] = 0

    def begin(self, slot: int, shared: int, query: int) -> None:
        """A request begins with `shared` blocks of others; its first query stands at `query`."""
        self.end[slot] = shared
        for kind, (window, _, _) in enumerate(self.needs.kinds):
            self.first[kind, slot] = self.first_needed(window, query) if shared else 0

    def first_needed(self, window: int, query: Any) -> Any:
        """The first block that a query at this position needs, int or int32 `[slots]`."""
        return np.maximum(query - window + 1, 0) // self.needs.block_size

    def spans(self, slot: int) -> list[slice]:
        """Columns of a slot's row of the block table that are held."""
        end, found = int(self.end[slot]), []
        for kind, (_, table, count) in enumerate(self.needs.kinds):
            first = int(self.first[kind, slot])
            places = (number * self._columns for number in range(table, table + count))
            found += [slice(place + first, place + end) for place in places]
        return found

    def pass_by(self, slot: int, queries: int) -> list[slice]:
        """All queries to come stand at position `queries` or behind: columns of a slot's row whose
        blocks are of no use any more. They are not held from now on."""
        found = []
        for kind, (window, table, count) in enumerate(self.needs.kinds):
            first = int(self.first[kind, slot])
            needed = min(int(self.first_needed(window, queries)), int(self.end[slot]))
            if needed > first:
                self.first[kind, slot] = needed
                places = (number * self._columns for number in range(table, table + count))
                found += [slice(place + first, place + needed) for place in places]
        return found

    def passed(self, queries: IntArray) -> np.ndarray:
        """Slots whose tables have blocks that no query behind `queries`, int32 `[slots]`, needs."""
        found = np.zeros(len(queries), dtype=np.bool_)
        for kind, (window, _, _) in enumerate(self.needs.kinds):
            found |= self.first_needed(window, queries) > self.first[kind]
        return found

    def more(self, slot: int, count: int) -> IntArray:
        """Columns for `count` further blocks of each table, int64 `[tables * count]`, table by
        table; they are held from now on."""
        end = int(self.end[slot])
        self.end[slot] = end + count
        tables = np.arange(self.needs.full, len(self.needs.windows)) * self._columns
        found: IntArray = (tables[:, None] + np.arange(end, end + count)).ravel()
        return found
