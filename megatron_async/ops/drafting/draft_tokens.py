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

from dataclasses import replace

import torch
import triton
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options
from megatron_async.ops.drafting.draft_token_kernels import (
    chunk_tokens_kernel,
    draft_kernel,
    rows_kernel,
)
from megatron_async.ops.drafting.draft_tokens_reference import (
    DraftedStep,
    DraftTokens,
    lay_out_draft_reference,
    lay_out_entries_reference,
)
from megatron_async.ops.sampling.slot_records import RowFeature

TILE = 128


def lay_out_entries(of: DraftedStep, sampled: Tensor) -> DraftTokens:
    """The tokens of the entries' pass.

    Args:
        of: the step, after its `feed_back`.
        sampled: int64 `[sample rows]`, -1 where there is no token.
    """
    if not sampled.is_cuda:
        return lay_out_entries_reference(of, sampled)
    return lay_out_entries_kernels(of, sampled)


def lay_out_entries_kernels(of: DraftedStep, sampled: Tensor) -> DraftTokens:
    """`lay_out_entries` by two Triton kernels."""
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
        found.token_ids,
        found.positions,
        found.write_index,
        found.source,
        found.kv_lengths,
        found.starts,
        found.last,
        found.lengths,
        found.drafts,
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
            found.token_ids,
            found.positions,
            found.write_index,
            found.source,
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
    """The sources of the entries of a depth after the first: the previous depth's outputs at the
    token before. For a row's first token, the block of the position before keeps this output.

    Args:
        of: the step.
        entries: of `lay_out_entries`.

    Returns:
        int64 `[tokens]`, as `DraftTokens.source`; indices among the outputs of the entries' pass.
    """
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
    it is the index of the chunk's last token. For a dummy chunk it is meaningless, but valid.

    Args:
        of: the step.
        entries: of `lay_out_entries`.
    """
    decode = of.dims.decode_rows
    chunks = entries.last[decode:] - 1 + entries.drafts[decode:]
    return torch.cat((entries.last[:decode], chunks.clamp(min=0)))


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
    if not tokens.is_cuda:
        return lay_out_draft_reference(of, entries, tokens, number)
    return lay_out_draft_kernel(of, entries, tokens, number)


def lay_out_draft_kernel(
    of: DraftedStep, entries: DraftTokens, tokens: Tensor, number: int
) -> DraftTokens:
    """`lay_out_draft` by a Triton kernel."""
    step, rows = of.step, len(tokens)
    found = replace(
        entries,
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
        entries.lengths,
        entries.drafts,
        found.token_ids,
        found.positions,
        found.write_index,
        found.source,
        found.kv_lengths,
        found.last,
        rows,
        number,
        of.dummy_block,
        of.block_size,
        TILE,
        **launch_options(tokens),
    )
    return found
