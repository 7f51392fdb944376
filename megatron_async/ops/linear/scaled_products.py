"""Product of many rows in FP8 by a weight in FP8: cuBLASLt's, with scales of blocks.

cuBLASLt adds up in float32 by blocks of 128 inputs, as our own kernel does. It has two kinds of
scales of a weight: for 128 x 128 numbers, and for 128 inputs of an output. The first is the faster
one: 1,200 to 1,330 TFLOP/s at 2,048 rows and more on an H200, where the second has 960 to 1,050.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.functional import ScalingType

from megatron_async.ops.linear.product_ends import end_product
from megatron_async.ops.linear.product_kernel import (
    Activation,
    Problem,
    ProductKernel,
    check_copied,
)
from megatron_async.ops.linear.quantised_weight import BLOCK, QuantisedWeight
from megatron_async.ops.linear.rounded_rows import RoundedRows
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.linear.streamed_fp8 import BY_BLOCKS, is_of_fp8, rounded_of

ROWS = 4
"""cuBLASLt takes multiples of so many rows."""
OUTPUTS = 16
"""And of so many outputs."""
SCALES = 4
"""And scales of blocks whose rows are multiples of so many."""


class ScaledPlan:
    """Nothing is chosen."""


PLAN = ScaledPlan()


def scaled_plan(problem: Problem) -> ScaledPlan | None:
    """For any number of rows; None: another kernel's."""
    is_taken = is_of_fp8(problem) and problem.outputs % OUTPUTS == 0
    return PLAN if is_taken else None


def scaled_product(
    x: Tensor | Stream,
    weight: QuantisedWeight,
    bias: Tensor | None,
    activation: Activation,
    plan: ScaledPlan,
    rounded: RoundedRows | None = None,
) -> Tensor:
    """`product` of rows that are rounded to FP8 by a weight in FP8, on a GPU; the norm of a
    `Stream` is done first, and the activation and what is left in one kernel behind it."""
    rows, given = rounded_of(x, weight, bias, activation, ROWS)
    check_copied("scaled_product", rows.codes, weight.codes)
    dtype = given.dtype
    scales, kind, is_left = scales_of(weight, dtype)
    out = F.scaled_mm(
        rows.codes,
        weight.codes.t(),
        rows.scales.t(),
        ScalingType.BlockWise1x128,
        scales,
        kind,
        bias=None if is_left else bias,
        output_dtype=dtype,
    )[: len(given.rows)]
    if not is_left and not activation:
        return out
    factors, added = (weight.scales, bias) if is_left else (None, None)
    return end_product(out, factors, added, activation, rounded)


def scales_of(weight: QuantisedWeight, dtype: torch.dtype) -> tuple[Tensor, ScalingType, bool]:
    """Scales as cuBLASLt reads them, those of one output, or block of outputs, in a column; and
    whether the product is left to be multiplied by the weight's own.

    Scales of whole outputs are: the kernel behind the product takes less time than the slower kind
    of scales. Products without their scales would overflow float16.
    """
    n, k = weight.shape
    blocks = k // BLOCK
    is_left = weight.form.inputs == 0 and n % BLOCK == 0 and dtype == torch.bfloat16
    if not is_left and (weight.form.rows == 1 or n % BLOCK):
        across = weight.scales.repeat_interleave(weight.form.rows, 0)[:n]
        return across.t().expand(blocks, n).contiguous().t(), ScalingType.BlockWise1x128, False
    padded = triton.cdiv(blocks, SCALES) * SCALES
    if is_left:
        scales = torch.ones((n // BLOCK, padded), dtype=torch.float32, device=weight.device)
    else:
        scales = weight.scales
        if padded > blocks:
            scales = F.pad(scales, (0, padded - blocks))
    return scales.t(), ScalingType.BlockWise128x128, is_left


SCALED = ProductKernel(
    "cuBLASLt, FP8",
    scaled_plan,
    lambda *_: {"activation", "norm", "norm of parts", "rounded"},
    scaled_product,
    BY_BLOCKS,
)
