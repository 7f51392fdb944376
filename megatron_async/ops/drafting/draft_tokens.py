"""The tokens that a draft model processes after a step, and the places of their keys and values.

The entry of a draft model (multi-token prediction) at position t of a sequence is made of the
model's hidden state at position t - 1 and of token t. So a block of entries depends only on tokens
in the block's hash. Position 0 has no entry. After a step, entries are made one position further
than the step's hidden states. In a decode row these are the entries of accepted tokens, up to the
token sampled last. In a chunk they are the entries of all its tokens and, if the chunk is its
prompt's last, of the first sampled token. (A chunk that repeats the last token of a shared block
makes the last of these alone.) A chunk's first entry needs the hidden state before the
chunk, which `PagedKVCache.block_hidden` keeps. The first draft is made from the output at a row's
last entry.

The second depth's entry at position t is made of the first depth's output at position t - 1 and of
token t, and so on. Its tokens are those of the first depth; its hidden states are the first depth's
outputs at the token before (`lay_out_behind`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.op import op, promising
from megatron_async.ops.sampling.slot_records import RECORD_WORDS, Header, RowFeature
from megatron_async.ops.step_tensors import StepTensors

TILE = 128
WORDS = tl.constexpr(RECORD_WORDS)
MAX_LENGTH = tl.constexpr(int(Header.MAX_LENGTH))
PRODUCES = tl.constexpr(int(RowFeature.PRODUCES))
REPEATS = tl.constexpr(int(RowFeature.REPEATS))


class DraftedStep(NamedTuple):
    """A step, after its samples are fed back, as drafting reads it.

    Attributes:
        step, dims: its tensors and its shape.
        records: int32 `[slots + 1, RECORD_WORDS]`.
        slot_lengths: int32 `[slots + 1]`: of the sequences after the step.
        dummy_block: to which tokens of no request are written.
        block_size: tokens of a block.
    """

    step: StepTensors
    dims: BatchDimensions
    records: Tensor
    slot_lengths: Tensor
    dummy_block: int
    block_size: int


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


@op
def lay_out_entries(of: DraftedStep, sampled: Tensor) -> DraftTokens:
    """The tokens of the entries' pass.

    Args:
        of: the step, after its `feed_back`.
        sampled: int64 `[sample rows]`, -1 where there is no token.
    """
    step, dims = of.step, of.dims
    rows, decode, width = dims.rows, dims.decode_rows, dims.width
    device, size = sampled.device, of.block_size
    tokens = dims.tokens + dims.prefill_rows
    limits = of.records[:, Header.MAX_LENGTH].index_select(0, step.row_slots)
    lengths = of.slot_lengths.index_select(0, step.row_slots)
    token_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    positions, source = torch.zeros_like(token_ids), torch.zeros_like(token_ids)
    is_entry = torch.zeros(tokens, dtype=torch.bool, device=device)
    owner = torch.zeros_like(token_ids)
    last, can = step.row_slots.new_zeros(rows), step.row_slots.new_zeros(rows, dtype=torch.int32)
    kv_lengths = torch.ones(rows, dtype=torch.int32, device=device)
    starts = step.prefill_starts
    if decode:
        part = slice(0, dims.decode_tokens)
        before, behind = step.lengths[:decode, None], lengths[:decode, None]
        query = torch.arange(width, device=device)
        position = before + query
        valid = (position < behind) & (position < limits[:decode, None] - 1)
        token_ids[part] = sampled[part].clamp(min=0)
        positions[part] = position.where(valid, 0).flatten()
        source[part] = torch.arange(dims.decode_tokens, device=device)
        is_entry[part] = valid.flatten()
        owner[part] = torch.arange(decode, device=device).repeat_interleave(width)
        count = (behind - before)[:, 0]
        last[:decode] = torch.arange(decode, device=device) * width + (count - 1).clamp(min=0)
        can[:decode] = (count > 0).int()
        kv_lengths[:decode] = torch.minimum(lengths[:decode], limits[:decode] - 1).clamp(min=1)
    if dims.prefill_rows:
        first = dims.decode_tokens
        starts = step.prefill_starts + torch.arange(dims.prefill_rows + 1, device=device).int()
        token = torch.arange(first, tokens, device=device)
        chunk = torch.searchsorted(starts[1:].contiguous(), token, right=True)
        inside = token < starts[-1]
        chunk = chunk.clamp(max=dims.prefill_rows - 1)
        place, count = token - starts[chunk], step.prefill_starts.diff()
        own, ends = count[chunk], step.lengths[decode:]
        is_final = (step.features[first:] & RowFeature.PRODUCES) != 0
        is_written = (step.features[first:] & RowFeature.REPEATS) == 0
        position = ends[chunk] - own + place
        is_new = torch.where(place < own, is_written[chunk], is_final[chunk])
        valid = inside & (position < limits[decode:][chunk] - 1) & is_new
        of_step = step.prefill_starts[chunk].long() + place
        given = step.token_ids[of_step.clamp(max=dims.tokens - 1)]
        token_ids[first:] = torch.where(place < own, given, sampled[first:][chunk].clamp(min=0))
        positions[first:] = position.where(valid, 0)
        tables = step.block_tables[decode:][chunk]
        block = tables.gather(1, ((position - 1).clamp(min=0) // size)[:, None].long())[:, 0]
        stored = torch.where(position > 0, block, of.dummy_block).long()
        before = (of_step - 1).clamp(0, dims.tokens - 1)
        source[first:] = torch.where(place > 0, before, -1 - stored).where(inside, 0)
        is_entry[first:] = valid
        owner[first:] = decode + chunk
        last[decode:] = starts[1:].long() - 1
        can[decode:] = is_final.int()
        kv_lengths[decode:] = ends + 1
    tables = step.block_tables.index_select(0, owner)
    block = tables.gather(1, (positions // size)[:, None])[:, 0].long()
    block = block.where(is_entry, of.dummy_block)
    return DraftTokens(
        token_ids,
        positions,
        block * size + positions % size,
        source,
        step.block_tables,
        kv_lengths,
        starts,
        last,
        lengths,
        can,
    )


@lay_out_entries.gpu
@promising("invariant")
def lay_out_entries_gpu(of: DraftedStep, sampled: Tensor) -> DraftTokens:
    step, dims = of.step, of.dims
    rows, chunks, tokens = dims.rows, dims.prefill_rows, dims.tokens + dims.prefill_rows

    def empty(count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(count, dtype=dtype, device=sampled.device)

    found = DraftTokens(
        token_ids=empty(tokens),
        positions=empty(tokens),
        write_index=empty(tokens),
        source=empty(tokens),
        block_tables=step.block_tables,
        kv_lengths=empty(rows, torch.int32),
        starts=empty(chunks + 1 if chunks else 0, torch.int32),
        last=empty(rows),
        lengths=empty(rows, torch.int32),
        drafts=empty(rows, torch.int32),
    )
    rows_of = (sampled, step.row_slots, step.lengths, step.features)
    tables = (step.block_tables, step.block_tables.stride(0), of.records)
    rows_kernel[(rows,)](
        *rows_of,
        step.prefill_starts if chunks else step.lengths,
        *tables,
        of.slot_lengths,
        found,
        dims.decode_rows,
        of.dummy_block,
        of.block_size,
        dims.width,
        **launch_options(sampled),
    )
    if chunks:
        first = dims.decode_tokens
        chunk_tokens_kernel[(triton.cdiv(tokens - first, TILE),)](
            *rows_of,
            step.prefill_starts,
            step.token_ids,
            *tables,
            found,
            dims.decode_rows,
            first,
            chunks,
            dims.tokens,
            tokens,
            of.dummy_block,
            of.block_size,
            max(triton.next_power_of_2(chunks), 16),
            TILE,
            **launch_options(sampled),
        )
    return found


def lay_out_behind(of: DraftedStep, entries: DraftTokens) -> Tensor:
    """The sources of the entries of a depth after the first, as `DraftTokens.source`, int64
    `[tokens]`: the previous depth's outputs at the token before. For a row's first token, the block
    of the position before keeps this output."""
    step, dims = of.step, of.dims
    source = torch.arange(-1, len(entries.source) - 1, device=entries.source.device)
    if dims.decode_rows:
        position = entries.positions[: dims.decode_tokens : dims.width]
        tables = step.block_tables[: dims.decode_rows]
        before = (position - 1).clamp(min=0) // of.block_size
        block = tables.gather(1, before[:, None])[:, 0].long()
        block = block.where(position > 0, of.dummy_block)
        source[: dims.decode_tokens : dims.width] = -1 - block
    if dims.prefill_rows:
        first = entries.starts[:-1].long()
        before = entries.source.index_select(0, first)
        # A chunk that repeats a block's last token has no output there: the block keeps it.
        repeats = (step.features[dims.decode_tokens :] & RowFeature.REPEATS) != 0
        behind = (first + 1).clamp(max=len(source) - 1)
        source[behind] = before.where(repeats, source.index_select(0, behind))
        source[first] = before
    return source


def ends_of_rows(of: DraftedStep, entries: DraftTokens) -> Tensor:
    """Index of the last entry of each row, int64 `[rows]`. In a chunk that is not its prompt's last
    it is the index of the chunk's last token. For a dummy chunk it is meaningless, but valid."""
    decode = of.dims.decode_rows
    chunks = entries.last[decode:] - 1 + entries.drafts[decode:]
    return torch.cat((entries.last[:decode], chunks.clamp(min=0)))


@op
def lay_out_draft(
    of: DraftedStep, entries: DraftTokens, tokens: Tensor, number: int
) -> DraftTokens:
    """The tokens of the pass that makes draft `number`, 1 or more, from the draft before it.

    Args:
        of: the step.
        entries: of `lay_out_entries`.
        tokens: int64 `[rows]`, drafted by the pass before.
        number: of the draft.
    """
    step, size = of.step, of.block_size
    limits = of.records[:, Header.MAX_LENGTH].index_select(0, step.row_slots)
    position = (entries.lengths + number - 1).long()
    valid = (entries.drafts > 0) & (position < limits - 1)
    position = position.where(valid, 0)
    block = step.block_tables.gather(1, (position // size)[:, None])[:, 0].long()
    block = block.where(valid, of.dummy_block)
    return entries._replace(
        token_ids=tokens.clamp(min=0),
        positions=position,
        write_index=block * size + position % size,
        source=torch.arange(len(tokens), device=tokens.device),
        kv_lengths=(position + 1).int(),
        starts=entries.starts[:0],
        last=torch.arange(len(tokens), device=tokens.device),
    )


@lay_out_draft.gpu
@promising("invariant")
def lay_out_draft_gpu(
    of: DraftedStep, entries: DraftTokens, tokens: Tensor, number: int
) -> DraftTokens:
    step, rows = of.step, len(tokens)
    found = entries._replace(
        token_ids=torch.empty_like(tokens),
        positions=torch.empty_like(tokens),
        write_index=torch.empty_like(tokens),
        source=torch.empty_like(tokens),
        kv_lengths=torch.empty_like(entries.kv_lengths),
        starts=entries.starts[:0],
        last=torch.empty_like(tokens),
    )
    draft_kernel[(triton.cdiv(rows, TILE),)](
        tokens,
        step.row_slots,
        step.block_tables,
        step.block_tables.stride(0),
        of.records,
        found,
        rows,
        number,
        of.dummy_block,
        of.block_size,
        TILE,
        **launch_options(tokens),
    )
    return found


# Pointers that the kernels write travel as `DraftTokens`; counts and strides are arguments of their
# own: in a struct Triton would specialise a 1.
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
