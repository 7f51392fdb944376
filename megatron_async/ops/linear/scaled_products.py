"""Product of many rows in FP8 by a weight in FP8: cuBLASLt's, with scales of blocks.

cuBLASLt adds up in float32 by blocks of 128 inputs, as our own kernel does. It has two kinds of
scales of a weight: for 128 x 128 numbers, and for 128 inputs of an output. The first is the faster
one: 1,200 to 1,330 TFLOP/s at 2,048 rows and more on an H200, where the second has 960 to 1,050.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from megatron_async.ops.linear.product_kernel import (
    Activation,
    Problem,
    ProductKernel,
    check_copied,
)
from megatron_async.ops.linear.quantised_weight import BLOCK, QuantisedWeight
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
) -> Tensor:
    """`product` of rows that are rounded to FP8 by a weight in FP8, on a GPU; the norm of a
    `Stream` is done first."""
    rows, given = rounded_of(x, weight, bias, activation, ROWS)
    check_copied("scaled_product", rows.codes, weight.codes)
    if activation:
        raise ValueError(f"scaled_product: it has no activation; found {activation!r}.")
    scales, kind = scales_of(weight)
    out = F.scaled_mm(
        rows.codes,
        weight.codes.t(),
        rows.scales.t(),
        ScalingType.BlockWise1x128,
        scales,
        kind,
        bias=bias,
        output_dtype=given.rows.dtype,
    )
    return out[: len(given.rows)]


def scales_of(weight: QuantisedWeight) -> tuple[Tensor, ScalingType]:
    """Scales as cuBLASLt reads them: those of one output, or block of outputs, are a column."""
    n, k = weight.shape
    blocks = k // BLOCK
    if weight.form.rows == 1:
        across = weight.scales.t().expand(blocks, n).contiguous()
        return across.t(), ScalingType.BlockWise1x128
    scales = weight.scales
    if blocks % SCALES:
        scales = F.pad(scales, (0, -blocks % SCALES))
    return scales.t(), ScalingType.BlockWise128x128


SCALED = ProductKernel(
    "cuBLASLt, FP8",
    scaled_plan,
    lambda *_: {"norm", "norm of parts"},
    scaled_product,
    BY_BLOCKS,
)
