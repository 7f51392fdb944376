"""Rows that are rounded to FP8 for products: each 128 inputs by a scale of their own.

`quantise_rows` says what the numbers are. Scales are laid out as both kinds of product kernels read
them: those of all rows for one block of inputs are neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.linear.quantised_weight import BLOCK, E4M3_MAX, LEAST_MAXIMUM

BLOCKS = 8
"""Blocks of a row that a program takes."""
LARGEST = tl.constexpr(E4M3_MAX)
LEAST = tl.constexpr(LEAST_MAXIMUM)


class RoundedRows(NamedTuple):
    """Rows in FP8, and perhaps a few more, whose numbers have no meaning.

    Attributes:
        codes: float8_e4m3fn `[rows, k]`, contiguous.
        scales: float32 `[ceil(k / 128), rows]`, contiguous.
        input_scale: float32 `[]`, by which all rows are to be divided; None: each 128 inputs have a
            scale of their own.
    """

    codes: Tensor
    scales: Tensor
    input_scale: Tensor | None = None


def new_rounded(
    rows: int, k: int, device: torch.device, multiple: int, input_scale: Tensor | None = None
) -> RoundedRows:
    """A place for a multiple of so many rows."""
    padded = triton.cdiv(rows, multiple) * multiple
    return RoundedRows(
        torch.empty((padded, k), dtype=torch.float8_e4m3fn, device=device),
        torch.empty((triton.cdiv(k, BLOCK), padded), dtype=torch.float32, device=device),
        input_scale,
    )


def rounding_of(rounded: RoundedRows | None) -> tuple[Tensor | None, int | None, Tensor | None]:
    """Scales, their stride, and the scale of the rows, as kernels take them."""
    if rounded is None:
        return None, None, None
    return rounded.scales, rounded.scales.size(1), rounded.input_scale


def round_rows(x: Tensor, input_scale: Tensor | None, multiple: int = 1) -> RoundedRows:
    """Rows `[rows, k]` on a GPU, elements of a row adjacent, rounded as by `quantise_rows`."""
    rows, k = x.shape
    rounded = new_rounded(rows, k, x.device, multiple)
    if rows:
        _round_rows_kernel[(rows, triton.cdiv(k, BLOCKS * BLOCK))](
            x,
            x if input_scale is None else input_scale,
            rounded.codes,
            rounded.scales,
            x.stride(0),
            rounded.scales.size(1),
            k,
            blocks=BLOCKS,
            has_scale=input_scale is not None,
            num_warps=4,
            **launch_options(x),
        )
    return rounded


@triton.jit
def round_blocks(
    values: tl.tensor, input_scale: tl.tensor, has_scale: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Codes and scales of float32 `[blocks, 128]`."""
    if has_scale:
        scale = tl.load(input_scale) + tl.zeros([values.shape[0]], tl.float32)
    else:
        scale = tl.maximum(tl.max(tl.abs(values), 1), LEAST) / LARGEST
    values = tl.minimum(tl.maximum(tl.div_rn(values, scale[:, None]), -LARGEST), LARGEST)
    return values.to(tl.float8e4nv), scale


@triton.jit(do_not_specialize=["scale_stride"])
def _round_rows_kernel(
    x: tl.tensor,
    input_scale: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.tensor,
    scale_stride: tl.tensor,
    k: tl.tensor,
    blocks: tl.constexpr,
    has_scale: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Round `blocks` blocks of one row."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * blocks + tl.arange(0, blocks)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    wait_for_previous(overlap, True)
    values = tl.load(x + row * x_stride + column, mask=column < k, other=0.0).to(tl.float32)
    numbers, scale = round_blocks(values, input_scale, has_scale)
    tl.store(codes + row * k + column, numbers, mask=column < k)
    tl.store(scales + block.to(tl.int64) * scale_stride + row, scale, mask=block * 128 < k)
