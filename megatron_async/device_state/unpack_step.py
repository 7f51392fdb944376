"""First work of a step: unpack the bookkeeping into the tensors that the layers read.

One kernel, and a second one for prefill tokens, do the work of thirty kernels of plain torch. A
program of the first kernel processes a row: its block-table updates, then the data of its slot,
where earlier steps have stored a decode row's length. A program of the second processes tokens of
the prefill chunks, from the data of their rows. Both find the step's bookkeeping in a ring by a
number on the device, because a captured step's addresses are fixed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.device_state.bookkeeping_layout import UPDATE_FIELDS, BookkeepingLayout
from megatron_async.device_state.device_slots import DeviceSlots
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.sampling.slot_records import (
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
REPEATS = tl.constexpr(int(RowFeature.REPEATS))
WORDS = tl.constexpr(RECORD_WORDS)
FEATURES = tl.constexpr(int(Header.FEATURES))
MAX_LENGTH = tl.constexpr(int(Header.MAX_LENGTH))
DRAFTS = tl.constexpr(int(Header.DRAFTS))
NUM_EDITS = tl.constexpr(int(Header.NUM_EDITS))
NUM_BAD_WORDS = tl.constexpr(int(Header.NUM_BAD_WORDS))
HEAD = tl.constexpr(HEADER)
EDIT = tl.constexpr(EDIT_WORDS)
LONGEST = tl.constexpr(WINDOW)
SLOT_COLUMN = tl.constexpr(UPDATE_FIELDS.index("block_update_slots"))
INDEX_COLUMN = tl.constexpr(UPDATE_FIELDS.index("block_update_indices"))
BLOCK_COLUMN = tl.constexpr(UPDATE_FIELDS.index("block_update_blocks"))


def unpack_step_kernels(
    words: Tensor,
    next_entry: Tensor,
    dims: BatchDimensions,
    slots: DeviceSlots,
    block_size: int,
    out: StepTensors,
    lengths: Tensor | None = None,
    block_tokens: Tensor | None = None,
) -> None:
    """Apply block-table updates and records of requests that start to `slots`, and fill `out`: by
    Triton kernels.

    Args:
        words: int32 `[ring, words]`: packed bookkeeping of the steps in flight.
        next_entry: int32 `[1]`: entry of this step.
        dims: shape of the step.
        slots: per-slot state, changed in place. Block-table updates are for rows of this step only.
        block_size: tokens a block.
        out: tensors of the step's size, written, with a place in the cache for each of its tables.
            Some tokens get position 0 and a place in the last slot's first block: padding tokens
            (with id 0), query tokens beyond their request's limit, and those for which the plan
            reserved no blocks (beyond the row's own width, or the drafts that its request allows).
            A token of a chunk that repeats has its own position, and a place in that block which no
            other token has.
        lengths: int32 `[decode rows]` of the sequences, if another rank has them; None: those of
            `slots`.
        block_tokens: int32 `[blocks, block size]`, changed: each token's id is written at the place
            of its keys; None if tokens are not kept.
    """
    layout = BookkeepingLayout.for_batch(dims, 0)
    ring = (words, words.stride(0))
    table = (slots.block_table, slots.block_table.stride(0))
    options = launch_options(words)
    blocks, tables = out.block_tables.size(1), len(out.write_indices)
    kept = out.token_ids if block_tokens is None else block_tokens  # any tensor, where none is kept
    _unpack_kernel[(dims.rows, triton.cdiv(blocks, TILE))](
        *ring,
        next_entry,
        out.entry,
        *table,
        layout.start("num_block_updates"),
        layout.start("decode_width"),
        layout.start(UPDATE_FIELDS[0]),
        layout.start("row_slots"),
        layout.start("prefill_kv_lengths"),
        layout.start("prefill_starts"),
        layout.start("prefill_features"),
        layout.start("prefill_record"),
        slots.last_token,
        slots.length if lengths is None else lengths,
        slots.drafts,
        slots.drafts.stride(0),
        slots.records,
        out.row_slots,
        out.lengths,
        out.kv_lengths,
        out.slots,
        out.sample_positions,
        out.features,
        out.last_token,
        out.block_tables,
        out.prefill_starts,
        out.token_ids,
        out.positions,
        out.write_indices,
        out.write_indices.stride(0),
        kept,
        dims.decode_rows,
        blocks,
        blocks // tables,
        len(slots.last_token) - 1,
        block_size,
        tables,
        dims.width,
        lengths is not None,
        dims.prefill_rows > 0,
        dims.is_packed,
        block_tokens is not None,
        TILE,
        **options,
    )
    if dims.prefill_rows:
        # In a packed shape the first prefill token may be any.
        first = 0 if dims.is_packed else dims.decode_tokens
        _unpack_tokens_kernel[(triton.cdiv(dims.tokens - first, TILE),)](
            *ring,
            out.entry,
            *table,
            layout.start("prefill_token_ids"),
            layout.start("prefill_features"),
            out.row_slots,
            out.kv_lengths,
            out.prefill_starts,
            out.token_ids,
            out.positions,
            out.write_indices,
            out.write_indices.stride(0),
            kept,
            dims.decode_rows,
            first,
            dims.prefill_rows,
            dims.tokens,
            blocks // tables,
            len(slots.last_token) - 1,
            block_size,
            tables,
            block_tokens is not None,
            TILE,
            dims.prefill_rows.bit_length(),
            **options,
        )


# Offsets and counts are not to be specialized on: every shape would compile its own kernels.


@triton.jit(
    do_not_specialize=[
        "words_stride",
        "table_stride",
        "num_updates",
        "width_field",
        "updates",
        "row_slots",
        "chunk_kv_lengths",
        "starts",
        "step_features",
        "chunk_records",
        "drafts_stride",
        "write_stride",
        "decode_rows",
        "num_blocks",
        "columns",
        "dummy_slot",
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
    width_field: tl.tensor,
    updates: tl.tensor,
    row_slots: tl.tensor,
    chunk_kv_lengths: tl.tensor,
    starts: tl.tensor,
    step_features: tl.tensor,
    chunk_records: tl.tensor,
    last_token: tl.tensor,
    lengths: tl.tensor,
    drafts: tl.tensor,
    drafts_stride: tl.tensor,
    records: tl.tensor,
    out_row_slots: tl.tensor,
    out_lengths: tl.tensor,
    out_kv_lengths: tl.tensor,
    out_slots: tl.tensor,
    out_sample_positions: tl.tensor,
    out_features: tl.tensor,
    out_last_token: tl.tensor,
    out_tables: tl.tensor,
    out_starts: tl.tensor,
    out_tokens: tl.tensor,
    out_positions: tl.tensor,
    out_write: tl.tensor,
    write_stride: tl.tensor,
    kept: tl.tensor,
    decode_rows: tl.tensor,
    num_blocks: tl.tensor,
    columns: tl.tensor,
    dummy_slot: tl.tensor,
    block_size: tl.tensor,
    tables: tl.constexpr,
    width: tl.constexpr,
    by_row: tl.constexpr,
    has_prefill: tl.constexpr,
    is_packed: tl.constexpr,
    keeps: tl.constexpr,
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
        record = records + slot * WORDS
        tl.store(out_row_slots + row, slot)
        if row < decode_rows:
            length = tl.load(lengths + (row if by_row else slot))
            limit = tl.load(record + MAX_LENGTH)
            tl.store(out_lengths + row, length)
            asked = tl.load(record + FEATURES) | PRODUCES
            brought = tl.full((), 1, tl.int32)
            if width > 1:
                brought = tl.load(step + width_field)
                brought = tl.minimum(brought, 1 + tl.load(record + DRAFTS))
            kv_length = tl.maximum(tl.minimum(length - 1 + brought, limit - 1), 1)
            tl.store(out_kv_lengths + row, kv_length)
            token = tl.load(last_token + slot)
            # Dummy rows of a packed shape have no tokens.
            tokens = tl.load(step + starts) if is_packed else (row + 1) * width
            for query in tl.static_range(width):
                position = (length - 1 + query).to(tl.int64)
                fed = (position >= 0) & (position < limit - 1) & (query < brought)
                position = tl.where(fed, position, 0)
                owner = tl.where(fed, slot, dummy_slot)
                place = table + owner * table_stride + position // block_size
                write = tl.load(place).to(tl.int64) * block_size + position % block_size
                sample = row * width + query
                if query > 0:
                    token = tl.maximum(tl.load(drafts + slot * drafts_stride + query - 1), 0)
                if width > 1:
                    tl.store(out_slots + sample, slot)
                    tl.store(out_sample_positions + sample, length + query)
                tl.store(out_features + sample, asked)
                tl.store(out_last_token + sample, sample)
                tl.store(out_tokens + sample, token, sample < tokens)
                tl.store(out_positions + sample, position, sample < tokens)
                tl.store(out_write + sample, write, sample < tokens)
                for number in tl.static_range(1, tables):
                    further = tl.load(place + number * columns).to(tl.int64)
                    further = further * block_size + position % block_size
                    tl.store(out_write + number * write_stride + sample, further, sample < tokens)
                if keeps:
                    tl.store(kept + write, token.to(tl.int32), sample < tokens)
        elif has_prefill:
            chunk = row - decode_rows
            sample = decode_rows * width + chunk
            kv_length = tl.load(step + chunk_kv_lengths + chunk)
            tl.store(out_lengths + row, kv_length)
            tl.store(out_kv_lengths + row, kv_length)
            if width > 1:
                tl.store(out_slots + sample, slot)
                tl.store(out_sample_positions + sample, kv_length)
            end = tl.load(step + starts + chunk + 1)
            tl.store(out_starts + chunk + 1, end)
            if chunk == 0:
                tl.store(out_starts, tl.load(step + starts))
            tl.store(out_last_token + sample, tl.maximum(end - 1, 0))
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
            tl.store(out_features + sample, asked | tl.load(step + step_features + chunk))


@triton.jit(
    do_not_specialize=[
        "words_stride",
        "table_stride",
        "token_ids",
        "step_features",
        "write_stride",
        "decode_rows",
        "first",
        "prefill_rows",
        "tokens",
        "columns",
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
    step_features: tl.tensor,
    row_slots: tl.tensor,
    row_kv_lengths: tl.tensor,
    starts: tl.tensor,
    out_tokens: tl.tensor,
    out_positions: tl.tensor,
    out_write: tl.tensor,
    write_stride: tl.tensor,
    kept: tl.tensor,
    decode_rows: tl.tensor,
    first: tl.tensor,
    prefill_rows: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    dummy_slot: tl.tensor,
    block_size: tl.tensor,
    tables: tl.constexpr,
    keeps: tl.constexpr,
    tile: tl.constexpr,
    halvings: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    step = words + tl.load(entry).to(tl.int64) * words_stride
    token = first + tl.program_id(0) * tile + tl.arange(0, tile)
    begin = tl.load(starts)
    exists = (token >= begin) & (token < tokens)
    inside = exists & (token < tl.load(starts + prefill_rows))
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
    writes = inside & ((tl.load(step + step_features + low) & REPEATS) == 0)
    slot = tl.where(writes, tl.load(row_slots + row), dummy_slot)
    place = table + slot * table_stride + position // block_size
    block = tl.load(place).to(tl.int64)
    given = tl.load(step + token_ids + token - begin, mask=inside, other=0)
    tl.store(out_tokens + token, given.to(tl.int64), mask=exists)
    tl.store(out_positions + token, position, mask=exists)
    write = block * block_size + position % block_size
    tl.store(out_write + token, write, mask=exists)
    for number in tl.static_range(1, tables):
        further = tl.load(place + number * columns).to(tl.int64)
        further = further * block_size + position % block_size
        tl.store(out_write + number * write_stride + token, further, mask=exists)
    if keeps:
        tl.store(kept + write, given.to(tl.int32), mask=exists)
