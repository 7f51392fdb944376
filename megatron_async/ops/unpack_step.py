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
from megatron_async.contexts.bookkeeping_layout import UPDATE_FIELDS, BookkeepingLayout
from megatron_async.contexts.device_slots import DeviceSlots
from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.slot_records import (
    EDIT_WORDS,
    HEADER,
    RECORD_WORDS,
    WINDOW,
    Header,
    RowFeature,
)
from megatron_async.ops.step_tensors import StepTensors

TILE = 128
PRODUCES = tl.constexpr(int(RowFeature.PRODUCES))
WORDS = tl.constexpr(RECORD_WORDS)
FEATURES = tl.constexpr(int(Header.FEATURES))
NUM_EDITS = tl.constexpr(int(Header.NUM_EDITS))
NUM_BAD_WORDS = tl.constexpr(int(Header.NUM_BAD_WORDS))
HEAD = tl.constexpr(HEADER)
EDIT = tl.constexpr(EDIT_WORDS)
LONGEST = tl.constexpr(WINDOW)
SLOT_COLUMN = tl.constexpr(UPDATE_FIELDS.index("block_update_slots"))
INDEX_COLUMN = tl.constexpr(UPDATE_FIELDS.index("block_update_indices"))
BLOCK_COLUMN = tl.constexpr(UPDATE_FIELDS.index("block_update_blocks"))


def unpack_step(
    words: Tensor,
    next_entry: Tensor,
    dims: BatchDimensions,
    slots: DeviceSlots,
    block_size: int,
    out: StepTensors,
) -> None:
    """Apply block-table updates and records of requests that start to `slots`, and fill `out`.

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
        layout.start("num_block_updates"),
        layout.start(UPDATE_FIELDS[0]),
        layout.start("row_slots"),
        layout.start("row_kv_lengths"),
        layout.start("prefill_starts"),
        layout.start("prefill_features"),
        layout.start("prefill_record"),
        slots.last_token,
        slots.records,
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
    head = BookkeepingLayout.for_batch(dims, 0)
    updates = int(words[entry, head.start("num_block_updates")])
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
    for chunk, start in enumerate(fields["prefill_record"].tolist()):  # sync-ok: CPU
        if start >= 0:
            given = words[entry, start:]
            length = _record_words(given)
            slots.records[out.slots[decode + chunk], :length] = given[:length]
    out.features.copy_(slots.records[:, Header.FEATURES].index_select(0, out.slots))
    out.features[:decode] |= int(RowFeature.PRODUCES)
    out.last_token[:decode] = torch.arange(decode, device=words.device)
    out.token_ids[:decode] = slots.last_token.index_select(0, out.slots[:decode])
    out.positions[:decode] = out.kv_lengths[:decode] - 1
    _write_index(out.block_tables[:decode], out.positions[:decode], block_size, out.write_index)
    if not dims.prefill_rows:
        return
    out.features[decode:] |= fields["prefill_features"]
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


def _record_words(record: Tensor) -> int:
    edits, bad_words = int(record[Header.NUM_EDITS]), int(record[Header.NUM_BAD_WORDS])
    return HEADER + edits * EDIT_WORDS + bad_words * WINDOW


def _write_index(tables: Tensor, positions: Tensor, block_size: int, out: Tensor) -> None:
    block = tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
    out[: len(positions)] = block * block_size + positions % block_size


# Offsets and counts are not to be specialized on: every shape would compile its own kernels.


@triton.jit(
    do_not_specialize=[
        "words_stride",
        "table_stride",
        "num_updates",
        "updates",
        "row_slots",
        "row_kv_lengths",
        "starts",
        "step_features",
        "chunk_records",
        "decode_rows",
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
    num_updates: tl.tensor,
    updates: tl.tensor,
    row_slots: tl.tensor,
    row_kv_lengths: tl.tensor,
    starts: tl.tensor,
    step_features: tl.tensor,
    chunk_records: tl.tensor,
    last_token: tl.tensor,
    records: tl.tensor,
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
    count = tl.load(step + num_updates)
    first = 0
    while first < count:
        offset = first + tl.arange(0, tile)
        update = step + updates + offset
        exists = offset < count
        index = tl.load(update + INDEX_COLUMN * count, exists, other=-1)
        own = exists & (tl.load(update + SLOT_COLUMN * count, exists, other=-1) == slot)
        own = own & ((part == 0) | (index // tile == part))
        block = tl.load(update + BLOCK_COLUMN * count, own, other=0)
        tl.store(table + slot * table_stride + index, block, own)
        first += tile
    tl.debug_barrier()
    column = part * tile + tl.arange(0, tile)
    inside = column < num_blocks
    blocks = tl.load(table + slot * table_stride + column, inside, other=0)
    tl.store(out_tables + row.to(tl.int64) * num_blocks + column, blocks, inside)
    if part == 0:
        kv_length = tl.load(step + row_kv_lengths + row)
        record = records + slot * WORDS
        tl.store(out_slots + row, slot)
        tl.store(out_kv_lengths + row, kv_length)
        if row < decode_rows:
            position = kv_length.to(tl.int64) - 1
            block = tl.load(table + slot * table_stride + position // block_size).to(tl.int64)
            tl.store(out_features + row, tl.load(record + FEATURES) | PRODUCES)
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
            asked = tl.load(record + FEATURES)
            start = tl.load(step + chunk_records + chunk)
            if start >= 0:
                given = step + start
                edits, bad_words = tl.load(given + NUM_EDITS), tl.load(given + NUM_BAD_WORDS)
                length = HEAD + edits * EDIT + bad_words * LONGEST
                done = 0
                while done < length:
                    word = done + tl.arange(0, tile)
                    value = tl.load(given + word, word < length, other=0)
                    tl.store(record + word, value, word < length)
                    done += tile
                asked = tl.load(given + FEATURES)
            tl.store(out_features + row, asked | tl.load(step + step_features + chunk))


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
