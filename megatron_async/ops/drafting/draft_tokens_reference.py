"""`ops/drafting/draft_tokens.py` in plain torch: for the CPU, and what the kernels are tested
against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.sampling.slot_records import Header, RowFeature
from megatron_async.ops.step_tensors import StepTensors


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


@dataclass
class DraftTokens:
    """Buffers for the largest pass, or views of their beginnings for a smaller one.

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


def lay_out_entries_reference(of: DraftedStep, sampled: Tensor) -> DraftTokens:
    """`lay_out_entries` in plain torch."""
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


def lay_out_draft_reference(
    of: DraftedStep, entries: DraftTokens, tokens: Tensor, number: int
) -> DraftTokens:
    """`lay_out_draft` in plain torch."""
    step, size = of.step, of.block_size
    limits = of.records[:, Header.MAX_LENGTH].index_select(0, step.row_slots)
    position = (entries.lengths + number - 1).long()
    valid = (entries.drafts > 0) & (position < limits - 1)
    position = position.where(valid, 0)
    block = step.block_tables.gather(1, (position // size)[:, None])[:, 0].long()
    block = block.where(valid, of.dummy_block)
    return replace(
        entries,
        token_ids=tokens.clamp(min=0),
        positions=position,
        write_index=block * size + position % size,
        source=torch.arange(len(tokens), device=tokens.device),
        kv_lengths=(position + 1).int(),
        starts=entries.starts[:0],
        last=torch.arange(len(tokens), device=tokens.device),
    )
