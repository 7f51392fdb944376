"""Kernels of the experts' grouped products; `ops/experts/expert_mlp.py` launches them.

A pair is a token and one of its experts: pair p is token p // topk's expert number p % topk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.dependent_launch import wait_for_previous


@triton.jit
def _product_tile(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    pair_weights: tl.tensor,
    pair_weights_stride: tl.tensor,
    tile_pairs: tl.tensor,
    first_column: tl.tensor,
    pairs: tl.tensor,
    n: tl.constexpr,
    k: tl.constexpr,
    topk: tl.constexpr,
    pairs_per_row: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    gated: tl.constexpr,
    squared: tl.constexpr,
) -> None:
    """The first `block_m` pairs of a tile times `block_n` rows of one expert's weight."""
    pair = tl.load(tile_pairs + tl.arange(0, block_m))
    column = first_column + tl.arange(0, block_n)
    real = pair < pairs
    is_row, is_column = real[:, None], (column < n)[:, None]
    inner = tl.arange(0, block_k)
    rows = x + (pair // pairs_per_row).to(tl.int64)[:, None] * x_stride + inner[None, :]
    cells = weight + column[:, None] * k + inner[None, :]
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


@triton.jit
def _product_columns(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    pair_weights: tl.tensor,
    pair_weights_stride: tl.tensor,
    tile_pairs: tl.tensor,
    nth: tl.tensor,
    pairs: tl.tensor,
    n: tl.constexpr,
    k: tl.constexpr,
    topk: tl.constexpr,
    pairs_per_row: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    last_n: tl.constexpr,
    block_k: tl.constexpr,
    gated: tl.constexpr,
    squared: tl.constexpr,
) -> None:
    """The nth tile of columns, of `last_n` where it is the last one."""
    if last_n < block_n:
        if (nth + 1) * block_n >= n:
            _product_tile(
                x, x_stride, weight, out, pair_weights, pair_weights_stride, tile_pairs,
                nth * block_n, pairs, n, k, topk, pairs_per_row, block_m, last_n, block_k, gated,
                squared,
            )  # fmt: skip
        else:
            _product_tile(
                x, x_stride, weight, out, pair_weights, pair_weights_stride, tile_pairs,
                nth * block_n, pairs, n, k, topk, pairs_per_row, block_m, block_n, block_k, gated,
                squared,
            )  # fmt: skip
    else:
        _product_tile(
            x, x_stride, weight, out, pair_weights, pair_weights_stride, tile_pairs,
            nth * block_n, pairs, n, k, topk, pairs_per_row, block_m, block_n, block_k, gated,
            squared,
        )  # fmt: skip


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
    last_n: tl.constexpr,
    block_k: tl.constexpr,
    gated: tl.constexpr,
    squared: tl.constexpr,
    halves: tl.constexpr,
    by_rows: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One tile of pairs times `block_n` rows of its expert's weight, `last_n` at their end.

    What follows is SwiGLU if `gated`, squared ReLU if `squared`, else the pairs' weights. Row of
    pair p is p // pairs_per_row. Neighbouring programs have one weight tile and all pair tiles, so
    that a weight is read from memory once, or, if `by_rows`, one pair tile and all weight tiles. If
    `halves`, a tile whose second half holds no pair is computed as its first half.
    """
    wait_for_previous(overlap)
    columns: tl.constexpr = (n + block_n - 1) // block_n
    if by_rows:
        tile = tl.program_id(0) // columns
        nth = tl.program_id(0) % columns
    else:
        tile = tl.program_id(0) % max_tiles
        nth = tl.program_id(0) // max_tiles
    if tile < tl.load(num_tiles):
        height: tl.constexpr = 2 * n if gated else n
        own = weight + tl.load(tile_experts + tile).to(tl.int64) * (height * k)
        tile_pairs = sorted_pairs + tile * block_m
        if halves:
            if tl.load(tile_pairs + block_m // 2) >= pairs:
                _product_columns(
                    x, x_stride, own, out, pair_weights, pair_weights_stride, tile_pairs, nth,
                    pairs, n, k, topk, pairs_per_row, block_m // 2, block_n, last_n, block_k,
                    gated, squared,
                )  # fmt: skip
            else:
                _product_columns(
                    x, x_stride, own, out, pair_weights, pair_weights_stride, tile_pairs, nth,
                    pairs, n, k, topk, pairs_per_row, block_m, block_n, last_n, block_k, gated,
                    squared,
                )  # fmt: skip
        else:
            _product_columns(
                x, x_stride, own, out, pair_weights, pair_weights_stride, tile_pairs, nth, pairs,
                n, k, topk, pairs_per_row, block_m, block_n, last_n, block_k, gated, squared,
            )  # fmt: skip


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
