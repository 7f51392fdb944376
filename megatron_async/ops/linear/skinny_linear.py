"""Matrix products of decode steps: few rows, in the time of reading the weights.

cuBLAS does not use programmatic dependent launch, so memory idles before and after each of its
kernels. The kernels here load their first weights early (`ops/linear/skinny_kernels.py`), small
products all weights (`ops/linear/resident_kernel.py`). Products include the operations around them:
before, RMSNorm of one or few rows; after, an MLP's activation, or rotation of queries and keys and
their append to the KV cache. A larger
product with fewer outputs than fill the device is split along its inputs. The next kernel adds the
partial sums in order (`ops/linear/rms_norm.py`), so that results are the same in every run.

Where the rule in `ops/linear/skinny_plan.py` finds no plan, cuBLAS multiplies.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_async.ops.attention.rope_append import rope_append
from megatron_async.ops.linear.planned_products import (
    Activation,
    long_row_product,
    one_row_product,
    resident_product,
    tile_product,
    warpgroup_product,
)
from megatron_async.ops.linear.qkv_places import QkvPlaces
from megatron_async.ops.linear.rms_norm import add_rms_norm, add_rms_norm_gpu
from megatron_async.ops.linear.skinny_plan import (
    LongRowPlan,
    OneRowPlan,
    ResidentPlan,
    TilePlan,
    plan_product,
)
from megatron_async.ops.linear.squared_relu import squared_relu, squared_relu_gpu
from megatron_async.ops.linear.streamed_kernel import streamed_product
from megatron_async.ops.linear.streamed_plan import StreamedPlan
from megatron_async.ops.linear.swiglu import swiglu, swiglu_gpu
from megatron_async.ops.linear.unnormed import Unnormed
from megatron_async.ops.linear.warpgroup_plan import WarpgroupPlan
from megatron_async.ops.op import op


@op
def linear(
    x: Tensor | Unnormed,
    weight: Tensor,
    bias: Tensor | None = None,
    may_split: bool = False,
    added: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: `[rows, k]` on a GPU, bfloat16, float16 or float32; or rows whose norm is to be taken
            first.
        weight: `[n, k]`, same dtype.
        bias: `[n]` or None.
        may_split: partial sums may be returned.
        added: `[rows, n]`, added to the rounded product; only where `adds_residual` of
            `skinny_plan` says so.

    Returns:
        `[rows, n]`; or partial sums `[splits, rows, n]`, float32, to be added in order.
    """
    if added is not None:
        return linear.reference(x, weight, bias) + added
    if not isinstance(x, Unnormed):
        return F.linear(x, weight, bias)
    if x.squares is not None:
        return F.linear(x.divided(), weight, bias)
    normed, x.total = add_rms_norm.reference(x.x, x.residual, x.weight, x.eps)
    return F.linear(normed, weight, bias)


@linear.gpu
def linear_gpu(
    x: Tensor | Unnormed,
    weight: Tensor,
    bias: Tensor | None = None,
    may_split: bool = False,
    added: Tensor | None = None,
) -> Tensor:
    return _product(x, weight, bias, "", may_split, added)


@op
def linear_swiglu(x: Tensor | Unnormed, weight: Tensor) -> Tensor:
    """`silu(gate) * up` where `[gate; up] = x @ weight.T`: the gated MLP's first half.

    Gate and up are rounded to the dtype only where cuBLAS computes them.

    Args:
        x: as for `linear`.
        weight: `[2 * ffn, k]`.

    Returns:
        `[rows, ffn]`.
    """
    return swiglu.reference(linear.reference(x, weight))


@linear_swiglu.gpu
def linear_swiglu_gpu(x: Tensor | Unnormed, weight: Tensor) -> Tensor:
    return _product(x, weight, None, "swiglu", False)


@op
def linear_squared_relu(x: Tensor | Unnormed, weight: Tensor) -> Tensor:
    """`relu(x @ weight.T) ** 2`: the first half of an MLP without a gate (So et al. 2021).

    The product is rounded to the dtype only where cuBLAS computes it.

    Args:
        x: as for `linear`.
        weight: `[ffn, k]`.

    Returns:
        `[rows, ffn]`.
    """
    return squared_relu.reference(linear.reference(x, weight))


@linear_squared_relu.gpu
def linear_squared_relu_gpu(x: Tensor | Unnormed, weight: Tensor) -> Tensor:
    return _product(x, weight, None, "squared_relu", False)


@op
def linear_rope_append(
    x: Tensor | Unnormed, weight: Tensor, bias: Tensor | None, places: QkvPlaces
) -> Tensor:
    """`rope_append` of `linear`, in one kernel: a layer launches one kernel less.

    Only where `rotates_heads` of `skinny_plan` says so.

    Args:
        x: as for `linear`.
        weight: `[kv_heads * (group + 2) * dim, k]`, of `linear_qkv` in Megatron's order.
        bias: of as many elements, or None.
        places: where keys and values go, and what turns queries and keys.

    Returns:
        queries `[rows, kv_heads * group, dim]`, contiguous.
    """
    places.group(weight.size(0))
    mixed_qkv = linear.reference(x, weight, bias)
    rows = len(mixed_qkv)
    return rope_append.reference(
        mixed_qkv,
        places.cos,
        places.sin,
        places.position_ids[:rows],
        places.write_index[:rows],
        places.key_cache,
        places.value_cache,
    )


@linear_rope_append.gpu
def linear_rope_append_gpu(
    x: Tensor | Unnormed, weight: Tensor, bias: Tensor | None, places: QkvPlaces
) -> Tensor:
    return _product(x, weight, bias, "", False, places=places)


def _product(
    x: Tensor | Unnormed,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    may_split: bool,
    added: Tensor | None = None,
    places: QkvPlaces | None = None,
) -> Tensor:
    inputs = x.x if isinstance(x, Unnormed) else x
    norm = isinstance(x, Unnormed) and x.squares is None
    gated = activation == "swiglu"
    plan = plan_product(inputs, weight, gated, may_split and bias is None, norm)
    if isinstance(plan, OneRowPlan):
        return one_row_product(x, weight, bias, activation, plan, added, places)
    if places is not None and not isinstance(plan, ResidentPlan | WarpgroupPlan):
        raise ValueError(
            f"linear_rope_append: a product of {tuple(inputs.shape)} by {tuple(weight.shape)} "
            "rotates nothing: ask rotates_heads first."
        )
    if isinstance(plan, LongRowPlan):
        if isinstance(x, Unnormed):
            inputs, x.total = add_rms_norm_gpu(x.x, x.residual, x.weight, x.eps)
        return long_row_product(inputs, weight, bias, activation, plan, added)
    if added is not None:
        raise ValueError(
            f"skinny_linear: a product of {tuple(inputs.shape)} by {tuple(weight.shape)} adds "
            "nothing: ask adds_residual first."
        )
    if isinstance(plan, ResidentPlan):
        return resident_product(x, weight, bias, activation, plan, places)
    if isinstance(plan, WarpgroupPlan) and isinstance(x, Unnormed) and x.squares is not None:
        return warpgroup_product(x, weight, bias, activation, plan)
    if isinstance(x, Unnormed):
        if x.squares is not None:
            raise ValueError(
                f"skinny_linear: a product of {tuple(inputs.shape)} by {tuple(weight.shape)} does "
                "not take squares: ask takes_squares first."
            )
        inputs, x.total = add_rms_norm_gpu(x.x, x.residual, x.weight, x.eps)
    if isinstance(plan, WarpgroupPlan):
        return warpgroup_product(inputs, weight, bias, activation, plan, places)
    if isinstance(plan, StreamedPlan):
        return streamed_product(inputs, weight, bias, activation, plan)
    if isinstance(plan, TilePlan):
        return tile_product(inputs, weight, bias, activation, plan)
    product = F.linear(inputs, weight, bias)
    if not activation:
        return product
    return swiglu_gpu(product) if gated else squared_relu_gpu(product)
