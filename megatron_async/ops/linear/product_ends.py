"""The end of a product in FP8 by cuBLASLt: scales of outputs, a bias, the activation, and rounding
for the next product; one kernel, where each alone would read and write all rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.linear.activations import gated_by, squared_relu_of
from megatron_async.ops.linear.product_kernel import Activation
from megatron_async.ops.linear.rounded_rows import RoundedRows, round_blocks

COLUMNS = 1024
"""Elements of a row that a program takes."""


def end_product(
    y: Tensor,
    factors: Tensor | None,
    bias: Tensor | None,
    activation: Activation,
    rounded: RoundedRows | None = None,
) -> Tensor:
    """What is left of a product, computed in float32 and rounded once; in place without an
    activation.

    Args:
        y: `[rows, outputs]`, `[rows, 2 * outputs]` before SwiGLU; elements of a row adjacent.
        factors: of the elements of a row, float32; None: all are 1.
        bias: like a row of y, added before the activation; None: none.
        activation: behind it.
        rounded: where the activation's rows go, rounded as by `quantise_rows` from y's dtype; of at
            least as many rows. None: they are of y's dtype.

    Returns:
        `[rows, outputs]`: codes if they are rounded.
    """
    rows, width = y.shape
    outputs = width // 2 if activation == "swiglu" else width
    if rounded is not None:
        out = rounded.codes[:rows]
    else:
        out = y.new_empty((rows, outputs)) if activation else y
    given = None if rounded is None else rounded.input_scale
    if rows:
        _end_kernel[(rows, triton.cdiv(outputs, COLUMNS))](
            y,
            factors,
            bias,
            out,
            None if rounded is None else rounded.scales,
            given,
            y.stride(0),
            out.stride(0),
            1 if rounded is None else rounded.scales.size(1),
            outputs,
            block=COLUMNS,
            activation=activation,
            num_warps=4,
            **launch_options(y),
        )
    return out


@triton.jit
def _ended(
    y: tl.tensor,
    factors: tl.tensor | None,
    bias: tl.tensor | None,
    column: tl.tensor,
    inside: tl.tensor,
) -> tl.tensor:
    """Elements of a row, float32, by their factors and with their biases."""
    value = tl.load(y + column, mask=inside, other=0.0).to(tl.float32)
    if factors is not None:
        value *= tl.load(factors + column, mask=inside, other=0.0)
    if bias is not None:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["scale_stride"])
def _end_kernel(
    y: tl.tensor,
    factors: tl.tensor | None,
    bias: tl.tensor | None,
    out: tl.tensor,
    scales: tl.tensor | None,
    input_scale: tl.tensor | None,
    y_stride: tl.tensor,
    out_stride: tl.tensor,
    scale_stride: tl.tensor,
    outputs: tl.tensor,
    block: tl.constexpr,
    activation: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """`block` elements of one row, rounded to FP8 if there are `scales`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < outputs
    wait_for_previous(overlap)
    value = _ended(y + row * y_stride, factors, bias, column, inside)
    if activation == "swiglu":
        up = _ended(y + row * y_stride, factors, bias, column + outputs, inside)
        value = gated_by(value, up)
    elif activation == "squared_relu":
        value = squared_relu_of(value)
    if scales is None:
        tl.store(out + row * out_stride + column, value, mask=inside)
    else:
        value = value.to(y.dtype.element_ty).to(tl.float32)
        blocks = tl.reshape(value, [block // 128, 128])
        numbers, row_scales = round_blocks(blocks, input_scale, input_scale is not None)
        tl.store(out + row * out_stride + column, tl.reshape(numbers, [block]), mask=inside)
        at = tl.program_id(1) * (block // 128) + tl.arange(0, block // 128)
        place = at.to(tl.int64) * scale_stride + row
        tl.store(scales + place, row_scales, mask=at * 128 < outputs)
