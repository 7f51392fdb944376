"""Paged attention of prefill chunks: many query tokens a row, causal, over the paged cache.

Flash attention (Dao et al. 2022) with a block-table lookup: one program takes a tile of a chunk's
query tokens and one query head, and walks its keys and values once. Lengths and places stay on the
device; only the longest chunk's bound is the host's choice, so that a captured step serves any
chunks that fit its shape. A program without tokens ends at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous

QUERY_TILE = 128
"""Query tokens of a program (16-bit dtypes)."""
KEY_TILE = 64
"""Keys that a program takes together."""
LOG2_E = 1.4426950408889634


def paged_prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    starts: Tensor,
    max_query_length: int,
    scale: float,
    out: Tensor,
) -> None:
    """Attention of prefill rows over the paged cache, this step's keys and values already in place.

    Args:
        query: `[tokens, heads, dim]`, contiguous: the chunks' tokens end to end.
        key_cache, value_cache: `[blocks, block size, kv heads, dim]`, contiguous.
        block_tables: int32 `[rows, blocks]`.
        kv_lengths: int32 `[rows]`: a chunk's last token is at position KV length - 1.
        starts: int32 `[rows + 1]`: tokens of row i are starts[i] .. starts[i + 1] - 1.
        max_query_length: no chunk has more tokens.
        scale: softmax scale.
        out: `[tokens, heads, dim]`, contiguous; written for the rows' tokens, left alone for
            padding.

    Raises:
        ValueError: shapes do not match.
    """
    _tokens, heads, dim = query.shape
    _blocks, block_size, kv_heads, cache_dim = key_cache.shape
    rows = kv_lengths.numel()
    if cache_dim != dim or heads % kv_heads or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"paged_prefill_attention: query {tuple(query.shape)} does not fit caches "
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}."
        )
    if starts.numel() != rows + 1 or block_tables.size(0) != rows or out.shape != query.shape:
        raise ValueError(
            f"paged_prefill_attention: {rows} rows want {rows + 1} starts and {rows} block tables, "
            f"found {starts.numel()} and {block_tables.size(0)}; out must be like query."
        )
    if not rows or not max_query_length:
        return
    wide = query.dtype == torch.float32 or dim > 128
    query_tile = 32 if wide else min(QUERY_TILE, max(triton.next_power_of_2(max_query_length), 16))
    key_tile = 32 if wide else KEY_TILE
    grid = (triton.cdiv(max_query_length, query_tile), heads, rows)
    _prefill_kernel[grid](
        query,
        key_cache,
        value_cache,
        block_tables,
        block_tables.stride(0),
        kv_lengths,
        starts,
        scale * LOG2_E,
        out,
        block_size=block_size,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dim_tile=triton.next_power_of_2(dim),
        query_tile=query_tile,
        key_tile=key_tile,
        num_warps=8 if query_tile == 128 and dim > 64 else 4,
        num_stages=3 if not wide else 2,
        **launch_options(query),
    )


@triton.jit
def _attend_tiles(
    q: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    table: tl.tensor,
    position: tl.tensor,
    gathered: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    length: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    masked: tl.constexpr,
    block_size: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    dim_tile: tl.constexpr,
    key_tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    column = tl.arange(0, dim_tile)
    inside = column < dim
    for first in tl.range(begin, end, key_tile):
        if block_size % key_tile == 0:
            # The tile lies in one block.
            block = tl.load(table + first // block_size).to(tl.int64)
            cell = block * block_size + first % block_size + tl.arange(0, key_tile)
            key_position = first + tl.arange(0, key_tile)
        else:
            key_position = first + tl.arange(0, key_tile)
            exists = key_position < length
            block = tl.load(table + key_position // block_size, mask=exists, other=0).to(tl.int64)
            cell = block * block_size + key_position % block_size
        place = (cell * kv_heads + kv_head) * dim
        if masked or dim != dim_tile:
            loaded = (key_position < length)[:, None] & inside[None, :]
            k = tl.load(key_cache + place[:, None] + column[None, :], mask=loaded, other=0.0)
            v = tl.load(value_cache + place[:, None] + column[None, :], mask=loaded, other=0.0)
        else:
            k = tl.load(key_cache + place[:, None] + column[None, :])
            v = tl.load(value_cache + place[:, None] + column[None, :])
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if masked:
            score = tl.where(position[:, None] >= key_position[None, :], score, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        weight = tl.exp2(score - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weight, 1)
        gathered = gathered * shrink[:, None]
        gathered = tl.dot(weight.to(v.dtype), v, gathered, input_precision="ieee")
        maximum = new_maximum
    return gathered, maximum, total


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    kv_lengths: tl.tensor,
    starts: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    block_size: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    dim_tile: tl.constexpr,
    query_tile: tl.constexpr,
    key_tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    # The last tiles of a chunk have the most keys: they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, row = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + row)
    tokens = tl.load(starts + row + 1) - start
    if tile * query_tile < tokens:
        length = tl.load(kv_lengths + row)
        before = length - tokens
        kv_head = head // (heads // kv_heads)
        local = tile * query_tile + tl.arange(0, query_tile)
        column = tl.arange(0, dim_tile)
        inside = (local < tokens)[:, None] & (column < dim)[None, :]
        place = ((start + local).to(tl.int64)[:, None] * heads + head) * dim + column[None, :]
        q = tl.load(query + place, mask=inside, other=0.0)
        # Tokens behind the chunk's end attend like its last one, and are not stored.
        position = before + tl.minimum(local, tokens - 1)
        gathered = tl.zeros((query_tile, dim_tile), tl.float32)
        maximum = tl.full((query_tile,), -float("inf"), tl.float32)
        total = tl.zeros((query_tile,), tl.float32)
        table = tables + row.to(tl.int64) * table_stride
        # Keys that every query of the tile sees need no mask.
        seen = (before + tile * query_tile + 1) // key_tile * key_tile
        end = tl.minimum(before + (tile + 1) * query_tile, length)
        gathered, maximum, total = _attend_tiles(
            q, key_cache, value_cache, table, position, gathered, maximum, total,
            0, seen, length, kv_head, scale, False,
            block_size, kv_heads, dim, dim_tile, key_tile,
        )  # fmt: skip
        gathered, maximum, total = _attend_tiles(
            q, key_cache, value_cache, table, position, gathered, maximum, total,
            seen, end, length, kv_head, scale, True,
            block_size, kv_heads, dim, dim_tile, key_tile,
        )  # fmt: skip
        result = gathered / total[:, None]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
