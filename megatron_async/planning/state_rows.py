"""`StateRows`: which rows of the state pools belong to requests, and which hold snapshots.

A recurrent layer keeps a state of fixed size for a sequence. So a request can begin after a prefix
only where a *snapshot* of the state was kept, at the end of a block. Live requests and snapshots
share one pool of rows. A request that begins from a snapshot reads another row than it writes, so
nothing is copied. A live request may always take a snapshot's row.

Where snapshots are taken (the first two are Marconi's, Pan et al., MLSys 2025, arXiv 2411.19379):

- after the last whole unit of the tokens that a request prefills, for requests that continue there;
- where the KV blocks that were found go further than the states that were found: two requests
  have begun like this, so a third one may too;
- every `interval` tokens of a prompt;
- at every `unit`-th token of a request that decodes; of these only the last is kept.

All follows from the plans, as in `PrefixCache`, which is the only user of this module.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_async.device_state.state_table import StatePlan
from megatron_async.planning.request_slots import RequestSlots
from megatron_async.planning.step_plan import IntArray

NO_ROW = -1


class FoundState(NamedTuple):
    """The longest beginning of a sequence whose state is kept."""

    tokens: int = 0
    row: int = NO_ROW
    is_being_written: bool = False
    """Whether the step that is being planned writes the state."""


class StateRows:
    """Rows 0 .. `rows` - 1.

    Args:
        slots: per-request state.
        rows: at least one for each slot.
        block_size: tokens of a KV block.
        grid: the scan can store states at multiples of this position.
        interval: tokens between snapshots inside a prompt, rounded up to whole units; 0: none.
        limit: most snapshots; None: all rows that no live request needs.

    Attributes:
        unit: snapshots are taken at multiples of this position, which is the end of a block.
        of_slot: int32 `[slots]`: the row of each slot's request, -1 where there is none.
        hits: requests that have begun from a snapshot.
        losses: snapshots that cannot be found any more, for any reason.
        evictions: losses whose row was given to another owner.
    """

    def __init__(
        self,
        slots: RequestSlots,
        rows: int,
        block_size: int,
        grid: int,
        interval: int = 0,
        limit: int | None = None,
    ) -> None:
        assert rows >= slots.capacity, f"{rows} rows are fewer than {slots.capacity} slots"
        self._slots, self._size, self._grid = slots, block_size, grid
        self.unit = math.lcm(block_size, grid)
        self._interval = -(-interval // self.unit) * self.unit
        self._limit = rows if limit is None else limit
        self._rows = rows
        self.hits = 0
        self.losses = 0
        self.evictions = 0
        self.clear()

    def clear(self) -> None:
        """Make all rows free, whatever they were."""
        slots, rows = self._slots, self._rows
        self.of_slot = np.full(slots.capacity, NO_ROW, dtype=np.int32)
        self._free = list(range(rows - 1, -1, -1))
        self._row_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * rows
        self._order: OrderedDict[int, None] = OrderedDict()
        """Rows of snapshots, the longest unused first."""
        self._written_by = np.full(rows, -1, dtype=np.int64)
        self._read_by = np.full(rows, -1, dtype=np.int64)
        """The plan in which a request began from the row last."""
        self._decoder = np.full(rows, -1, dtype=np.int32)
        """The slot whose decoding left the snapshot, where no other request has found it yet."""
        self._pending = np.full(slots.capacity, NO_ROW, dtype=np.int32)
        """Snapshot of a decoding request, whose tokens are not all known, so that it has no hash
        yet."""
        self._pending_end = np.zeros(slots.capacity, dtype=np.int32)
        self._latest = np.full(slots.capacity, NO_ROW, dtype=np.int32)
        """The one before, that can be found."""
        self._step = 0
        """The plan that a row was taken for last."""
        self._reads: dict[int, int] = {}
        self._marks: dict[int, list[int]] = {}
        self._dests: dict[int, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        """Snapshots that are held."""
        return len(self._order)

    def holds(self, each: bytes) -> bool:
        """Whether there is a snapshot at the end of the block with this hash."""
        return each in self._row_of

    # ---- Requests begin ----------------------------------------------------------------------

    def find(self, hashes: list[bytes], step: int) -> FoundState:
        """The last snapshot of a sequence.

        Args:
            hashes: of its blocks, from its beginning.
            step: number of the plan that is made.
        """
        stride = self.unit // self._size
        for count in range(len(hashes) // stride * stride, 0, -stride):
            row = self._row_of.get(hashes[count - 1])
            if row is not None:
                return FoundState(count * self._size, row, bool(self._written_by[row] >= step))
        return FoundState()

    def can_begin(self, found: int, step: int) -> bool:
        """Whether plan `step` has a row for one more request, which begins from row `found`, or -1.

        It has none only if the plan itself needs all snapshots.
        """
        if self._free or self._oldest(step, spared=found) is not None:
            return True
        return found != NO_ROW and not self._is_in_use(found, step)

    def begin(self, slot: int, found: int, matched: int, step: int) -> None:
        """Give a request that begins a row.

        Args:
            slot: of the request; its `num_cached` is the snapshot's.
            found: the snapshot's row, or -1.
            matched: tokens whose KV blocks were found; as many as have a snapshot, or more.
            step: the plan that is made; `can_begin` has said yes.
        """
        self._step = step
        if self._free:
            row = self._free.pop()
        else:
            # The snapshot itself, if no other is left: the request goes on in its row.
            oldest = self._oldest(step, spared=found)
            row = found if oldest is None else oldest
            self._forget(row)
            self.evictions += 1
        self.of_slot[slot] = row
        self._reads[slot] = row if found == NO_ROW else found
        self.hits += found != NO_ROW
        if found not in (NO_ROW, row):
            self._read_by[found] = step
            self._decoder[found] = -1
            self._order.move_to_end(found)
        start, known = int(self._slots.num_cached[slot]), int(self._slots.num_known[slot])
        ends = {matched // self.unit * self.unit, (known - 1) // self.unit * self.unit}
        self._marks[slot] = [end for end in ends if end > start]

    def leave(self, slot: int) -> None:
        """The request in `slot` leaves: its row is free; its snapshots that can be found stay."""
        self._drop_pending(slot)
        row, self._latest[slot] = int(self._latest[slot]), NO_ROW
        if row != NO_ROW and self._decoder[row] == slot:
            self._decoder[row] = -1
        row = int(self.of_slot[slot])
        if row != NO_ROW:
            self._free.append(row)
            self.of_slot[slot] = NO_ROW
        for kept in (self._reads, self._marks, self._dests):
            kept.pop(slot, None)

    # ---- What steps write --------------------------------------------------------------------

    def written(self, slot: int, start: int, end: int, hashes: list[bytes], step: int) -> None:
        """Tokens `start` .. `end` - 1 of `slot` are prefilled by plan `step`: choose where their
        scan stores snapshots.

        Args:
            slot: of the request.
            start, end: of the chunk.
            hashes: of its blocks up to `end` at least.
            step: the plan that is made.
        """
        ends = {each for each in self._marks.get(slot, ()) if start < each <= end}
        if self._interval:
            first = (start // self._interval + 1) * self._interval
            ends.update(range(first, end + 1, self._interval))
        dests = []
        for position in sorted(ends, reverse=True):
            each = hashes[position // self._size - 1]
            if each in self._row_of:
                continue
            row = self._take(step)
            if row == NO_ROW:
                break
            self._enter(row, each)
            dests.append((position, row))
        self._dests[slot] = dests

    def decoded(self, slot: int, end: int, step: int) -> int:
        """Plan `step` brings the state of `slot` to its first `end` tokens: keep a snapshot of it.

        Returns:
            the row of the snapshot; -1 if none is free.
        """
        self._drop_pending(slot)
        self._drop_latest(slot, step)
        row = self._take(step)
        if row != NO_ROW:
            self._pending[slot], self._pending_end[slot] = row, end
            self._decoder[row] = slot
        return row

    @property
    def pending(self) -> IntArray:
        """Slots that have left a snapshot which cannot be found yet."""
        return np.flatnonzero(self._pending != NO_ROW)

    def settle(self, slot: int, hashes: list[bytes], step: int) -> None:
        """Enter the snapshot of a decoding request, if its tokens are known by now.

        Args:
            slot: that may be one of `pending`.
            hashes: of its request's blocks, as far as they are known.
            step: the plan that is made next.
        """
        row, count = int(self._pending[slot]), int(self._pending_end[slot]) // self._size
        if row == NO_ROW or count > len(hashes):
            return
        if hashes[count - 1] in self._row_of:
            self._drop_pending(slot)
            return
        self._drop_latest(slot, step)
        self._pending[slot], self._latest[slot] = NO_ROW, row
        self._enter(row, hashes[count - 1])

    def plan(
        self, saves: Sequence[tuple[int, int]], chunks: Sequence[tuple[int, int, int]]
    ) -> StatePlan:
        """State rows that a step's rows read and write.

        Args:
            saves: slots that decode, and the rows of their snapshots.
            chunks: slot, start and end of each prefill chunk.
        """
        grid, dests = self._grid, []
        for slot, start, end in chunks:
            own = np.full(-(-end // grid) - start // grid, NO_ROW, dtype=np.int32)
            for position, row in self._dests.pop(slot, ()):
                own[position // grid - 1 - start // grid] = row
            dests.append(own)
        slots = [slot for slot, _, _ in chunks]
        write_rows = self.of_slot[slots]
        reads = [self._reads.pop(slot, row) for slot, row in zip(slots, write_rows)]
        return StatePlan(
            write_rows=write_rows,
            read_rows=np.array(reads, dtype=np.int32),
            chunk_dest=np.concatenate(dests) if dests else np.empty(0, dtype=np.int32),
            save_slots=np.array([slot for slot, _ in saves], dtype=np.int32),
            save_rows=np.array([row for _, row in saves], dtype=np.int32),
        )

    # ---- What is lost ------------------------------------------------------------------------

    def drop(self, each: bytes) -> None:
        """The KV block of this hash is lost, and with it the use of its state."""
        row = self._row_of.get(each)
        # The plan that is made may write it: of two blocks with the same tokens the other is known.
        if row is not None and not self._is_in_use(row, self._step):
            self._free_snapshot(row)

    def failed(self, step: int) -> None:
        """Forget snapshots that plan `step` and later plans were to write."""
        for row in [row for row in self._order if self._written_by[row] >= step]:
            self._free_snapshot(row)

    def reset(self) -> None:
        """Forget all snapshots."""
        for row in list(self._order):
            self._free_snapshot(row)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each row has exactly one use, and each slot in use a row."""
        live = self.of_slot[self.of_slot != NO_ROW]
        uses = sorted([*self._free, *self._order, *live.tolist()])  # sync-ok: NumPy
        assert uses == list(range(len(self._hash_of))), f"state rows lost or used twice: {uses}"
        held = np.array([request is not None for request in self._slots.requests])
        assert ((self.of_slot != NO_ROW) == held).all(), "a request without a state row"
        known = sorted(self._row_of.values())
        hashed = [row for row, each in enumerate(self._hash_of) if each is not None]
        assert known == hashed, "snapshots that cannot be found, or without a hash"
        waiting = self._pending[self._pending != NO_ROW].tolist()  # sync-ok: NumPy
        assert sorted([*known, *waiting]) == sorted(self._order), "a snapshot of nobody"

    # ---- Rows --------------------------------------------------------------------------------

    def _take(self, step: int) -> int:
        """A row for a snapshot that plan `step` writes, entered in the order; -1 if there is
        none."""
        self._step = step
        if self._free and len(self._order) < self._limit:
            row = self._free.pop()
        else:
            oldest = self._oldest(step)
            if oldest is None:
                return NO_ROW
            row = oldest
            self._forget(row)
            self.evictions += 1
        self._order[row] = None
        self._written_by[row] = step
        return row

    def _oldest(self, step: int, spared: int = NO_ROW) -> int | None:
        """The snapshot that is to go next; not one that plan `step` reads or writes."""
        for row in self._order:
            if row != spared and not self._is_in_use(row, step):
                return row
        return None

    def _is_in_use(self, row: int, step: int) -> bool:
        return bool(self._written_by[row] == step or self._read_by[row] == step)

    def _enter(self, row: int, each: bytes) -> None:
        self._row_of[each] = row
        self._hash_of[row] = each

    def _drop_pending(self, slot: int) -> None:
        row = int(self._pending[slot])
        if row != NO_ROW:
            self._free_snapshot(row)

    def _drop_latest(self, slot: int, step: int) -> None:
        """Drop the last but one snapshot of a decoding request, unless a request has found it."""
        row, self._latest[slot] = int(self._latest[slot]), NO_ROW
        if row != NO_ROW and self._decoder[row] == slot and not self._is_in_use(row, step):
            self._free_snapshot(row)

    def _free_snapshot(self, row: int) -> None:
        self._forget(row)
        self._free.append(row)

    def _forget(self, row: int) -> None:
        """Take a snapshot out of the books; its row is the caller's."""
        del self._order[row]
        each, self._hash_of[row] = self._hash_of[row], None
        if each is not None:
            del self._row_of[each]
            self.losses += 1
        slot, self._decoder[row] = int(self._decoder[row]), -1
        if slot >= 0 and self._pending[slot] == row:
            self._pending[slot] = NO_ROW
