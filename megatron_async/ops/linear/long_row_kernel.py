"""Product of one row of long inputs, on the CUDA cores; `ops/linear/skinny_linear.py` launches it.

`one_row_kernel` lets all warps of a program share a weight row, and ends a program with a few rows.
Here each warp takes whole weight rows, one after the other, and asks for a tile of the next row as
soon as it has used one of its own: so memory stays busy until the last row. As many programs are
launched as run at once. Nemotron-3-Nano's in_proj, 10,304 x 2,688, on an H200: 17.3 us by
`one_row_kernel`, 14.5 with a few rows a program, about 12.5 here, where its bytes need 12.1 at the
rate of the longest reads (docs/records/products.md, 2026-11-25).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.dependent_launch import await_previous, let_next_start
from megatron_async.ops.linear.row_tiles import add_and_refill, ask_first, load_tiles


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
    turns: tl.constexpr,
    gated: tl.constexpr,
    squared: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One row times `turns * block_n` weight rows, or twice as many if `gated`: then a gate's row
    and its up row take turns. The first tiles are asked for before the wait. The outputs are added
    to the residual, if there is one.
    """
    let_next_start(overlap)
    first = tl.program_id(0) * (block_n * turns)
    line, column = tl.arange(0, block_n), tl.arange(0, block_k)
    cells = weight + (first.to(tl.int64) + line[:, None]) * k + column[None, :]
    up = n.to(tl.int64) * k
    inputs = x + line[:, None] * 0 + column[None, :]
    whole = line * 0 + k
    length = tl.where(first + line < n, k, 0)
    tiles = load_tiles(cells, column, length, 0, k, block_k, depth)
    ask_first(overlap)
    await_previous(overlap)
    for turn in range(turns):
        row = first + turn * block_n + line
        inside = row < n
        if has_bias:
            shift = tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
        if has_residual:  # early: at the end, every program would wait for it
            before = tl.load(residual + row, mask=inside, other=0.0).to(tl.float32)
        length = tl.where(inside, k, 0)
        next_length = tl.where((row + block_n < n) & (turn + 1 < turns), k, 0)
        here = cells + turn * (block_n * k)
        following = here + block_n * k
        if gated:
            gate, tiles = add_and_refill(
                tiles, inputs, whole, here, length, here + up, length, column, k, block_k
            )
            here += up
        y, tiles = add_and_refill(
            tiles, inputs, whole, here, length, following, next_length, column, k, block_k
        )
        if gated:
            y = gate * tl.sigmoid(gate) * y
        if has_bias:
            y = y + shift
        if squared:
            y = tl.maximum(y, 0.0)
            y = y * y
        if has_residual:
            y = y.to(out.dtype.element_ty).to(tl.float32) + before
        tl.store(out + row, y.to(out.dtype.element_ty), mask=inside)
