"""Product of one row, on the CUDA cores.

Such a product takes as long as the reads of its weights. No kernel of a step writes weights. So the
kernel starts to load its first weights before it waits for the previous kernel, and lets its
successor, which does the same, start at once. So memory stays busy between kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import (
    await_previous,
    launch_options,
    let_next_start,
    prefetch_rows,
)
from megatron_async.ops.linear.product_kernel import (
    NORM_WIDTH,
    WHOLE_ROW,
    WIDE,
    Activation,
    Operands,
    Problem,
    ProductKernel,
    Rounding,
    Wants,
    added_to,
    norm_of,
)
from megatron_async.ops.linear.qkv_places import (
    QkvPlaces,
    first_of_pairs,
    place,
    store_heads,
)
from megatron_async.ops.linear.stream import Stream

PREFETCH = 2048
"""Bytes of each weight row that are asked for before the wait, where the row is not loaded then."""


@dataclass(frozen=True)
class OneRowPlan:
    """Layout of `one_row_kernel`: each program takes `block_n` outputs, `block_k` elements of their
    weight rows at a time."""

    block_n: int
    block_k: int
    warps: int
    ahead: int
    """Bytes of each weight row to prefetch."""


def one_row_plan(problem: Problem) -> OneRowPlan | None:
    """The layout of a product of one row; None: of more."""
    if problem.rows != 1:
        return None
    outputs, k, itemsize, gated = problem.outputs, problem.k, problem.itemsize, problem.gated
    if k > WHOLE_ROW:
        block_k = 2048 if k <= 4096 else 1024
        # A thread holds a product's partial sums: 16 of them, however wide an element is.
        return OneRowPlan(2, block_k, 8, min(PREFETCH, k * itemsize))
    block_k = triton.next_power_of_2(max(k, 64))
    if outputs >= WIDE:
        return OneRowPlan(4 if gated else 8, block_k, 4, 0)
    warps = 2
    if problem.norm:
        # One warp adds its squares up without the others; SwiGLU's two weights fill four.
        warps = 4 if gated else max(block_k // 1024, 1)
    return OneRowPlan(2 if gated else 4, block_k, warps, 0)


def _served(problem: Problem, wants: Wants, plan: OneRowPlan) -> set[str]:
    served = {"activation", "squares"}
    if problem.k <= NORM_WIDTH:
        served.add("norm")
    # Where every program of the next product normalises the rows again, it reads half as much.
    if problem.outputs <= NORM_WIDTH:
        served.add("residual")
    if wants.rotate and problem.k <= plan.block_k and wants.rotate % plan.block_n == 0:
        served.add("rotate")
    return served


def one_row_product(
    x: Tensor | Stream,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    plan: OneRowPlan,
    added: Tensor | None = None,
    places: QkvPlaces | None = None,
) -> Tensor:
    """`product` of one row by a given plan."""
    given = Operands(x, weight, bias, activation)
    if given.rows.size(0) != 1:
        raise ValueError(f"one_row_product: x has {given.rows.size(0)} rows; use tile_product.")
    residual, norm_weight, total = norm_of(x, weight)
    placed = place(places, given, plan.block_n, activation)
    one_row_kernel[(triton.cdiv(given.outputs, plan.block_n),)](
        given.rows,
        residual,
        norm_weight,
        total,
        weight,
        given.bias,
        given.squares,
        added_to(given, added),
        *placed.tensors,
        given.outputs,
        given.eps,
        k=given.rows.size(1),
        block_n=plan.block_n // 2 if places else plan.block_n,
        block_k=plan.block_k,
        **placed.constants,
        **given.constants,
        has_norm=isinstance(x, Stream) and not given.parts,
        has_residual=isinstance(x, Stream) and x.residual is not None,
        has_added=added is not None,
        ahead=plan.ahead,
        num_warps=plan.warps,
        **launch_options(given.rows),
    )
    return placed.tensors[-1]


@triton.jit
def one_row_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    squares: tl.tensor,
    added: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    position_ids: tl.tensor,
    write_index: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    cache_scales: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    eps: tl.tensor,
    k: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    parts: tl.constexpr,
    block_parts: tl.constexpr,
    gated: tl.constexpr,
    squared: tl.constexpr,
    has_norm: tl.constexpr,
    has_residual: tl.constexpr,
    has_bias: tl.constexpr,
    has_added: tl.constexpr,
    ahead: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One row times `block_n` weight rows, on the CUDA cores.

    The norm's factor is a number, so it is applied to the sums: inputs need not be read twice. It
    follows from the inputs, or from `parts` sums of squares, if there are any. A weight row that
    fits `block_k` is loaded before the wait. `residual` is added to the row before the norm,
    `added` to the outputs.

    With heads of `dim` elements the outputs are rotated and appended (`QkvPlaces`): each of the
    `block_n` with the one half a head behind it. Then the next kernel, which has no weights to
    load, starts after the wait, and may read what was there before it (`is_settled` of
    `ops/attention/decode_attention.py`).
    """
    rotates: tl.constexpr = dim > 0
    paired: tl.constexpr = gated or rotates
    if not rotates:
        let_next_start(overlap)
    program = tl.program_id(0)
    first = program * block_n
    row_bytes: tl.constexpr = k * (weight.dtype.element_ty.primitive_bitwidth // 8)
    whole: tl.constexpr = k <= block_k
    line = tl.arange(0, block_n)
    if rotates:
        lane = first % (dim // 2) + line
        head = first // (dim // 2)
        first = first_of_pairs(first, dim)
        position = tl.load(position_ids)
        place = tl.load(write_index)
        cosine = tl.load(cos + position * dim + lane)
        sine = tl.load(sin + position * dim + lane)
    start = weight + first.to(tl.int64) * k
    up_start = start + ((dim // 2) if rotates else n.to(tl.int64)) * k
    here = block_n if rotates else tl.minimum(n - first, block_n)
    inside = line < here
    column = tl.arange(0, block_k)
    cell = line[:, None] * k + column[None, :]
    # Inputs as wide as the tile where it moves along the row: no exchange between threads then.
    at_input = column[None, :] if whole else line[:, None] * 0 + column[None, :]
    if whole:
        mask = inside[:, None] & (column < k)[None, :]
        w = tl.load(start + cell, mask=mask, other=0.0).to(tl.float32)
        if paired:
            u = tl.load(up_start + cell, mask=mask, other=0.0).to(tl.float32)
        if has_norm:
            scale = tl.load(norm_weight + at_input, mask=at_input < k, other=0.0).to(tl.float32)
    else:
        prefetch_rows(start, here, row_bytes, ahead, overlap)
        if paired:
            prefetch_rows(up_start, here, row_bytes, ahead, overlap)
    if has_bias:
        shift = tl.load(bias + first + line, mask=inside, other=0.0).to(tl.float32)
        if rotates:
            up_shift = tl.load(bias + first + dim // 2 + line).to(tl.float32)
    await_previous(overlap)
    if rotates:
        let_next_start(overlap)
    if has_added:  # early: at the end, every program would wait for it
        stream = tl.load(added + first + line, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((block_n, block_k), tl.float32)
    up_sums = tl.zeros((block_n, block_k), tl.float32)
    own_squares = tl.zeros((1 if whole else block_n, block_k), tl.float32)
    if parts > 0:
        piece = tl.arange(0, block_parts)
        given = tl.load(squares + piece, mask=piece < parts, other=0.0)
    for at in range(0, k, block_k):
        left = at_input < k - at
        if not whole:
            mask = inside[:, None] & (column < k - at)[None, :]
            w = tl.load(start + cell + at, mask=mask, other=0.0).to(tl.float32)
            if paired:
                u = tl.load(up_start + cell + at, mask=mask, other=0.0).to(tl.float32)
            if has_norm:
                scale = tl.load(norm_weight + at + at_input, mask=left, other=0.0).to(tl.float32)
        v = tl.load(x + at + at_input, mask=left, other=0.0).to(tl.float32)
        if has_norm:
            if has_residual:
                before = tl.load(residual + at + at_input, mask=left, other=0.0).to(tl.float32)
                rounded = (before + v).to(total.dtype.element_ty)
                if program == 0:
                    own = left if whole else left & (line == 0)[:, None]
                    tl.store(total + at + at_input, rounded, mask=own)
                v = rounded.to(tl.float32)
            own_squares += v * v
            v = v * scale
        sums += w * v
        if paired:
            up_sums += u * v
    y = tl.sum(sums, 1)
    if paired:
        up = tl.sum(up_sums, 1)
    if parts > 0:
        y = y * tl.rsqrt(tl.sum(given, 0) / k + eps)
    if has_norm:
        factor = tl.rsqrt(tl.sum(own_squares, 1) / k + eps)
        y = y * factor
        if paired:
            up = up * factor
    if has_bias:
        y = y + shift
        if rotates:
            up = up + up_shift
    if gated:
        y = y * tl.sigmoid(y) * up
    elif squared:
        y = tl.maximum(y, 0.0)
        y = y * y
    if has_added:
        y = y.to(out.dtype.element_ty).to(tl.float32) + stream
    if rotates:
        store_heads(
            y, up, cosine, sine, 0, place, lane, head, inside,
            out, key_cache, value_cache, cache_scales, kv_heads, group, dim,
        )  # fmt: skip
    else:
        tl.store(out + first + line, y.to(out.dtype.element_ty), mask=inside)


ONE_ROW = ProductKernel(
    "one row",
    one_row_plan,
    _served,
    one_row_product,
    Rounding("an element of each of the thread's tiles, then a tree", "sums"),
)
