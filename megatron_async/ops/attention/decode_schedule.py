"""`DecodeSchedule`: the work of each program of the decode kernel, made on the device once a step.

A captured step serves any lengths, so the device makes all decisions that depend on lengths. Rows
are split into parts of at most a common size, so that a batch has about as many parts as the device
runs at once. So the whole device reads a single long row, several programs a KV head read a long
row among short ones, and rows that fill the device stay whole. Longer rows begin first: a long one
that began last would be read alone. The host only has bounds: `rows + extra` items, of which less
than `2 * extra` belong to rows with several parts.

Every layer reads the same schedule. A row's parts, and with them the rounding of its output, depend
on the lengths of the whole batch; unless parts have a length of their own: then a program takes
neighbouring parts, and its rows' roundings depend on nothing but their keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous

PROGRAMS_A_PROCESSOR = 2
"""Programs that the parts of a batch should make; 3, 4 and 6 were no better in sum
(docs/records/decode_attention.md)."""
FULL = 0.9
"""Rows times KV heads for each processor, above which rows fill the device. Then a part is one
processor's share, so that most rows are whole (SmolLM2's step of 64 rows 0.629 -> 0.597 ms), and
the program that stores a row's last part joins them (0.676 -> 0.641, and Llama-3.1-8B's step of 16
rows, which are 0.97 here, 4.224 -> 4.162). With fewer rows joining so was slower: 0.384 -> 0.449 at
one row of SmolLM2, 0.579 -> 0.593 at 32; larger parts were not measured there."""
TILE_ELEMENTS = 8192
"""Items times rows that a program of the schedule compares."""


class DecodeSchedule:
    """Items of work for the decode rows of a step.

    Attributes:
        items: int32 `[max_rows + extra, 4]`: row (-1: nothing to do), first token, end, and the
            slot of the (first) partial result (-1: the row has one item). By falling row length;
            so rows of several parts come first. With the lengths of a served trace the 8B shape's
            attention takes 0.92 of its time in the order of rows at 256 rows, 0.87 at 128.
        splits: int32 `[max_rows, 2]`: of each row the first slot and the number of its parts, whose
            slots follow each other; (-1, 1) of a row of one part.
        rows: decode rows that it was last made for.
        slots: partial results that a batch can have.
        part: tokens of a part, of which an item may have several; 0: each item is a part.
    """

    def __init__(
        self,
        max_rows: int,
        kv_heads: int,
        tile: int,
        device: torch.device,
        part: int = 0,
        longest: int = 0,
        window: int = 0,
    ) -> None:
        """`tile`: tokens that a program takes together; parts are whole tiles. `part`: tokens of
        each part, from a row's first on; 0: parts are as long as the batch wants. `longest`: most
        tokens of a row that are read; read with `part`. `window`: keys that a query sees; 0:
        all."""
        if part % tile:
            raise ValueError(f"DecodeSchedule: parts of {part} tokens are not tiles of {tile}.")
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.extra = -(-PROGRAMS_A_PROCESSOR * self.processors // kv_heads)
        self.kv_heads = kv_heads
        self.tile, self.part, self.window = tile, part, window
        # A row of n > 1 items has over n / 2 shares; of rows of several items are less than shares.
        self.slots = self.extra * triton.cdiv(longest, part) if part else 2 * self.extra
        self.rows = 0
        self.max_rows = max_rows
        self.items = torch.empty((max_rows + self.extra, 4), dtype=torch.int32, device=device)
        self.splits = torch.empty((max_rows, 2), dtype=torch.int32, device=device)

    @property
    def is_full(self) -> bool:
        """Whether `rows` fill the device."""
        return self.rows * self.kv_heads > FULL * self.processors

    @property
    def shares(self) -> int:
        """Parts of equal size that the tokens of `rows` are divided into, at most `extra`."""
        programs = 1 if self.is_full else PROGRAMS_A_PROCESSOR
        return -(-programs * self.processors // self.kv_heads)

    def update(self, kv_lengths: Tensor, limit: Tensor | None = None, width: int = 1) -> None:
        """Launch the kernel that makes the schedule of rows of these lengths, int32 `[rows]`,
        contiguous; a row of no tokens is fine. Rows from `limit`'s first element on, int32, have no
        items, and their output is not written. The last `width` tokens of a row are its queries:
        with a window its first item begins at the first key that one of them sees."""
        rows = kv_lengths.numel()
        if not 0 < rows <= self.max_rows:
            raise ValueError(
                f"DecodeSchedule: {rows} rows for a schedule of 1 to {self.max_rows}: make it with "
                "a larger max_rows, or leave a step without decode rows out."
            )
        if kv_lengths.dtype != torch.int32 or not kv_lengths.is_contiguous():
            raise ValueError(
                f"DecodeSchedule: kv_lengths must be contiguous int32, found {kv_lengths.dtype} "
                f"with strides {kv_lengths.stride()}."
            )
        self.rows = rows
        shares = self.shares
        row_tile = triton.next_power_of_2(rows)
        item_tile = min(max(TILE_ELEMENTS // row_tile, 1), 32)
        _schedule_kernel[(triton.cdiv(rows + shares, item_tile),)](
            kv_lengths,
            kv_lengths if limit is None else limit,
            self.items,
            self.splits,
            rows,
            shares,
            row_tile=row_tile,
            item_tile=item_tile,
            unit=self.part or self.tile,
            part=self.part,
            in_window=self.window + width - 1 if self.window else 0,
            has_limit=limit is not None,
            **launch_options(kv_lengths),
        )


@triton.jit(do_not_specialize=["rows", "shares"])
def _schedule_kernel(
    kv_lengths: tl.tensor,
    limit: tl.tensor,
    items: tl.tensor,
    splits: tl.tensor,
    rows: tl.tensor,
    shares: tl.tensor,
    row_tile: tl.constexpr,
    item_tile: tl.constexpr,
    unit: tl.constexpr,
    part: tl.constexpr,
    in_window: tl.constexpr,
    has_limit: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Items of whole units, of `part` tokens or of tiles. A row's last `in_window` tokens are read;
    0: all."""
    wait_for_previous(overlap)
    # Every program works out all rows, and then its own items.
    row = tl.arange(0, row_tile)
    present = tl.minimum(rows, tl.load(limit)) if has_limit else rows
    length = tl.load(kv_lengths + row, mask=row < present, other=-1)
    # By falling length, equal ones by row; what is no row comes last.
    key = tl.sort(length.to(tl.int64) * row_tile + (row_tile - 1 - row), descending=True)
    row = row_tile - 1 - (key & (row_tile - 1)).to(tl.int32)
    length = tl.maximum(key // row_tile, 0).to(tl.int32)
    if in_window > 0:
        begin = tl.maximum(length - in_window, 0)
        before = begin // unit * unit
        length -= before
    largest = tl.maximum(tl.cdiv(tl.cdiv(tl.sum(length, 0), shares), unit), 1) * unit
    wanted = tl.maximum(tl.cdiv(length, largest), 1)
    # As equal as whole units allow; the rounding can make the last item of `wanted` needless.
    share = tl.maximum(tl.cdiv(length, wanted * unit), 1) * unit
    parts = tl.where(row < present, tl.maximum(tl.cdiv(length, share), 1), 0)
    in_split = tl.where(parts > 1, parts, 0)
    in_whole = tl.where(parts == 1, 1, 0)
    num_split = tl.sum(in_split, 0)
    after_split = tl.cumsum(in_split, 0) - in_split
    after_whole = num_split + tl.cumsum(in_whole, 0) - in_whole
    first = tl.where(parts > 1, after_split, after_whole)

    item = tl.program_id(0) * item_tile + tl.arange(0, item_tile)
    nth = item[:, None] - first[None, :]
    here = (nth >= 0) & (nth < parts[None, :])  # true for one row at most
    start = nth * share[None, :]
    end = tl.minimum(start + share[None, :], length[None, :])
    in_row = start
    if in_window > 0:
        end += before[None, :]
        start = tl.maximum(start + before[None, :], begin[None, :])
    exists = item < rows + shares
    found = tl.sum(tl.where(here, row[None, :] + 1, 0), 1) - 1
    tl.store(items + item * 4, found, mask=exists)
    tl.store(items + item * 4 + 1, tl.sum(tl.where(here, start, 0), 1), mask=exists)
    tl.store(items + item * 4 + 2, tl.sum(tl.where(here, end, 0), 1), mask=exists)
    slot = item
    if part > 0:
        parts = tl.where(parts > 1, tl.cdiv(length, part), parts)
        in_split = tl.where(parts > 1, parts, 0)
        first = tl.cumsum(in_split, 0) - in_split
        slot = tl.sum(tl.where(here, first[None, :] + in_row // part, 0), 1)
    tl.store(items + item * 4 + 3, tl.where(item < num_split, slot, -1), mask=exists)
    if tl.program_id(0) == 0:
        split = splits + row * 2
        tl.store(split, tl.where(parts > 1, first, -1), mask=row < rows)
        tl.store(split + 1, tl.maximum(parts, 1), mask=row < rows)
