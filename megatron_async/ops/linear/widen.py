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
"""Rows and inputs of a program."""


def widen(weight: Tensor | QuantisedWeight) -> Tensor:
    """A weight in its dtype: `weight.values(weight.dtype)`, by one kernel on a GPU."""
    if not isinstance(weight, QuantisedWeight):
        return weight
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
def _widened(
    units: tl.tensor,
    scale: tl.tensor,
    more: tl.tensor,
    part: tl.constexpr,
    form: tl.constexpr,
    dtype: tl.constexpr,
    in_pairs: tl.constexpr,
) -> tl.tensor:
    """A part of the units, float32; INT4 is too large by `more`."""
    numbers = load_tile(units, scale, scale, part, form, False, dtype, in_pairs).to(tl.float32)
    return (numbers - more) * scale if form.numbers == "INT4" else numbers * scale


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
    more = 128.0 if dtype == tl.bfloat16 else 0.0
    if form.has_zeros:
        more += tl.load(zeros + place).to(tl.float32)
    else:
        more += 8
    first = _widened(units, scale, more, 0, form, dtype, overlap)
    second = _widened(units, scale, more, 1, form, dtype, overlap)
    if per == 2:
        wide = tl.join(first, second)
    else:
        third = _widened(units, scale, more, 2, form, dtype, overlap)
        last = _widened(units, scale, more, 3, form, dtype, overlap)
        wide = tl.join(tl.join(first, third), tl.join(second, last))
    numbers = tl.reshape(wide, (block_n, block_k))
    if form.has_outer:
        numbers = numbers * tl.load(outer + row, mask=line < n, other=0.0)[:, None]
    column = begin + tl.arange(0, block_k)
    mask = (line < n)[:, None] & (column < k)[None, :]
    tl.store(out + row[:, None] * k + column[None, :], numbers.to(dtype), mask=mask)
