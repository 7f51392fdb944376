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
from torch import Tensor

from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.dependent_launch import launch_options
from megatron_async.ops.drafting.draft_token_kernels import (
    DraftTokens,
    chunk_tokens_kernel,
    draft_kernel,
    rows_kernel,
)
from megatron_async.ops.op import op
from megatron_async.ops.sampling.slot_records import Header, RowFeature
from megatron_async.ops.step_tensors import StepTensors

TILE = 128


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
    rows_kernel[(rows,)](
        sampled,
        step.row_slots,
        step.lengths,
        step.features,
        step.prefill_starts if chunks else step.lengths,
        step.block_tables,
        step.block_tables.stride(0),
        of.records,
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
            sampled,
            step.row_slots,
            step.lengths,
            step.features,
            step.prefill_starts,
            step.token_ids,
            step.block_tables,
            step.block_tables.stride(0),
            of.records,
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
