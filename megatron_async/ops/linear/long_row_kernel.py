"""Product of one row of long inputs, on the CUDA cores; `ops/linear/skinny_linear.py` launches it.

`one_row_kernel` lets all warps of a program share a weight row. That wastes threads where the row
is no whole number of its tiles: 2,688 inputs took 17.3 us for weights that this kernel reads in
14.5 (Nemotron-3-Nano's in_proj on an H200, docs/records/products.md, 2026-11-24).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.dependent_launch import await_previous, let_next_start
from megatron_async.ops.linear.row_tiles import add_products, ask_first, load_tiles


@triton.jit
def long_row_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    k: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    depth: tl.constexpr,
    gated: tl.constexpr,
    squared: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One row times `block_n` weight rows, or twice as many if `gated`; the first tiles are asked
    for before the wait. The outputs are added to the residual, if there is one.
    """
    let_next_start(overlap)
    first = tl.program_id(0) * block_n
    line, column = tl.arange(0, block_n), tl.arange(0, block_k)
    inside = first + line < n
    length = tl.where(inside, k, 0)
    cells = weight + (first.to(tl.int64) + line[:, None]) * k + column[None, :]
    up_cells = cells + n.to(tl.int64) * k
    inputs = x + line[:, None] * 0 + column[None, :]
    tiles = load_tiles(cells, column, length, 0, k, block_k, depth)
    if gated:
        up_tiles = load_tiles(up_cells, column, length, 0, k, block_k, depth)
    if has_bias:
        shift = tl.load(bias + first + line, mask=inside, other=0.0).to(tl.float32)
    ask_first(overlap)
    await_previous(overlap)
    if has_residual:  # early: at the end, every program would wait for it
        before = tl.load(residual + first + line, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((block_n, block_k), tl.float32)
    up_sums = tl.zeros((block_n, block_k), tl.float32)
    sums = add_products(sums, tiles, inputs, column, length, 0, block_k)
    if gated:
        up_sums = add_products(up_sums, up_tiles, inputs, column, length, 0, block_k)
    for at in tl.static_range(depth * block_k, k, depth * block_k):
        tiles = load_tiles(cells, column, length, at, k - at, block_k, depth)
        if gated:
            up_tiles = load_tiles(up_cells, column, length, at, k - at, block_k, depth)
        ask_first(overlap)
        sums = add_products(sums, tiles, inputs, column, length, at, block_k)
        if gated:
            up_sums = add_products(up_sums, up_tiles, inputs, column, length, at, block_k)
    y = tl.sum(sums, 1)
    if has_bias:
        y = y + shift
    if gated:
        y = y * tl.sigmoid(y) * tl.sum(up_sums, 1)
    elif squared:
        y = tl.maximum(y, 0.0)
        y = y * y
    if has_residual:
        y = y.to(out.dtype.element_ty).to(tl.float32) + before
    tl.store(out + first + line, y.to(out.dtype.element_ty), mask=inside)
