"""What a program of a decode attention kernel does: one part of a row's sequence, one KV head.

Device functions that `ops/decode_attention.py` and `ops/rope_decode_attention.py` share; the two
differ in where the queries come from.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_block(
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    block_size: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """The block numbers of a part's first tile: one where a tile lies in one block, else one for
    each token."""
    if block_size % tile == 0:
        block = tl.load(table + start // block_size, mask=start < end, other=0)
    else:
        position = start + tl.arange(0, tile)
        block = tl.load(table + position // block_size, mask=position < end, other=0)
    return block


@triton.jit
def attend_part(
    q: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    table: tl.tensor,
    block: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    block_size: tl.constexpr,
    kv_heads: tl.constexpr,
    head_tile: tl.constexpr,
    dim: tl.constexpr,
    dim_tile: tl.constexpr,
    tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attention of queries `[head_tile, dim_tile]` over tokens `start` to `end` of one KV head.

    Returns the weighted sum of values, the largest score and the sum of weights, float32; scores
    are in units of log 2.
    """
    offset = tl.arange(0, tile)
    column = tl.arange(0, dim_tile)
    maximum = tl.full((head_tile,), -float("inf"), tl.float32)
    total = tl.zeros((head_tile,), tl.float32)
    gathered = tl.zeros((head_tile, dim_tile), tl.float32)
    for first in range(start, end, tile):
        position = first + offset
        exists = position < end
        following = position + tile
        # A lookup of this tile's block would take a stage of the loop's pipeline: block numbers
        # are read one tile ahead.
        if block_size % tile == 0:
            token = block.to(tl.int64) * block_size + first % block_size + offset
            block = tl.load(table + (first + tile) // block_size, mask=first + tile < end, other=0)
        else:
            token = block.to(tl.int64) * block_size + position % block_size
            block = tl.load(table + following // block_size, mask=following < end, other=0)
        cell = (token * kv_heads + kv_head)[:, None] * dim + column[None, :]
        loaded = exists[:, None]
        if dim != dim_tile:
            loaded &= (column < dim)[None, :]
        k = tl.load(key_cache + cell, mask=loaded, other=0.0)
        v = tl.load(value_cache + cell, mask=loaded, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(exists[None, :], score, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        weight = tl.exp2(score - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        gathered = gathered * shrink[:, None]
        gathered = tl.dot(weight.to(v.dtype), v, gathered, input_precision="ieee")
        total = total * shrink + tl.sum(weight, 1)
        maximum = new_maximum
    return gathered, maximum, total


@triton.jit
def store_part(
    gathered: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    row: tl.tensor,
    slot: tl.tensor,
    kv_head: tl.tensor,
    out: tl.tensor,
    part_output: tl.tensor,
    part_maximum: tl.tensor,
    part_total: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_tile: tl.constexpr,
    dim: tl.constexpr,
    dim_tile: tl.constexpr,
) -> None:
    """Put what `attend_part` returned where it belongs: the row's output if it has one part, else
    the part's slot."""
    member = tl.arange(0, head_tile)
    column = tl.arange(0, dim_tile)
    inside = (member < group)[:, None] & (column < dim)[None, :]
    heads: tl.constexpr = kv_heads * group
    head = kv_head * group + member
    place = head[:, None] * dim + column[None, :]
    if slot < 0:
        result = gathered / tl.maximum(total, 1e-30)[:, None]
        tl.store(out + row * heads * dim + place, result.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(part_maximum + slot * heads + head, maximum, mask=member < group)
        tl.store(part_total + slot * heads + head, total, mask=member < group)
        tl.store(part_output + slot * heads * dim + place, gathered, mask=inside)
