"""First work of a step: from the packed bookkeeping to what the layers read.

One kernel, and another for prefill tokens, where plain torch needs thirty. The first takes a row:
its block-table updates, then what follows from its slot and KV length. The second takes tokens of
the prefill chunks: what follows from a token's row. They find the step's bookkeeping in a ring by a
number on the device, because a captured step's addresses are fixed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.contexts.batch_dimensions import BatchDimensions
from megatron_async.contexts.bookkeeping_layout import BookkeepingLayout
from megatron_async.contexts.device_slots import DeviceSlots
from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.philox import MASK
from megatron_async.ops.slot_records import STEP_FEATURES, RowFeature
from megatron_async.ops.step_tensors import StepTensors

TILE = 128
PRODUCES = int(RowFeature.PRODUCES)
KEPT = ~int(STEP_FEATURES)
IN_KERNEL_PRODUCES = tl.constexpr(PRODUCES)
IN_KERNEL_KEPT = tl.constexpr(KEPT)


def unpack_step(
    words: Tensor,
    next_entry: Tensor,
    dims: BatchDimensions,
    slots: DeviceSlots,
    block_size: int,
    out: StepTensors,
) -> None:
    """Apply block-table updates and sampling parameters to `slots`, and fill `out`.

    Args:
        words: int32 `[ring, words]`: packed bookkeeping of the steps in flight.
        next_entry: int32 `[1]`: entry of this step.
        dims: shape of the step.
        slots: per-slot state, changed in place. Block-table updates are for rows of this step only.
        block_size: tokens a block.
        out: tensors of the step's size, written. Padding tokens get id 0 at position 0 and a place
            in the last slot's first block.
    """
    unpack = unpack_step_kernels if words.is_cuda else unpack_step_reference
    unpack(words, next_entry, dims, slots, block_size, out)


def unpack_step_kernels(
    words: Tensor,
    next_entry: Tensor,
    dims: BatchDimensions,
    slots: DeviceSlots,
    block_size: int,
    out: StepTensors,
) -> None:
    """`unpack_step` by Triton kernels."""
    layout = BookkeepingLayout.for_batch(dims, 0)
    ring = (words, words.stride(0))
    table = (slots.block_table, slots.block_table.stride(0))
    options = launch_options(words)
    blocks = out.block_tables.size(1)
    _unpack_kernel[(dims.rows, triton.cdiv(blocks, TILE))](
        *ring,
        next_entry,
        out.entry,
        *table,
        layout.start("block_update_slots"),
        layout.start("row_slots"),
        layout.start("row_kv_lengths"),
        layout.start("prefill_starts"),
        layout.start("prefill_temperature"),
        slots.last_token,
        slots.temperature,
        slots.top_k,
        slots.top_p,
        slots.min_p,
        slots.seed,
        slots.features,
        out.slots,
        out.kv_lengths,
        out.features,
        out.last_token,
        out.block_tables,
        out.prefill_starts,
        out.token_ids,
        out.positions,
        out.write_index,
        dims.decode_rows,
        dims.prefill_rows,
        blocks,
        block_size,
        dims.prefill_rows > 0,
        TILE,
        **options,
    )
    if dims.prefill_rows:
        _unpack_tokens_kernel[(triton.cdiv(dims.prefill_tokens, TILE),)](
            *ring,
            out.entry,
            *table,
            layout.start("prefill_token_ids"),
            out.slots,
            out.kv_lengths,
            out.prefill_starts,
            out.token_ids,
            out.positions,
            out.write_index,
            dims.decode_rows,
            dims.prefill_rows,
            dims.prefill_tokens,
            len(slots.last_token) - 1,
            block_size,
            TILE,
            dims.prefill_rows.bit_length(),
            **options,
        )


def unpack_step_reference(
    words: Tensor,
    next_entry: Tensor,
    dims: BatchDimensions,
    slots: DeviceSlots,
    block_size: int,
    out: StepTensors,
) -> None:
    """`unpack_step` in plain torch. It reads numbers back, so it is for the CPU and for tests."""
    entry = int(next_entry)
    updates = int(words[entry, 0])
    fields = BookkeepingLayout.for_batch(dims, updates).device_views(words[entry])
    out.entry.fill_(entry)
    slots.block_table.index_put_(
        (fields["block_update_slots"].long(), fields["block_update_indices"].long()),
        fields["block_update_blocks"],
    )
    out.slots.copy_(fields["row_slots"])
    out.kv_lengths.copy_(fields["row_kv_lengths"])
    out.block_tables.copy_(slots.block_table.index_select(0, out.slots))
    decode = dims.decode_rows
    out.features.copy_(slots.features.index_select(0, out.slots) | PRODUCES)
    out.last_token[:decode] = torch.arange(decode, device=words.device)
    out.token_ids[:decode] = slots.last_token.index_select(0, out.slots[:decode])
    out.positions[:decode] = out.kv_lengths[:decode] - 1
    _write_index(out.block_tables[:decode], out.positions[:decode], block_size, out.write_index)
    if not dims.prefill_rows:
        return
    chunk_slots = out.slots[decode:]
    for name in ("temperature", "top_k", "top_p", "min_p"):
        getattr(slots, name).index_copy_(0, chunk_slots, fields[f"prefill_{name}"])
    low, high = fields["prefill_seed_low"].long() & MASK, fields["prefill_seed_high"].long()
    slots.seed.index_copy_(0, chunk_slots, (high << 32) | low)
    features = fields["prefill_features"]
    out.features[decode:] = features
    slots.features.index_copy_(0, chunk_slots, features & KEPT)
    starts = fields["prefill_starts"]
    out.prefill_starts.copy_(starts)
    out.last_token[decode:] = decode + (starts[1:] - 1).clamp(min=0)
    token = torch.arange(dims.prefill_tokens, device=words.device)
    row = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    inside = token < starts[-1]
    row = decode + row.clamp(max=dims.prefill_rows - 1)
    position = out.kv_lengths[row] - starts[row - decode + 1] + token
    position = position.where(inside, 0)
    out.token_ids[decode:] = fields["prefill_token_ids"].where(inside, 0)
    out.positions[decode:] = position
    tables = out.block_tables[row].where(inside[:, None], slots.block_table[-1])
    _write_index(tables, position, block_size, out.write_index[decode:])


def _write_index(tables: Tensor, positions: Tensor, block_size: int, out: Tensor) -> None:
    block = tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
    out[: len(positions)] = block * block_size + positions % block_size


# Offsets and counts are not to be specialized on: every shape would compile its own kernels.


@triton.jit(
    do_not_specialize=[
        "words_stride",
        "table_stride",
        "updates",
        "row_slots",
        "row_kv_lengths",
        "starts",
        "parameters",
        "decode_rows",
        "prefill_rows",
        "num_blocks",
    ]
)
def _unpack_kernel(
    words: tl.tensor,
    words_stride: tl.tensor,
    next_entry: tl.tensor,
    entry: tl.tensor,
    table: tl.tensor,
    table_stride: tl.tensor,
    updates: tl.tensor,
    row_slots: tl.tensor,
    row_kv_lengths: tl.tensor,
    starts: tl.tensor,
    parameters: tl.tensor,
    last_token: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seed: tl.tensor,
    features: tl.tensor,
    out_slots: tl.tensor,
    out_kv_lengths: tl.tensor,
    out_features: tl.tensor,
    out_last_token: tl.tensor,
    out_tables: tl.tensor,
    out_starts: tl.tensor,
    out_tokens: tl.tensor,
    out_positions: tl.tensor,
    out_write: tl.tensor,
    decode_rows: tl.tensor,
    prefill_rows: tl.tensor,
    num_blocks: tl.tensor,
    block_size: tl.tensor,
    has_prefill: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    current = tl.load(next_entry)
    step = words + current.to(tl.int64) * words_stride
    row, part = tl.program_id(0), tl.program_id(1)
    if (row == 0) & (part == 0):
        tl.store(entry, current)
    slot = tl.load(step + row_slots + row).to(tl.int64)
    # Updates of this row's part of the table; of all of it where a position is looked up below.
    count = tl.load(step)
    first = 0
    while first < count:
        offset = first + tl.arange(0, tile)
        update = step + updates + offset
        exists = offset < count
        index = tl.load(update + count, exists, other=-1)
        own = exists & (tl.load(update, exists, other=-1) == slot)
        own = own & ((part == 0) | (index // tile == part))
        block = tl.load(update + 2 * count, own, other=0)
        tl.store(table + slot * table_stride + index, block, own)
        first += tile
    tl.debug_barrier()
    column = part * tile + tl.arange(0, tile)
    inside = column < num_blocks
    blocks = tl.load(table + slot * table_stride + column, inside, other=0)
    tl.store(out_tables + row.to(tl.int64) * num_blocks + column, blocks, inside)
    if part == 0:
        kv_length = tl.load(step + row_kv_lengths + row)
        tl.store(out_slots + row, slot)
        tl.store(out_kv_lengths + row, kv_length)
        if row < decode_rows:
            position = kv_length.to(tl.int64) - 1
            block = tl.load(table + slot * table_stride + position // block_size).to(tl.int64)
            tl.store(out_features + row, tl.load(features + slot) | IN_KERNEL_PRODUCES)
            tl.store(out_last_token + row, row)
            tl.store(out_tokens + row, tl.load(last_token + slot))
            tl.store(out_positions + row, position)
            tl.store(out_write + row, block * block_size + position % block_size)
        elif has_prefill:
            chunk = row - decode_rows
            end = tl.load(step + starts + chunk + 1)
            tl.store(out_starts + chunk + 1, end)
            if chunk == 0:
                tl.store(out_starts, 0)
            tl.store(out_last_token + row, decode_rows + tl.maximum(end - 1, 0))
            # Seven arrays, one after another: see the field table.
            given = step + parameters + chunk
            tl.store(temperature + slot, tl.load(given).to(tl.float32, bitcast=True))
            tl.store(top_k + slot, tl.load(given + prefill_rows))
            tl.store(top_p + slot, tl.load(given + 2 * prefill_rows).to(tl.float32, bitcast=True))
            tl.store(min_p + slot, tl.load(given + 3 * prefill_rows).to(tl.float32, bitcast=True))
            low = tl.load(given + 4 * prefill_rows).to(tl.int64) & 0xFFFFFFFF
            high = tl.load(given + 5 * prefill_rows).to(tl.int64)
            tl.store(seed + slot, (high << 32) | low)
            asked = tl.load(given + 6 * prefill_rows)
            tl.store(features + slot, asked & IN_KERNEL_KEPT)
            tl.store(out_features + row, asked)


@triton.jit(
    do_not_specialize=[
        "words_stride",
        "table_stride",
        "token_ids",
        "decode_rows",
        "prefill_rows",
        "prefill_tokens",
        "dummy_slot",
    ]
)
def _unpack_tokens_kernel(
    words: tl.tensor,
    words_stride: tl.tensor,
    entry: tl.tensor,
    table: tl.tensor,
    table_stride: tl.tensor,
    token_ids: tl.tensor,
    row_slots: tl.tensor,
    row_kv_lengths: tl.tensor,
    starts: tl.tensor,
    out_tokens: tl.tensor,
    out_positions: tl.tensor,
    out_write: tl.tensor,
    decode_rows: tl.tensor,
    prefill_rows: tl.tensor,
    prefill_tokens: tl.tensor,
    dummy_slot: tl.tensor,
    block_size: tl.tensor,
    tile: tl.constexpr,
    halvings: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    step = words + tl.load(entry).to(tl.int64) * words_stride
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    exists = token < prefill_tokens
    inside = token < tl.load(starts + prefill_rows)
    # Binary search for the chunk that ends behind the token.
    low = tl.zeros_like(token)
    high = low + prefill_rows - 1
    for _ in tl.static_range(halvings):
        middle = (low + high) // 2
        behind = tl.load(starts + middle + 1) <= token
        low = tl.where(behind, tl.minimum(middle + 1, high), low)
        high = tl.where(behind, high, middle)
    row = decode_rows + low
    kv_length = tl.load(row_kv_lengths + row)
    position = (kv_length - tl.load(starts + low + 1) + token).to(tl.int64)
    position = tl.where(inside, position, 0)
    slot = tl.where(inside, tl.load(row_slots + row), dummy_slot)
    block = tl.load(table + slot * table_stride + position // block_size).to(tl.int64)
    given = tl.load(step + token_ids + token, mask=exists & inside, other=0)
    tl.store(out_tokens + decode_rows + token, given.to(tl.int64), mask=exists)
    tl.store(out_positions + decode_rows + token, position, mask=exists)
    write = block * block_size + position % block_size
    tl.store(out_write + decode_rows + token, write, mask=exists)
