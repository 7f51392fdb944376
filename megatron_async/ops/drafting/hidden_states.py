"""Hidden states of single tokens: keep some by KV block, and gather a draft model's input from the
step's hidden states and from kept ones."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.op import op, promising

BLOCK = 2048
"""Elements that a program copies."""


@op
def keep_hidden(
    hidden: Tensor, write_index: Tensor, ends: Tensor, block_size: int, kept: Tensor
) -> None:
    """Keep the states of tokens that are the last of a block, and of those that end a chunk.

    Args:
        hidden: `[tokens, hidden]`, contiguous.
        write_index: int64 `[tokens]`: place of each token's keys in the flat KV cache.
        ends: int64 `[chunks]`: last tokens of chunks; the same token may occur twice.
        block_size: places of a block.
        kept: `[blocks + 1, hidden]`, contiguous, changed at the blocks of these tokens; the last
            block's row, for tokens without a request, stays.
    """
    chosen = write_index % block_size == block_size - 1
    if (ends < 0).any():  # which torch takes for the last ones, and the kernel for any memory
        raise IndexError(f"keep_hidden: ends of chunks are {ends.tolist()}.")
    chosen[ends] = True
    chosen &= write_index // block_size < len(kept) - 1
    token = chosen.nonzero()[:, 0]
    kept[write_index[token] // block_size] = hidden[token]


@keep_hidden.gpu
@promising("invariant")
def keep_hidden_gpu(
    hidden: Tensor, write_index: Tensor, ends: Tensor, block_size: int, kept: Tensor
) -> None:
    tokens, size = hidden.shape
    _keep_hidden_kernel[(tokens + len(ends), triton.cdiv(size, BLOCK))](
        hidden, write_index, ends, kept, tokens, len(kept) - 1, block_size, size, BLOCK,
        **launch_options(hidden),
    )  # fmt: skip


@op
def gather_hidden(hidden: Tensor, kept: Tensor, source: Tensor) -> Tensor:
    """States of a draft model's tokens.

    Args:
        hidden: `[tokens of the step, hidden]`, contiguous.
        kept: `[blocks + 1, hidden]`, contiguous.
        source: int64 `[tokens]`: index in `hidden`, or -1 - an index in `kept`.

    Returns:
        `[tokens, hidden]`.
    """
    found = hidden.index_select(0, source.clamp(min=0))
    return found.where(source[:, None] >= 0, kept.index_select(0, (-1 - source).clamp(min=0)))


@gather_hidden.gpu
@promising("invariant")
def gather_hidden_gpu(hidden: Tensor, kept: Tensor, source: Tensor) -> Tensor:
    size = hidden.size(1)
    out = hidden.new_empty(len(source), size)
    _gather_hidden_kernel[(len(source), triton.cdiv(size, BLOCK))](
        hidden, kept, source, out, size, BLOCK, **launch_options(hidden)
    )
    return out


@triton.jit(do_not_specialize=["tokens", "dummy_block"])
def _keep_hidden_kernel(
    hidden: tl.tensor,
    write_index: tl.tensor,
    ends: tl.tensor,
    kept: tl.tensor,
    tokens: tl.tensor,
    dummy_block: tl.tensor,
    block_size: tl.constexpr,
    size: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    number = tl.program_id(0).to(tl.int64)
    is_end = number >= tokens
    token = tl.load(ends + number - tokens, is_end, other=number)
    place = tl.load(write_index + token)
    block = place // block_size
    if (is_end | (place % block_size == block_size - 1)) & (block < dummy_block):
        column = tl.program_id(1) * tile + tl.arange(0, tile)
        inside = column < size
        value = tl.load(hidden + token * size + column, inside, other=0.0)
        tl.store(kept + block * size + column, value, inside)


@triton.jit
def _gather_hidden_kernel(
    hidden: tl.tensor,
    kept: tl.tensor,
    source: tl.tensor,
    out: tl.tensor,
    size: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    token = tl.program_id(0).to(tl.int64)
    index = tl.load(source + token)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = column < size
    of_step = tl.load(hidden + index * size + column, inside & (index >= 0), other=0.0)
    of_block = tl.load(kept + (-1 - index) * size + column, inside & (index < 0), other=0.0)
    tl.store(out + token * size + column, tl.where(index >= 0, of_step, of_block), inside)
