"""A weight that is kept in fewer bits, in the model's dtype again: for products of many rows, which
take longer than that."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.linear.load_tile import (
    kept_operands,
    load_tile,
    may_be_loaded,
    stored_scale,
)
from megatron_async.ops.linear.quantised_weight import QuantisedWeight

LINES, INPUTS = 16, 512
"""Of a program."""


def widen(weight: QuantisedWeight) -> Tensor:
    """`weight.values(weight.dtype)`, by one kernel on a GPU."""
    if not weight.is_cuda or not may_be_loaded(weight.form, weight.dtype) or weight.size(-1) % 4:
        return weight.values(weight.dtype)
    return widen_gpu(weight)


def widen_gpu(weight: QuantisedWeight) -> Tensor:
    """`widen` by the kernel."""
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    *lead, n, k = weight.shape
    codes, kept = kept_operands(weight)
    grid = triton.cdiv(k, INPUTS), triton.cdiv(n, LINES), lead[0] if lead else 1
    options = launch_options(out)
    widen_kernel[grid](
        codes,
        out,
        n,
        **kept,
        k=k,
        block_n=LINES,
        block_k=INPUTS,
        num_warps=4,
        **options,
    )
    return out


@triton.jit
def widen_kernel(
    codes: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    kept: tl.tuple,
    form: tl.constexpr,
    k: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """`block_n` rows of one matrix, `block_k` inputs of each: the bits of `QuantisedWeight.values`,
    float32 rounded once."""
    wait_for_previous(overlap)
    scales, zeros, outer = kept
    dtype: tl.constexpr = out.dtype.element_ty
    per: tl.constexpr = 2 if form.numbers == "FP8" else 4
    inputs: tl.constexpr = form.inputs if form.inputs > 0 else k
    groups: tl.constexpr = (k + inputs - 1) // inputs
    matrix = tl.program_id(2).to(tl.int64)
    line = tl.program_id(1) * block_n + tl.arange(0, block_n)
    begin = tl.program_id(0) * block_k
    unit = tl.arange(0, block_k // per)
    row = matrix * n + line
    mask = (line < n)[:, None] & (begin + unit * per < k)[None, :]
    cells = codes.to(tl.pointer_type(tl.int16)) + row[:, None] * (k // per) + begin // per
    units = tl.load(cells + unit[None, :], mask=mask, other=0)
    scale_rows = (n + form.rows - 1) // form.rows
    own = (matrix * scale_rows + tl.minimum(line, n - 1) // form.rows) * groups
    place = own[:, None] + (tl.minimum(begin + unit * per, k - 1) // inputs)[None, :]
    scale = stored_scale(tl.load(scales + place))
    zero = place
    if form.has_zeros:
        base: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
        stored = tl.load(zeros + place)
        zero = (stored.to(tl.float32) + base).to(dtype)
    first = load_tile(units, scale, zero, 0, form, False, dtype, overlap).to(tl.float32)
    second = load_tile(units, scale, zero, 1, form, False, dtype, overlap).to(tl.float32)
    if per == 4:
        third = load_tile(units, scale, zero, 2, form, False, dtype, overlap).to(tl.float32)
        last = load_tile(units, scale, zero, 3, form, False, dtype, overlap).to(tl.float32)
        wide = tl.join(tl.join(first * scale, third * scale), tl.join(second * scale, last * scale))
    else:
        wide = tl.join(first * scale, second * scale)
    numbers = tl.reshape(wide, (block_n, block_k))
    if form.has_outer:
        numbers = numbers * tl.load(outer + row, mask=line < n, other=0.0)[:, None]
    column = begin + tl.arange(0, block_k)
    mask = (line < n)[:, None] & (column < k)[None, :]
    tl.store(out + row[:, None] * k + column[None, :], numbers.to(dtype), mask=mask)
