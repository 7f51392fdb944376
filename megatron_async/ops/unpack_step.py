"""First and last work of a step: from the packed bookkeeping to what the layers read.

Two kernels where plain torch needs fifteen: block-table updates first, then what follows from a
row's slot and KV length. A third feeds the samples back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous

TILE = 128


@dataclass
class StepRows:
    """Output buffers for up to `max_rows` rows; fixed addresses, so that graphs may read them.

    Attributes:
        slots: int64 `[rows]`.
        token_ids: int64 `[rows]`: the slot's last sampled token, to be fed now.
        positions: int64 `[rows]`: its position, KV length - 1.
        write_index: int64 `[rows]`: its place in the flat KV cache.
        block_tables: int32 `[rows, blocks]`.
    """

    slots: Tensor
    token_ids: Tensor
    positions: Tensor
    write_index: Tensor
    block_tables: Tensor

    @classmethod
    def empty(cls, max_rows: int, max_blocks: int, device: torch.device) -> StepRows:
        """Uninitialised buffers."""
        vectors = torch.empty(4, max_rows, dtype=torch.int64, device=device)
        tables = torch.empty(max_rows, max_blocks, dtype=torch.int32, device=device)
        return cls(vectors[0], vectors[1], vectors[2], vectors[3], tables)

    def head(self, rows: int) -> StepRows:
        """Views of the first `rows` rows."""
        return StepRows(
            self.slots[:rows],
            self.token_ids[:rows],
            self.positions[:rows],
            self.write_index[:rows],
            self.block_tables[:rows],
        )


def apply_block_updates(
    block_table: Tensor, slots: Tensor, indices: Tensor, blocks: Tensor
) -> None:
    """`block_table[slots, indices] = blocks`.

    Args:
        block_table: int32 `[slots, blocks]`, changed in place.
        slots, indices, blocks: int32 `[updates]`; a pair (slot, index) that stands twice (padding)
            has equal blocks.
    """
    if not block_table.is_cuda:
        block_table.index_put_((slots.to(torch.int64), indices.to(torch.int64)), blocks)
        return
    count = slots.numel()
    _update_kernel[(triton.cdiv(count, TILE),)](
        block_table,
        block_table.stride(0),
        slots,
        indices,
        blocks,
        count,
        TILE,
        **launch_options(slots),
    )


def unpack_rows(
    row_slots: Tensor,
    kv_lengths: Tensor,
    last_token: Tensor,
    block_table: Tensor,
    block_size: int,
    out: StepRows,
) -> None:
    """Fill `out`; block updates have been applied.

    Args:
        row_slots, kv_lengths: int32 `[rows]`; the KV length counts the token that is fed now.
        last_token: int64 `[slots]`.
        block_table: int32 `[slots, blocks]`.
        block_size: tokens a block.
        out: `rows` rows.
    """
    if not last_token.is_cuda:
        unpack_rows_reference(
            row_slots, kv_lengths, last_token, block_table, block_size, out
        )
        return
    rows, blocks = out.block_tables.shape
    _unpack_kernel[(rows, triton.cdiv(blocks, TILE))](
        row_slots,
        kv_lengths,
        last_token,
        block_table,
        block_table.stride(0),
        out.slots,
        out.token_ids,
        out.positions,
        out.write_index,
        out.block_tables,
        blocks,
        block_size,
        TILE,
        **launch_options(last_token),
    )


def unpack_rows_reference(
    row_slots: Tensor,
    kv_lengths: Tensor,
    last_token: Tensor,
    block_table: Tensor,
    block_size: int,
    out: StepRows,
) -> None:
    """`unpack_rows` in plain torch."""
    out.slots.copy_(row_slots)
    out.token_ids.copy_(last_token.index_select(0, out.slots))
    out.positions.copy_(kv_lengths - 1)
    out.block_tables.copy_(block_table.index_select(0, out.slots))
    block = block_table[out.slots, out.positions // block_size].to(torch.int64)
    out.write_index.copy_(block * block_size + out.positions % block_size)


def feed_back_tokens(
    sampled: Tensor, slots: Tensor, last_token: Tensor, ring: Tensor, entry: Tensor
) -> None:
    """Store sampled tokens where the next step and the copy to the host find them.

    Args:
        sampled: int64 `[rows]`.
        slots: int64 `[rows]`.
        last_token: int64 `[slots]`, changed at `slots`.
        ring: int32 `[entries, max rows]`, changed in row `entry`.
        entry: int32 `[1]`: a number on the device, because a graph's addresses are fixed.
    """
    rows = sampled.numel()
    if not sampled.is_cuda:
        last_token.index_copy_(0, slots, sampled)
        ring[:, :rows].index_copy_(0, entry.to(torch.int64), sampled.to(torch.int32)[None])
        return
    _feed_back_kernel[(triton.cdiv(rows, TILE),)](
        sampled,
        slots,
        last_token,
        ring,
        ring.stride(0),
        entry,
        rows,
        TILE,
        **launch_options(sampled),
    )


@triton.jit
def _update_kernel(
    table: tl.tensor,
    stride: tl.tensor,
    slots: tl.tensor,
    indices: tl.tensor,
    blocks: tl.tensor,
    count: tl.tensor,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    offset = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = offset < count
    slot = tl.load(slots + offset, inside, other=0).to(tl.int64)
    index = tl.load(indices + offset, inside, other=0)
    block = tl.load(blocks + offset, inside, other=0)
    tl.store(table + slot * stride + index, block, inside)


@triton.jit
def _unpack_kernel(
    row_slots: tl.tensor,
    kv_lengths: tl.tensor,
    last_token: tl.tensor,
    table: tl.tensor,
    stride: tl.tensor,
    out_slots: tl.tensor,
    out_tokens: tl.tensor,
    out_positions: tl.tensor,
    out_write: tl.tensor,
    out_tables: tl.tensor,
    num_blocks: tl.tensor,
    block_size: tl.tensor,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(row_slots + row).to(tl.int64)
    column = part * tile + tl.arange(0, tile)
    inside = column < num_blocks
    entries = tl.load(table + slot * stride + column, inside, other=0)
    tl.store(out_tables + row.to(tl.int64) * num_blocks + column, entries, inside)
    if part == 0:
        position = tl.load(kv_lengths + row).to(tl.int64) - 1
        block = tl.load(table + slot * stride + position // block_size).to(tl.int64)
        tl.store(out_slots + row, slot)
        tl.store(out_tokens + row, tl.load(last_token + slot))
        tl.store(out_positions + row, position)
        tl.store(out_write + row, block * block_size + position % block_size)


@triton.jit
def _feed_back_kernel(
    sampled: tl.tensor,
    slots: tl.tensor,
    last_token: tl.tensor,
    ring: tl.tensor,
    stride: tl.tensor,
    entry: tl.tensor,
    rows: tl.tensor,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    offset = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = offset < rows
    token = tl.load(sampled + offset, inside, other=0)
    slot = tl.load(slots + offset, inside, other=0)
    tl.store(last_token + slot, token, inside)
    row = tl.load(entry).to(tl.int64)
    tl.store(ring + row * stride + offset, token.to(tl.int32), inside)
