"""Product of one row of long inputs, on the CUDA cores.

`one_row_kernel` lets all warps of a program share a weight row, and ends a program with a few rows.
Here each warp takes whole weight rows, one after the other, and asks for a tile of the next row as
soon as it has used one of its own: so memory stays busy until the last row. As many programs are
launched as run at once. Nemotron-3-Nano's in_proj, 10,304 x 2,688, on an H200: 17.3 us by
`one_row_kernel`, 14.5 with a few rows a program, about 12.5 here, where its bytes need 12.1 at the
rate of the longest reads (docs/records/products.md, 2026-11-25).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import await_previous, launch_options, let_next_start
from megatron_async.ops.linear.product_kernel import (
    NORM_WIDTH,
    PROCESSORS,
    WHOLE_ROW,
    Activation,
    Operands,
    Problem,
    ProductKernel,
    Rounding,
    Wants,
    added_to,
    new_sums,
)
from megatron_async.ops.linear.row_tiles import (
    TILE_BYTES,
    add_and_refill,
    ask_first,
    load_tiles,
)

LONG_ROW, LONG_ROW_GATED = 16384, 8192
"""Most inputs of `long_row_kernel`, and of two weights. 4,096 inputs, two whole tiles of
`WHOLE_ROW`, are `one_row_kernel`'s: Llama-3.1-8B's step takes 20 us longer with this kernel's qkv
and proj, and another 70 with its fc1. Two weights of other lengths were not measured."""
LONG_ROW_TILES = 12
"""Most tiles of a weight row that `long_row_kernel` has asked for at any time."""
LONG_ROW_TILES_OF_MORE = 8
"""`LONG_ROW_TILES` of rows that have more than that."""
LONG_ROW_PROGRAMS = 4
"""Programs of that kernel that a processor holds: all are there at once, so that they end
together."""
LONG_ROW_REGISTERS = 128
"""Registers of a thread of that kernel."""


@dataclass(frozen=True)
class LongRowPlan:
    """Layout of `long_row_kernel`: each program takes `block_n` outputs at a time."""

    block_n: int
    warps: int
    depth: int
    """Tiles of a weight row that each warp has asked for at any time."""
    turns: int
    """Number of times that a program takes `block_n` outputs."""


def long_row_plan(problem: Problem) -> LongRowPlan | None:
    """The layout of a product of one long row; None: another kernel's."""
    if problem.rows != 1:
        return None
    outputs, k, itemsize, gated = problem.outputs, problem.k, problem.itemsize, problem.gated
    if not WHOLE_ROW < k <= (LONG_ROW_GATED if gated else LONG_ROW) or k == 2 * WHOLE_ROW:
        return None
    tiles = triton.cdiv(k * itemsize, TILE_BYTES)
    most = LONG_ROW_TILES if tiles <= LONG_ROW_TILES else LONG_ROW_TILES_OF_MORE
    rounds = triton.cdiv(tiles, most)
    warps = 4
    turns = triton.cdiv(outputs, warps * LONG_ROW_PROGRAMS * PROCESSORS)
    return LongRowPlan(warps, warps, triton.cdiv(tiles, rounds), turns)


def _served(problem: Problem, wants: Wants, plan: LongRowPlan) -> set[str]:
    return {"activation", "residual"} if problem.outputs <= NORM_WIDTH else {"activation"}


def long_row_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    plan: LongRowPlan,
    added: Tensor | None = None,
) -> Tensor:
    """`product` of one row by a given plan."""
    given = Operands(x, weight, bias, activation)
    residual = added_to(given, added)
    if x.size(0) != 1:
        raise ValueError(f"long_row_product: x has {x.size(0)} rows; use tile_product.")
    out = new_sums(x, given.outputs, 1)
    long_row_kernel[(triton.cdiv(given.outputs, plan.block_n * plan.turns),)](
        x,
        weight,
        given.bias,
        residual,
        out,
        given.outputs,
        k=x.size(1),
        block_n=plan.block_n,
        block_k=TILE_BYTES // x.itemsize,
        depth=plan.depth,
        turns=plan.turns,
        **given.constants,
        has_residual=added is not None,
        num_warps=plan.warps,
        maxnreg=LONG_ROW_REGISTERS,
        **launch_options(x),
    )
    return out


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


LONG_ROW_KERNEL = ProductKernel(
    "long row",
    long_row_plan,
    _served,
    long_row_product,
    Rounding("a thread's share of each tile in turn, then a tree", "rows"),
)
