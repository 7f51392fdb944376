"""Store drafts of a step by slot, for the next step, and in the sample rings, for the host and for
other pipeline stages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.op import op, promising

TILE = 128


@op
def store_drafts(
    drafts: Tensor,
    row_slots: Tensor,
    entry: Tensor,
    by_slot: Tensor,
    ring: Tensor,
    host: Tensor,
    first: int,
) -> None:
    """Store a step's drafts.

    Args:
        drafts: int64 `[rows, count]`.
        row_slots: int64 `[rows]`.
        entry: int32 `[1]`: the step's entry of the ring.
        by_slot: int64 `[slots, count]`, changed at the rows' slots.
        ring: int32 `[entries, rows or more, words]`, changed in the step's entry.
        host: as `ring`, host memory that the device may write.
        first: word of a row of the ring that its first draft goes to.
    """
    rows, count = drafts.shape
    by_slot.index_copy_(0, row_slots, drafts)
    for samples in (ring, host):
        found = samples[:, :rows, first : first + count]
        found.index_copy_(0, entry.long(), drafts.int()[None])


@store_drafts.gpu
@promising("invariant")
def store_drafts_gpu(
    drafts: Tensor,
    row_slots: Tensor,
    entry: Tensor,
    by_slot: Tensor,
    ring: Tensor,
    host: Tensor,
    first: int,
) -> None:
    rows, count = drafts.shape
    _store_drafts_kernel[(triton.cdiv(rows * count, TILE),)](
        drafts, row_slots, entry, by_slot, ring, host, ring.stride(0), ring.size(2), first, rows,
        count, TILE, **launch_options(drafts),
    )  # fmt: skip


@triton.jit(do_not_specialize=["ring_stride", "first", "rows"])
def _store_drafts_kernel(
    drafts: tl.tensor,
    row_slots: tl.tensor,
    entry: tl.tensor,
    by_slot: tl.tensor,
    ring: tl.tensor,
    host: tl.tensor,
    ring_stride: tl.tensor,
    words: tl.constexpr,
    first: tl.tensor,
    rows: tl.tensor,
    count: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    number = tl.program_id(0) * tile + tl.arange(0, tile)
    exists = number < rows * count
    row, draft = number // count, number % count
    token = tl.load(drafts + number, exists, other=-1)
    slot = tl.load(row_slots + row, exists, other=0)
    tl.store(by_slot + slot * count + draft, token, exists)
    place = tl.load(entry).to(tl.int64) * ring_stride + row * words + first + draft
    tl.store(ring + place, token.to(tl.int32), exists)
    tl.store(host + place, token.to(tl.int32), exists)
