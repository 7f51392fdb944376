"""`PrefillSchedule`: the work of each program of prefill attention, made on the device once a step.

A unit of work is a tile of queries, or a part of its keys. A chunk of few tokens over a long
sequence has few tiles of queries, and most of the device would wait for them. So their keys are
divided among more programs, and the last program of a tile joins the parts, as flash-decoding does
(Dao et al. 2023). A captured step serves any chunks, so the device decides, by their lengths. Every
layer reads the same schedule; a program reads its unit before it waits for the kernel before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous

LEAST_KEYS = 512
"""Fewest keys of a part: some 8 microseconds of walking, where a partial result and its share of
the join take some 2. With 256 and 1,024 the shapes measured were as fast or slower in sum
(docs/records/prefill_attention.md)."""
MOST_SLOTS = 256
"""Partial results of a KV head in parts of one length, each of which is stored: 64 queries of 128
elements are 33 KB. Keys of rows that need more are not divided."""
UNIT = tl.constexpr(16)
"""Numbers of a unit, the last of which are not used: units begin at multiples of 64 bytes."""
GROUP_QUERIES = tl.constexpr(64)
"""Queries of a warpgroup, which counts its parts itself: rows of one product of the matrix
units."""
TILE_ELEMENTS = 8192
"""Units times rows that a program of the schedule compares."""


class Parts(NamedTuple):
    """Partial results, of every layer in turn. A unit has a slot of its own for each KV head."""

    output: Tensor
    """float32 `[kv heads * slots, queries, dim]`."""
    maximum: Tensor
    """float32 `[kv heads * slots, queries]`: of the scores, for powers of 2."""
    total: Tensor
    """float32 `[kv heads * slots, queries]`."""
    arrived: Tensor
    """int32 `[kv heads * slots, warpgroups]`: parts stored of the tile that begins at this unit;
    zeros between two launches. A tile of fewer than 64 queries has one."""


class PrefillSchedule:
    """Units of work for the prefill rows of a step.

    Attributes:
        units: int32 `[units, 16]`: row (-1: nothing to do), first query of the tile, the chunk's
            first token, its tokens, its KV length, first tile of keys and end, part and parts. The
            last tiles of a chunk have the most keys, so they come first. Parts of a tile are
            neighbours. Where parts have one length a unit has several of them, and two numbers
            more: the slot of the tile's first part, and how many the tile has.
        rows: prefill rows that it was last made for.
        parts: partial results; None: no keys were divided.
        slots: of each KV head in `parts`. Only units below it are parts, but where parts have one
            length.
        part: keys of the parts of one length (`DecodeSchedule.part`); 0: parts follow the step.
    """

    def __init__(
        self,
        kv_heads: int,
        group: int,
        queries: int,
        dim: int,
        device: torch.device,
        processors: int = 0,
        programs: int = 1,
        part: int = 0,
    ) -> None:
        """Args:
        kv_heads: of the model; each makes a program of a unit.
        group: query heads of a KV head, which are rows of one tile.
        queries: of a tile: query tokens times `group`.
        dim: size of a head.
        device: a GPU; or a CPU with Triton's interpreter.
        processors: of the device, among which keys of few queries are divided; 0: they are not.
        programs: most that share a processor.
        part: see the attribute."""
        self.kv_heads, self.group, self.queries = kv_heads, group, queries
        self.processors, self.dim, self.part = processors, dim, part
        self.slots = (MOST_SLOTS if part else self.shares_of(programs)) if processors else 0
        self.rows = 0
        self.units = torch.empty((0, UNIT.value), dtype=torch.int32, device=device)
        self.parts: Parts | None = None
        self._parts: Parts | None = None
        if processors:
            slots = kv_heads * self.slots
            places = (slots, queries)
            groups = triton.cdiv(queries, GROUP_QUERIES.value)
            self._parts = Parts(
                torch.empty((*places, dim), dtype=torch.float32, device=device),
                torch.empty(places, dtype=torch.float32, device=device),
                torch.empty(places, dtype=torch.float32, device=device),
                torch.zeros((slots, groups), dtype=torch.int32, device=device),
            )

    def shares_of(self, programs: int) -> int:
        """Units of a KV head that the device runs at once, if so many programs fit a processor."""
        return max(programs * self.processors // self.kv_heads, 1)

    def update(
        self,
        kv_lengths: Tensor,
        starts: Tensor,
        tokens: int,
        max_query_length: int,
        key_tile: int,
        programs: int = 1,
    ) -> None:
        """Launch the kernel that makes the schedule of a step's rows (`backends/base.py`,
        `PrefillRows`). `key_tile`: keys of a tile, parts are whole tiles; `programs`: that should
        share a processor, if keys are divided."""
        rows = kv_lengths.numel()
        if not rows or starts.numel() != rows + 1:
            raise ValueError(
                f"PrefillSchedule: {rows} rows want {rows + 1} starts, found {starts.numel()}; a "
                "step without prefill rows needs no schedule."
            )
        # Every row may end with a tile that is not full.
        units = min(
            rows * triton.cdiv(max_query_length * self.group, self.queries),
            (tokens * self.group + rows * (self.queries - 1)) // self.queries,
        )
        self.parts, shares = None, 0
        # If the tokens are tiles for the whole device there is nothing to divide.
        most = min(self.shares_of(programs), self.slots)
        if self._parts and tokens * self.group < most * self.queries:
            self.parts, shares = self._parts, most
        units = max(units, shares)
        self.rows = rows
        # A captured step has its own, in its graph's memory.
        self.units = self.units.new_empty((units, UNIT.value))
        rows_tile = max(triton.next_power_of_2(rows), 16)
        unit_tile = min(max(TILE_ELEMENTS // rows_tile, 1), 32)
        if not units:
            return
        _schedule_kernel[(triton.cdiv(units, unit_tile),)](
            kv_lengths,
            starts,
            self.units,
            rows,
            units,
            shares,
            divides=shares > 0,
            least_keys=max(LEAST_KEYS, self.part),
            part=self.part,
            slots=self.slots if self.part else 0,
            group=self.group,
            query_tile=self.queries,
            key_tile=key_tile,
            rows_tile=rows_tile,
            unit_tile=unit_tile,
            **launch_options(kv_lengths),
        )


@triton.jit
def _parts_of_rows(
    tiles: tl.tensor, key_tiles: tl.tensor, shares: tl.tensor, least: tl.constexpr
) -> tl.tensor:
    """Parts of each tile of queries of a row, int32 `[rows]`, at least 1 and of `least` tiles of
    keys. All units together are `shares` at most; or no tile is divided, if there are as many
    tiles."""
    work = tl.sum(tiles * key_tiles, 0)
    # Equal parts, if they come out even. Otherwise a tile of queries has a part less than a full
    # one at most, which `room` leaves out.
    largest = tl.maximum(tl.cdiv(work, shares), least)
    parts = tl.maximum(tl.cdiv(key_tiles, largest), 1)
    room = tl.maximum(shares - tl.sum(tiles, 0), 1)
    if tl.sum(tiles * parts, 0) > shares:
        largest = tl.maximum(tl.cdiv(work, room), least)
        parts = tl.maximum(tl.cdiv(key_tiles, largest), 1)
    return parts


# Where prefill rows begin among a step's rows varies, and with it what is aligned.
@triton.jit(
    do_not_specialize=["rows", "count", "shares"],
    do_not_specialize_on_alignment=["kv_lengths", "starts"],
)
def _schedule_kernel(
    kv_lengths: tl.tensor,
    starts: tl.tensor,
    units: tl.tensor,
    rows: tl.tensor,
    count: tl.tensor,
    shares: tl.tensor,
    divides: tl.constexpr,
    least_keys: tl.constexpr,
    part: tl.constexpr,
    slots: tl.constexpr,
    group: tl.constexpr,
    query_tile: tl.constexpr,
    key_tile: tl.constexpr,
    rows_tile: tl.constexpr,
    unit_tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    # Every program works out all rows, and then its own units.
    each = tl.arange(0, rows_tile)
    begins = tl.load(starts + each, mask=each < rows, other=0)
    ends = tl.load(starts + each + 1, mask=each < rows, other=0)
    tiles = tl.cdiv((ends - begins) * group, query_tile)
    parts_of = tl.full((rows_tile,), 1, tl.int32)
    if divides:
        lengths = tl.load(kv_lengths + each, mask=each < rows, other=0)
        parts_of = _parts_of_rows(
            tiles, tl.cdiv(lengths, key_tile), shares, tl.cdiv(least_keys, key_tile)
        )
    if divides and part > 0:
        # Each part of a divided row's tiles has a slot.
        slots_of_tile = tl.cdiv(lengths, part)
        slots_of = tl.where(parts_of > 1, tiles * slots_of_tile, 0)
        first_slots = tl.cumsum(slots_of, 0) - slots_of
        parts_of = tl.where(first_slots + slots_of <= slots, parts_of, 1)
    units_of = tiles * parts_of
    first = tl.cumsum(units_of, 0) - units_of

    unit = tl.program_id(0) * unit_tile + tl.arange(0, unit_tile)
    number = tl.sum(units_of, 0) - 1 - unit
    of_row = number[:, None] - first[None, :]
    here = (of_row >= 0) & (of_row < units_of[None, :])  # true for one row at most
    row = tl.sum(tl.where(here, each[None, :] + 1, 0), 1) - 1
    of_row = tl.sum(tl.where(here, of_row, 0), 1)
    parts = tl.maximum(tl.sum(tl.where(here, parts_of[None, :], 0), 1), 1)
    exists = row >= 0
    start = tl.load(starts + row, mask=exists, other=0)
    tokens = tl.load(starts + row + 1, mask=exists, other=0) - start
    length = tl.load(kv_lengths + row, mask=exists, other=0)
    first_query = of_row // parts * query_tile
    nth = parts - 1 - of_row % parts
    tile = of_row // parts
    end = length - tokens + (first_query + query_tile - 1) // group + 1
    key_tiles = tl.cdiv(tl.minimum(end, length), key_tile)
    walked, step = key_tiles, 1
    if divides and part > 0:
        step = part // key_tile
        walked = tl.cdiv(key_tiles, step)
    # The first queries of a long chunk may see fewer tiles of keys than there are parts.
    parts = tl.maximum(tl.minimum(parts, walked), 1)
    row = tl.where(nth < parts, row, -1)
    place = units + unit * UNIT
    stored = unit < count
    tl.store(place, row, mask=stored)
    tl.store(place + 1, first_query, mask=stored)
    tl.store(place + 2, start, mask=stored)
    tl.store(place + 3, tokens, mask=stored)
    tl.store(place + 4, length, mask=stored)
    tl.store(place + 5, nth * walked // parts * step, mask=stored)
    tl.store(place + 6, (nth + 1) * walked // parts * step, mask=stored)
    tl.store(place + 7, nth, mask=stored)
    tl.store(place + 8, parts, mask=stored)
    if divides and part > 0:
        first_slot = tl.sum(tl.where(here, first_slots[None, :], 0), 1)
        its_slots = tl.sum(tl.where(here, slots_of_tile[None, :], 0), 1)
        tl.store(place + 9, first_slot + tile * its_slots, mask=stored)
        tl.store(place + 10, walked, mask=stored)
