"""Kernels of the experts' grouped products; `ops/experts/expert_mlp.py` launches them.

A pair is a token and one of its experts: pair p is token p // topk's expert number p % topk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.dependent_launch import wait_for_previous


@triton.jit(do_not_specialize=["pairs", "first_expert"])
def sort_kernel(
    experts: tl.tensor,
    experts_stride: tl.tensor,
    num_tiles: tl.tensor,
    tile_experts: tl.tensor,
    sorted_pairs: tl.tensor,
    pairs: tl.tensor,
    first_expert: tl.tensor,
    local: tl.constexpr,
    bins: tl.constexpr,
    topk: tl.constexpr,
    block_m: tl.constexpr,
    chunk: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One expert: its pairs, in order, into its tiles of `block_m`; places left over in the last
    tile get the number `pairs`.

    Every program counts all experts' pairs, which tells where its own tiles begin: cheaper than a
    kernel more and without atomics, so the order is always the same.
    """
    wait_for_previous(overlap)
    own = tl.program_id(0)
    each = tl.arange(0, chunk)
    bin_ = tl.arange(0, bins)
    counts = tl.zeros((bins,), tl.int32)
    for at in range(0, pairs, chunk):
        pair = at + each
        place = experts + (pair // topk) * experts_stride + pair % topk
        expert = tl.load(place, mask=pair < pairs, other=-1) - first_expert
        expert = tl.where((pair < pairs) & (expert >= 0) & (expert < local), expert, local)
        counts += tl.histogram(expert, bins)
    tiles = tl.where(bin_ < local, (counts + block_m - 1) // block_m, 0)
    first_tile = tl.sum(tl.where(bin_ < own, tiles, 0), 0)
    own_tiles = tl.sum(tl.where(bin_ == own, tiles, 0), 0)
    own_count = tl.sum(tl.where(bin_ == own, counts, 0), 0)
    if own == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))
    target = sorted_pairs + first_tile * block_m
    done = tl.zeros((), tl.int32)
    for at in range(0, pairs, chunk):
        pair = at + each
        place = experts + (pair // topk) * experts_stride + pair % topk
        expert = tl.load(place, mask=pair < pairs, other=-1) - first_expert
        mine = (pair < pairs) & (expert == own)
        rank = done + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(target + rank, pair, mask=mine)
        done += tl.sum(mine.to(tl.int32), 0)
    rest = own_count + tl.arange(0, block_m)
    tl.store(target + rest, pairs, mask=rest < own_tiles * block_m)
    for at in range(0, own_tiles, chunk):
        tl.store(tile_experts + first_tile + at + each, own, mask=at + each < own_tiles)


@triton.jit(do_not_specialize=["pairs", "max_tiles"])
def grouped_product_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    pair_weights: tl.tensor,
    pair_weights_stride: tl.tensor,
    num_tiles: tl.tensor,
    tile_experts: tl.tensor,
    sorted_pairs: tl.tensor,
    pairs: tl.tensor,
    max_tiles: tl.tensor,
    n: tl.constexpr,
    k: tl.constexpr,
    topk: tl.constexpr,
    pairs_per_row: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    gated: tl.constexpr,
    squared: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One tile of pairs times `block_n` rows of its expert's weight.

    What follows is SwiGLU if `gated`, squared ReLU if `squared`, else the pairs' weights. Row of
    pair p is p // pairs_per_row. Programs of one weight tile and all pair tiles are
    neighbours, so an expert's weight is read from memory once.
    """
    wait_for_previous(overlap)
    tile = tl.program_id(0) % max_tiles
    column = tl.program_id(0) // max_tiles * block_n + tl.arange(0, block_n)
    if tile < tl.load(num_tiles):
        expert = tl.load(tile_experts + tile).to(tl.int64)
        pair = tl.load(sorted_pairs + tile * block_m + tl.arange(0, block_m))
        real = pair < pairs
        is_row, is_column = real[:, None], (column < n)[:, None]
        inner = tl.arange(0, block_k)
        rows = x + (pair // pairs_per_row).to(tl.int64)[:, None] * x_stride + inner[None, :]
        height: tl.constexpr = 2 * n if gated else n
        cells = weight + expert * (height * k) + column[:, None] * k + inner[None, :]
        sums = tl.zeros((block_m, block_n), tl.float32)
        up_sums = tl.zeros((block_m, block_n), tl.float32)
        for at in range(0, k, block_k):
            if k % block_k == 0:
                row_mask, cell_mask = is_row, is_column
            else:
                left = (inner < k - at)[None, :]
                row_mask, cell_mask = is_row & left, is_column & left
            v = tl.load(rows + at, mask=row_mask, other=0.0)
            w = tl.load(cells + at, mask=cell_mask, other=0.0)
            sums = tl.dot(v, tl.trans(w), sums, input_precision="ieee")
            if gated:
                u = tl.load(cells + n * k + at, mask=cell_mask, other=0.0)
                up_sums = tl.dot(v, tl.trans(u), up_sums, input_precision="ieee")
        if gated:
            sums = sums * tl.sigmoid(sums) * up_sums
        elif squared:
            sums = tl.maximum(sums, 0.0)
            sums = sums * sums
        else:
            place = (pair // topk) * pair_weights_stride + pair % topk
            share = tl.load(pair_weights + place, mask=real, other=0.0)
            sums = sums * share[:, None]
        target = out + pair.to(tl.int64)[:, None] * n + column[None, :]
        tl.store(target, sums.to(out.dtype.element_ty), mask=is_row & (column < n)[None, :])


@triton.jit(do_not_specialize=["first_expert"])
def combine_kernel(
    outputs: tl.tensor,
    experts: tl.tensor,
    experts_stride: tl.tensor,
    out: tl.tensor,
    first_expert: tl.tensor,
    local: tl.constexpr,
    hidden: tl.constexpr,
    topk: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One token: the sum of its pairs with experts here, in order."""
    wait_for_previous(overlap)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < hidden
    total = tl.zeros((block,), tl.float32)
    for nth in range(topk):
        expert = tl.load(experts + token * experts_stride + nth) - first_expert
        here = (expert >= 0) & (expert < local)
        start = outputs + (token * topk + nth) * hidden
        total += tl.load(start + column, mask=inside & here, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)
