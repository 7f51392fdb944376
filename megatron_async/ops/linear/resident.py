"""Kernel of a product of few rows whose weights are in registers before the rows are available.

After its wait such a kernel only has latency. So before the wait each program loads all weights of
its outputs into registers, as fragments of the matrix units. After it, one round of loads reads the
rows in the same form. The warps divide the inputs, and their sums are added once in shared memory.
The kernel also computes the norm before the product: it sums the rows' squares beside the products,
or takes the sums that the kernel before has made, and applies the factor to its own sums.

Written in Gluon, the form of Triton in which a program states the place of each element. Triton's
own choice loads the weights in another order, and moves them through shared memory after the wait.
"""
# Gluon knows tuples and constants, but neither `*` in a tuple nor `and` of the two kinds of `if`;
# mypy does not know that a loop over constants is unrolled.
# ruff: noqa: RUF005, SIM102
# mypy: disable-error-code="assignment, var-annotated, unreachable"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from megatron_async.ops.dependent_launch import launch_options
from megatron_async.ops.linear.product_kernel import (
    PROCESSORS,
    WHOLE_ROW,
    WIDE,
    Activation,
    Operands,
    Problem,
    ProductKernel,
    Rounding,
    Wants,
    norm_of,
)
from megatron_async.ops.linear.qkv_places import (
    QkvPlaces,
    first_of_pairs,
    place,
    split_pairs,
    store_heads,
)
from megatron_async.ops.linear.stream import Stream

Segments = tuple[tuple[int, int], ...]
RESIDENT_ROWS = 32
"""Most rows of products whose weights are resident: each program loads rows anew, and beyond this
many that takes longer than the weights do."""
RESIDENT_INPUTS = 3072
"""Most inputs of such a product: a thread holds its share of a weight row in registers."""
RESIDENT_GATED_INPUTS = 1024
"""`RESIDENT_INPUTS` for two weights, for products as wide as `WIDE`, and for products that include
a norm of several rows."""
RESIDENT_ELEMENTS = 7_000_000
"""Most weights of such a product: more programs than fit the device begin after the wait."""
RESIDENT_ELEMENTS_OF_MANY = 3_200_000
"""`RESIDENT_ELEMENTS` for more than 16 rows."""
RESIDENT_ELEMENTS_OF_LONG = 2_100_000
"""`RESIDENT_ELEMENTS` for more than 8 rows of `WHOLE_ROW` inputs or more: a split product takes as
long alone, and less beside others (Llama-3.2-1B's step at 16 rows: 0.96 and 1.00 ms)."""
ROTATED_ROWS = 16
"""Most rows of a product with resident weights that also rotates and appends: SmolLM2's step takes
0.579 instead of 0.570 ms at 32 rows with it, and 0.431 instead of 0.463 at 16."""


@dataclass(frozen=True)
class ResidentPlan:
    """Layout of `resident_kernel`: each program takes `block_n` outputs of `block_m` rows."""

    block_m: int
    block_n: int
    warps: int
    """Each takes a share of the inputs."""


def resident_plan(problem: Problem) -> ResidentPlan | None:
    """For products whose weights the processors can hold, which is known to pay from two rows on;
    of one row where `one_row_kernel` would load its weights behind the wait, or loads two."""
    rows, outputs, k, dtype, gated, *_ = problem
    # float16 would overflow where a row meets its norm's factors before it is normalised.
    if dtype != torch.bfloat16:
        return None
    if rows == 1 and not gated and k <= WHOLE_ROW:
        return None
    is_wide = outputs >= WIDE
    if rows > (16 if is_wide else RESIDENT_ROWS):
        return None
    if k > (RESIDENT_GATED_INPUTS if gated or is_wide else RESIDENT_INPUTS):
        return None
    if is_wide:
        return None if gated else ResidentPlan(8 if rows <= 8 else 16, 32, 4)
    most = RESIDENT_ELEMENTS if rows <= 16 else RESIDENT_ELEMENTS_OF_MANY
    if rows > 8 and k >= WHOLE_ROW:
        most = RESIDENT_ELEMENTS_OF_LONG
    if outputs * k * (2 if gated else 1) > most:
        return None
    many = gated or outputs > 16 * PROCESSORS
    block_n = 32 if many and k <= WHOLE_ROW else 16
    warps = 8 if gated or k >= 768 else 4
    # Rows in eights load fewer at once; sixteens load the weights once where programs are many.
    in_eights = triton.cdiv(outputs, block_n) * triton.cdiv(rows, 8)
    in_eights_fit = k <= 1536 and in_eights <= PROCESSORS
    return ResidentPlan(8 if rows <= 8 or in_eights_fit else 16, block_n, warps)


def _served(problem: Problem, wants: Wants, plan: ResidentPlan) -> set[str]:
    served = {"activation", "squares"}
    if problem.k <= RESIDENT_GATED_INPUTS:
        served.add("norm")
    if wants.rotate and problem.rows <= ROTATED_ROWS and wants.rotate % plan.block_n == 0:
        served.add("rotate")
    return served


def resident_product(
    x: Tensor | Stream,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    plan: ResidentPlan,
    places: QkvPlaces | None = None,
) -> Tensor:
    """`product` of bfloat16 by a given plan."""
    given = Operands(x, weight, bias, activation)
    if given.rows.dtype != torch.bfloat16:
        raise ValueError(f"resident_product: x is {given.rows.dtype}; use tile_product.")
    residual, norm_weight, total = norm_of(x, weight)
    placed = place(places, given, plan.block_n, activation)
    n, (rows, k) = given.outputs, given.rows.shape
    resident_kernel[(triton.cdiv(n, plan.block_n), triton.cdiv(rows, plan.block_m))](
        given.rows,
        residual,
        norm_weight,
        total,
        weight,
        given.bias,
        given.squares,
        *placed.tensors,
        given.rows.stride(0),
        residual.stride(0),
        rows,
        n,
        given.eps,
        k=k,
        segments=segments_of(k, plan.warps),
        warps=plan.warps,
        block_m=plan.block_m,
        block_n=plan.block_n,
        **placed.constants,
        **given.constants,
        has_norm=isinstance(x, Stream) and not given.parts,
        has_residual=isinstance(x, Stream) and x.residual is not None,
        num_warps=plan.warps,
        **launch_options(given.rows),
    )
    return placed.tensors[-1]


def segments_of(k: int, warps: int) -> Segments:
    """`k` inputs as powers of two, largest first, each shared by all warps, and the adjacent inputs
    that a thread loads at once. The last may reach beyond k."""
    found, left = [], k
    while left > 0:
        inputs = warps * 16  # one product of the matrix units is 16 inputs deep
        while inputs * 2 <= left:
            inputs *= 2
        found.append((inputs, min(inputs // warps // 8, 8)))
        left -= inputs
    return tuple(found)


@gluon.constexpr_function
def _layout(segments: Any, s: int, operand: int, warps: int) -> Any:
    """Layout of operand 0 (weights, `[warps, outputs, inputs]`) or 1 (rows, `[warps, inputs,
    rows]`)."""
    return gl.DotOperandLayout(operand, _products(warps), segments[s][1])


@gluon.constexpr_function
def _products(warps: int) -> Any:
    """Each warp multiplies its own share of the inputs."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def _joined(warps: int, rotates: bool) -> Any:
    """Layout `[warps, outputs, rows]` in which a thread has the sums of all warps, of an output or,
    if it `rotates`, of a pair."""
    if rotates:
        return gl.BlockedLayout([warps, 2, 1], [1, 8, 4], [1, 1, warps], [1, 2, 0])
    return gl.BlockedLayout([warps, 1, 1], [1, 16, 2], [1, 1, warps], [1, 2, 0])


@gluon.constexpr_function
def _in_pairs(warps: int) -> Any:
    """Layout `[pairs, rows]` of a thread's pairs in `_joined`."""
    return gl.BlockedLayout([1, 1], [8, 4], [1, warps], [0, 1])


@gluon.constexpr_function
def _start(segments: Any, s: int) -> int:
    return sum(inputs for inputs, _ in segments[:s])


@gluon.constexpr_function
def _share(segments: Any, s: int, warps: int) -> int:
    return segments[s][0] // warps


@gluon.jit
def _inputs(
    segments: gl.constexpr, s: gl.constexpr, operand: gl.constexpr, warps: gl.constexpr
) -> gl.tensor:
    """Places of a segment's inputs in a row."""
    layout: gl.constexpr = _layout(segments, s, operand, warps)
    share: gl.constexpr = _share(segments, s, warps)
    kept: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    warp = gl.arange(0, warps, layout=kept)[:, None, None]
    if operand == 0:
        place = gl.arange(0, share, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
        place = place[None, None, :]
    else:
        place = gl.arange(0, share, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        place = place[None, :, None]
    return _start(segments, s) + warp * share + place


@gluon.jit
def _lines(
    segments: gl.constexpr,
    s: gl.constexpr,
    operand: gl.constexpr,
    warps: gl.constexpr,
    size: gl.constexpr,
) -> gl.tensor:
    """0 to `size` along the outputs or rows of a segment."""
    layout: gl.constexpr = _layout(segments, s, operand, warps)
    if operand == 0:
        line = gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        line = line[None, :, None]
    else:
        line = gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
        line = line[None, None, :]
    return line


@gluon.jit
def resident_kernel(
    x: gl.tensor,
    residual: gl.tensor,
    norm_weight: gl.tensor,
    total: gl.tensor,
    weight: gl.tensor,
    bias: gl.tensor,
    squares: gl.tensor,
    cos: gl.tensor,
    sin: gl.tensor,
    position_ids: gl.tensor,
    write_index: gl.tensor,
    key_cache: gl.tensor,
    value_cache: gl.tensor,
    cache_scales: gl.tensor,
    out: gl.tensor,
    x_stride: gl.tensor,
    residual_stride: gl.tensor,
    rows: gl.tensor,
    n: gl.tensor,
    eps: gl.tensor,
    k: gl.constexpr,
    segments: gl.constexpr,
    warps: gl.constexpr,
    block_m: gl.constexpr,
    block_n: gl.constexpr,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    dim: gl.constexpr,
    gated: gl.constexpr,
    squared: gl.constexpr,
    has_norm: gl.constexpr,
    has_residual: gl.constexpr,
    parts: gl.constexpr,
    block_parts: gl.constexpr,
    has_bias: gl.constexpr,
    overlap: gl.constexpr,
) -> None:
    """`block_m` rows times `block_n` weight rows, or twice as many if `gated`; divided by the root
    mean square that follows from `squares`, if a row has `parts` of them. With heads of `dim`
    elements the outputs are rotated and appended (`QkvPlaces`), and the next kernel starts after
    the wait, as behind `one_row_kernel`."""
    rotates: gl.constexpr = dim > 0
    if overlap:
        if not rotates:
            gdc_launch_dependents()
    first = gl.program_id(0) * block_n
    first_row = gl.program_id(1) * block_m
    if rotates:
        pair = first // 2
        first = first_of_pairs(pair, dim)
        in_pairs: gl.constexpr = _in_pairs(warps)
        lane = gl.arange(0, block_n // 2, layout=gl.SliceLayout(1, in_pairs))[:, None]
        lane = pair % (dim // 2) + lane
        token = first_row + gl.arange(0, block_m, layout=gl.SliceLayout(0, in_pairs))[None, :]
        position = gl.load(position_ids + token, mask=token < rows, other=0)
        place = gl.load(write_index + token, mask=token < rows, other=0)
        cosine = gl.load(cos + position * dim + lane)
        sine = gl.load(sin + position * dim + lane)
    start = weight + first.to(gl.int64) * k
    up_start = start + n.to(gl.int64) * k
    weights = ()
    up_weights = ()
    scales = ()
    for s in gl.static_range(len(segments)):
        column = _inputs(segments, s, 0, warps)
        line = _lines(segments, s, 0, warps, block_n)
        inside = (line < n - first) & (column < k)
        if rotates:
            line = line // 2 + line % 2 * (dim // 2)
        cell = line * k + column
        weights = weights + (gl.load(start + cell, mask=inside, other=0.0),)
        if gated:
            up_weights = up_weights + (gl.load(up_start + cell, mask=inside, other=0.0),)
        if has_norm:
            column = _inputs(segments, s, 1, warps)
            scales = scales + (gl.load(norm_weight + column, mask=column < k, other=0.0),)
    if overlap:
        gdc_wait()
        if rotates:
            gdc_launch_dependents()
    # All loads before the first sum: they take one trip to memory together.
    values = ()
    befores = ()
    for s in gl.static_range(len(segments)):
        column = _inputs(segments, s, 1, warps)
        row = first_row + _lines(segments, s, 1, warps, block_m)
        inside = (row < rows) & (column < k)
        values = values + (gl.load(x + row * x_stride + column, mask=inside, other=0.0),)
        if has_residual:
            its = gl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
            befores = befores + (its,)
    if parts > 0:
        given: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])
        line = first_row + gl.arange(0, block_m, layout=gl.SliceLayout(1, given))[:, None]
        piece = gl.arange(0, block_parts, layout=gl.SliceLayout(0, given))[None, :]
        there = (line < rows) & (piece < parts)
        whole = gl.sum(gl.load(squares + line * parts + piece, mask=there, other=0.0), 1)
    sums = gl.zeros([warps, block_n, block_m], gl.float32, layout=_products(warps))
    up_sums = gl.zeros([warps, block_n, block_m], gl.float32, layout=_products(warps))
    kept: gl.constexpr = gl.SliceLayout(1, _layout(segments, 0, 1, warps))
    own_squares = gl.zeros([warps, block_m], gl.float32, layout=kept)
    totals = ()
    for s in gl.static_range(len(segments)):
        v = values[s]
        if has_residual:
            v = (befores[s].to(gl.float32) + v.to(gl.float32)).to(v.dtype)
            totals = totals + (v,)
        if has_norm:
            exact = v.to(gl.float32)
            own_squares += gl.convert_layout(gl.sum(exact * exact, 1), kept)
            v = (exact * scales[s].to(gl.float32)).to(v.dtype)
        sums = mma_v2(weights[s], v, sums)
        if gated:
            up_sums = mma_v2(up_weights[s], v, up_sums)
    # Each thread adds up what all warps have of its outputs.
    joined: gl.constexpr = _joined(warps, rotates)
    flat: gl.constexpr = gl.SliceLayout(0, joined)
    line = gl.arange(0, block_n, layout=gl.SliceLayout(1, flat))[:, None]
    row = first_row + gl.arange(0, block_m, layout=gl.SliceLayout(0, flat))[None, :]
    y = gl.sum(gl.convert_layout(sums, joined), 0)
    if gated:
        up = gl.sum(gl.convert_layout(up_sums, joined), 0)
    if has_norm:
        whole = gl.sum(gl.convert_layout(own_squares, gl.SliceLayout(1, joined)), 0)
    if has_norm or parts > 0:
        whole = gl.convert_layout(whole, gl.SliceLayout(0, flat))[None, :]
        factor = gl.rsqrt(whole / k + eps)
        y = y * factor
        if gated:
            up = up * factor
    if has_bias:
        its = line // 2 + line % 2 * (dim // 2) if rotates else line
        y = y + gl.load(bias + first + its, mask=line < n - first, other=0.0).to(gl.float32)
    if gated:
        y = y / (1.0 + gl.exp(-y)) * up
    elif squared:
        y = gl.maximum(y, 0.0)
        y = y * y
    if rotates:
        y, partner = split_pairs(y, block_n // 2, block_m, in_pairs)
        head = pair // (dim // 2)
        store_heads(
            y, partner, cosine, sine, token, place, lane, head, token < rows,
            out, key_cache, value_cache, cache_scales, kv_heads, group, dim,
        )  # fmt: skip
    else:
        at = row * n + first + line
        gl.store(out + at, y.to(out.dtype.element_ty), mask=(line < n - first) & (row < rows))
    if has_residual:
        if gl.program_id(0) == 0:
            for s in gl.static_range(len(segments)):
                sum_column = _inputs(segments, s, 1, warps)
                sum_row = first_row + _lines(segments, s, 1, warps, block_m)
                in_sum = (sum_row < rows) & (sum_column < k)
                gl.store(total + sum_row * k + sum_column, totals[s], mask=in_sum)


RESIDENT = ProductKernel(
    "resident",
    resident_plan,
    _served,
    resident_product,
    Rounding("16 at a time, a warp's share of each segment; then the warps", "sums"),
)
