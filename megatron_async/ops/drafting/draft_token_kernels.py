"""Kernels of `ops/drafting/draft_tokens.py`. The pointers that they write travel as `DraftTokens`;
counts and strides are arguments of their own: in a struct Triton would specialise a 1."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import wait_for_previous
from megatron_async.ops.sampling.slot_records import RECORD_WORDS, Header, RowFeature

WORDS = tl.constexpr(RECORD_WORDS)
MAX_LENGTH = tl.constexpr(int(Header.MAX_LENGTH))
PRODUCES = tl.constexpr(int(RowFeature.PRODUCES))
REPEATS = tl.constexpr(int(RowFeature.REPEATS))


class DraftTokens(NamedTuple):
    """The tokens of a pass, as its layers and the kernels here take them.

    Attributes:
        token_ids, positions, write_index: int64 `[tokens]`; tokens that make no entry have
            position 0 and a place in the dummy block.
        source: int64 `[tokens]`: index of each token's hidden state among those of the step; or, if
            negative, -1 - the block that keeps it.
        block_tables: int32 `[rows, blocks]`.
        kv_lengths: int32 `[rows]`: entries that the row's last token sees.
        starts: int32 `[chunks + 1]`: where the tokens of each chunk begin among the pass's, and the
            end of the last chunk's.
        last: int64 `[rows]`: index of the token from which a row's first draft is made.
        lengths: int32 `[rows]`: of the sequences after the step.
        drafts: int32 `[rows]`: 1 if the row has yielded a token, so that its drafts are valid;
            else 0.
    """

    token_ids: Tensor
    positions: Tensor
    write_index: Tensor
    source: Tensor
    block_tables: Tensor
    kv_lengths: Tensor
    starts: Tensor
    last: Tensor
    lengths: Tensor
    drafts: Tensor


@triton.jit(do_not_specialize=["table_stride", "decode_rows", "dummy_block", "block_size"])
def rows_kernel(
    sampled: tl.tensor,
    row_slots: tl.tensor,
    row_lengths: tl.tensor,
    features: tl.tensor,
    starts: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    records: tl.tensor,
    slot_lengths: tl.tensor,
    out: DraftTokens,
    decode_rows: tl.tensor,
    dummy_block: tl.tensor,
    block_size: tl.tensor,
    width: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One row: its fields of `DraftTokens`, and the entries of a decode row."""
    wait_for_previous(overlap)
    row = tl.program_id(0)
    slot = tl.load(row_slots + row)
    before, behind = tl.load(row_lengths + row), tl.load(slot_lengths + slot)
    limit = tl.load(records + slot * WORDS + MAX_LENGTH)
    tl.store(out.lengths + row, behind)
    table = tables + row.to(tl.int64) * table_stride
    if row < decode_rows:
        for query in tl.static_range(width):
            position = (before + query).to(tl.int64)
            is_entry = (position < behind) & (position < limit - 1)
            position = tl.where(is_entry, position, 0)
            block = tl.load(table + position // block_size).to(tl.int64)
            block = tl.where(is_entry, block, dummy_block)
            token = row * width + query
            tl.store(out.token_ids + token, tl.maximum(tl.load(sampled + token), 0))
            tl.store(out.positions + token, position)
            tl.store(out.write_index + token, block * block_size + position % block_size)
            tl.store(out.source + token, token.to(tl.int64))
        count = behind - before
        tl.store(out.last + row, (row * width + tl.maximum(count - 1, 0)).to(tl.int64))
        tl.store(out.drafts + row, (count > 0).to(tl.int32))
        tl.store(out.kv_lengths + row, tl.maximum(tl.minimum(behind, limit - 1), 1))
    else:
        chunk = row - decode_rows
        end = tl.load(starts + chunk + 1) + chunk + 1
        if chunk == 0:
            tl.store(out.starts, tl.load(starts))
        tl.store(out.starts + chunk + 1, end)
        tl.store(out.last + row, (end - 1).to(tl.int64))
        asked = tl.load(features + decode_rows * width + chunk)
        tl.store(out.drafts + row, ((asked & PRODUCES) != 0).to(tl.int32))
        tl.store(out.kv_lengths + row, before + 1)


# Where chunks begin among a step's rows varies, and with it what is aligned.
@triton.jit(
    do_not_specialize=[
        "table_stride",
        "decode_rows",
        "first",
        "chunks",
        "step_tokens",
        "tokens",
        "dummy_block",
        "block_size",
    ]
)
def chunk_tokens_kernel(
    sampled: tl.tensor,
    row_slots: tl.tensor,
    row_lengths: tl.tensor,
    features: tl.tensor,
    starts: tl.tensor,
    token_ids: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    records: tl.tensor,
    out: DraftTokens,
    decode_rows: tl.tensor,
    first: tl.tensor,
    chunks: tl.tensor,
    step_tokens: tl.tensor,
    tokens: tl.tensor,
    dummy_block: tl.tensor,
    block_size: tl.tensor,
    chunks_tile: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Entries of the chunks' tokens, and of the token after each chunk."""
    wait_for_previous(overlap)
    number = first + tl.program_id(0) * tile + tl.arange(0, tile)
    exists = number < tokens
    each = tl.arange(0, chunks_tile)
    ends = tl.load(starts + 1 + each, mask=each < chunks, other=2**30) + each + 1
    chunk = tl.sum((ends[None, :] <= number[:, None]).to(tl.int32), 1)
    inside = exists & (chunk < chunks)
    chunk = tl.minimum(chunk, chunks - 1)
    start = tl.load(starts + chunk)
    own = tl.load(starts + chunk + 1) - start
    place = number - start - chunk
    row = decode_rows + chunk
    position = tl.load(row_lengths + row) - own + place
    limit = tl.load(records + tl.load(row_slots + row) * WORDS + MAX_LENGTH)
    asked = tl.load(features + first + chunk)
    is_new = tl.where(place < own, (asked & REPEATS) == 0, (asked & PRODUCES) != 0)
    is_entry = inside & (position < limit - 1) & is_new
    given = tl.minimum(start + place, step_tokens - 1)
    token = tl.load(token_ids + given, inside & (place < own), other=0)
    drawn = tl.maximum(tl.load(sampled + first + chunk), 0)
    table = tables + row.to(tl.int64) * table_stride
    last = tl.maximum(position - 1, 0)
    # The place after a chunk that ends no prompt may have no block: nothing of it is kept.
    kept = tl.load(table + last // block_size, inside & (position > 0), other=0)
    kept = tl.where(inside & (position > 0), kept, dummy_block)
    before = tl.minimum(tl.maximum(start + place - 1, 0), step_tokens - 1)
    source = tl.where(place > 0, before, -1 - kept)
    position = tl.where(is_entry, position, 0)
    block = tl.load(table + position // block_size, is_entry, other=0)
    block = tl.where(is_entry, block, dummy_block).to(tl.int64)
    tl.store(out.token_ids + number, tl.where(place < own, token, drawn), exists)
    tl.store(out.positions + number, position.to(tl.int64), exists)
    tl.store(out.write_index + number, block * block_size + position % block_size, exists)
    tl.store(out.source + number, tl.where(inside, source, 0).to(tl.int64), exists)


@triton.jit(do_not_specialize=["table_stride", "rows", "number", "dummy_block", "block_size"])
def draft_kernel(
    tokens: tl.tensor,
    row_slots: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    records: tl.tensor,
    out: DraftTokens,
    rows: tl.tensor,
    number: tl.tensor,
    dummy_block: tl.tensor,
    block_size: tl.tensor,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Rows of the pass that makes one more draft."""
    wait_for_previous(overlap)
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    exists = row < rows
    limit = tl.load(records + tl.load(row_slots + row, exists, other=0) * WORDS + MAX_LENGTH)
    position = tl.load(out.lengths + row, exists, other=0) + number - 1
    fed = exists & (tl.load(out.drafts + row, exists, other=0) > 0) & (position < limit - 1)
    position = tl.where(fed, position, 0).to(tl.int64)
    block = tl.load(tables + row.to(tl.int64) * table_stride + position // block_size, fed, other=0)
    block = tl.where(fed, block, dummy_block).to(tl.int64)
    tl.store(out.token_ids + row, tl.maximum(tl.load(tokens + row, exists, other=0), 0), exists)
    tl.store(out.positions + row, position, exists)
    tl.store(out.write_index + row, block * block_size + position % block_size, exists)
    tl.store(out.source + row, row.to(tl.int64), exists)
    tl.store(out.kv_lengths + row, (position + 1).to(tl.int32), exists)
    tl.store(out.last + row, row.to(tl.int64), exists)
