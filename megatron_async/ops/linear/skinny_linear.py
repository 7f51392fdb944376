"""Matrix products of decode steps: few rows, in the time of reading the weights.

cuBLAS does not use programmatic dependent launch, so memory idles before and after each of its
kernels. The kernels here load their first weights early (`ops/linear/skinny_kernels.py`), small
products all weights (`ops/linear/resident_kernel.py`). Products include the operations around them:
before, RMSNorm of one or few rows, with Mamba-2's gate; after, an MLP's activation. A larger
product with fewer outputs than fill the device is split along its inputs. The next kernel adds the
partial sums in order (`ops/linear/rms_norm.py`), so that results are the same in every run.

Where the rule in `ops/linear/skinny_plan.py` finds no plan, cuBLAS multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options
from megatron_async.ops.linear.resident_kernel import resident_kernel, segments_of
from megatron_async.ops.linear.rms_norm import add_rms_norm, add_rms_norm_reference
from megatron_async.ops.linear.skinny_kernels import one_row_kernel, tile_kernel
from megatron_async.ops.linear.skinny_plan import (
    OneRowPlan,
    ResidentPlan,
    TilePlan,
    plan_product,
)
from megatron_async.ops.linear.squared_relu import squared_relu, squared_relu_reference
from megatron_async.ops.linear.swiglu import swiglu, swiglu_reference
from megatron_async.ops.recurrent.gated_rms_norm import (
    gated_rms_norm,
    gated_rms_norm_reference,
)

Activation = Literal["", "swiglu", "squared_relu"]
"""The activation after a product."""


@dataclass
class Unnormed:
    """The input of a product before its residual add and RMSNorm: `add_rms_norm`'s arguments; or
    before its gate and RMSNorm, as in Mamba-2 (Dao and Gu 2024).

    Attributes:
        x: `[rows, k]`, elements of a row adjacent; of a layer with experts
            (`ops/experts/few_tokens.py`) contiguous, or partial sums of that, float32 `[parts,
            tokens, k]`, contiguous.
        residual: like `x`, without parts, or None.
        weight: `[k]`, the norm's.
        eps: added to the mean square.
        gate: like `x`, without parts: x is multiplied by its SiLU; None, or there is no residual.
        total: the new residual, once the product has been launched.
    """

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    eps: float
    gate: Tensor | None = None
    total: Tensor | None = None


def linear(
    x: Tensor | Unnormed, weight: Tensor, bias: Tensor | None = None, may_split: bool = False
) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: `[rows, k]` on a GPU, bfloat16, float16 or float32; or rows whose norm is to be taken
            first.
        weight: `[n, k]`, same dtype.
        bias: `[n]` or None.
        may_split: partial sums may be returned.

    Returns:
        `[rows, n]`; or partial sums `[splits, rows, n]`, float32, to be added in order.
    """
    return _product(x, weight, bias, "", may_split)


def linear_swiglu(x: Tensor | Unnormed, weight: Tensor) -> Tensor:
    """`silu(gate) * up` where `[gate; up] = x @ weight.T`: the gated MLP's first half.

    Gate and up are rounded to the dtype only where cuBLAS computes them.

    Args:
        x: as for `linear`.
        weight: `[2 * ffn, k]`.

    Returns:
        `[rows, ffn]`.
    """
    return _product(x, weight, None, "swiglu", False)


def linear_squared_relu(x: Tensor | Unnormed, weight: Tensor) -> Tensor:
    """`relu(x @ weight.T) ** 2`: the first half of an MLP without a gate (So et al. 2021).

    The product is rounded to the dtype only where cuBLAS computes it.

    Args:
        x: as for `linear`.
        weight: `[ffn, k]`.

    Returns:
        `[rows, ffn]`.
    """
    return _product(x, weight, None, "squared_relu", False)


def linear_reference(
    x: Tensor | Unnormed, weight: Tensor, bias: Tensor | None = None, may_split: bool = False
) -> Tensor:
    """`linear` in plain torch, unsplit."""
    if not isinstance(x, Unnormed):
        return F.linear(x, weight, bias)
    if x.gate is not None:
        return F.linear(gated_rms_norm_reference(x.x, x.gate, x.weight, 1, x.eps), weight, bias)
    normed, x.total = add_rms_norm_reference(x.x, x.residual, x.weight, x.eps)
    return F.linear(normed, weight, bias)


def linear_swiglu_reference(x: Tensor | Unnormed, weight: Tensor) -> Tensor:
    """`linear_swiglu` in plain torch."""
    return swiglu_reference(linear_reference(x, weight))


def linear_squared_relu_reference(x: Tensor | Unnormed, weight: Tensor) -> Tensor:
    """`linear_squared_relu` in plain torch."""
    return squared_relu_reference(linear_reference(x, weight))


def _product(
    x: Tensor | Unnormed,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    may_split: bool,
) -> Tensor:
    inputs = x.x if isinstance(x, Unnormed) else x
    norm = isinstance(x, Unnormed)
    gated = activation == "swiglu"
    plan = plan_product(inputs, weight, gated, may_split and bias is None, norm)
    if isinstance(x, Unnormed) and x.gate is not None and not isinstance(plan, ResidentPlan):
        x = inputs = gated_rms_norm(x.x, x.gate, x.weight, 1, x.eps)
    if isinstance(plan, OneRowPlan):
        return one_row_product(x, weight, bias, activation, plan)
    if isinstance(plan, ResidentPlan):
        return resident_product(x, weight, bias, activation, plan)
    if isinstance(x, Unnormed):
        inputs, x.total = add_rms_norm(x.x, x.residual, x.weight, x.eps)
    if isinstance(plan, TilePlan):
        return tile_product(inputs, weight, bias, activation, plan)
    product = F.linear(inputs, weight, bias)
    if not activation:
        return product
    return swiglu(product) if gated else squared_relu(product)


def one_row_product(
    x: Tensor | Unnormed,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    plan: OneRowPlan,
) -> Tensor:
    """`linear` of one row, or with the activation after it, by a given plan.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    norm = x if isinstance(x, Unnormed) else None
    row = x.x if isinstance(x, Unnormed) else x
    n = _outputs(row, weight, bias, activation)
    if row.size(0) != 1:
        raise ValueError(f"one_row_product: x has {row.size(0)} rows; use tile_product.")
    residual, total = _residual_and_total(x)
    out = torch.empty((1, n), dtype=row.dtype, device=row.device)
    one_row_kernel[(triton.cdiv(n, plan.block_n),)](
        row,
        residual,
        weight if norm is None else norm.weight,
        total,
        weight,
        weight if bias is None else bias,
        out,
        n,
        0.0 if norm is None else norm.eps,
        k=row.size(1),
        block_n=plan.block_n,
        block_k=plan.block_k,
        gated=activation == "swiglu",
        squared=activation == "squared_relu",
        has_norm=norm is not None,
        has_residual=norm is not None and norm.residual is not None,
        has_bias=bias is not None,
        ahead=plan.ahead,
        num_warps=plan.warps,
        **launch_options(row),
    )
    return out


def resident_product(
    x: Tensor | Unnormed,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    plan: ResidentPlan,
) -> Tensor:
    """`linear`, or with the activation after it, by a given plan; bfloat16, on a GPU.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    norm = x if isinstance(x, Unnormed) else None
    inputs = x.x if isinstance(x, Unnormed) else x
    n = _outputs(inputs, weight, bias, activation)
    if inputs.dtype != torch.bfloat16:
        raise ValueError(f"resident_product: x is {inputs.dtype}; use tile_product.")
    residual, total = _residual_and_total(x)
    gate = None if norm is None else norm.gate
    before = residual if gate is None else gate
    rows, k = inputs.shape
    out = torch.empty((rows, n), dtype=inputs.dtype, device=inputs.device)
    resident_kernel[(triton.cdiv(n, plan.block_n), triton.cdiv(rows, plan.block_m))](
        inputs,
        before,
        weight if norm is None else norm.weight,
        total,
        weight,
        weight if bias is None else bias,
        out,
        inputs.stride(0),
        before.stride(0),
        rows,
        n,
        0.0 if norm is None else norm.eps,
        k=k,
        segments=segments_of(k, plan.warps),
        warps=plan.warps,
        block_m=plan.block_m,
        block_n=plan.block_n,
        gated=activation == "swiglu",
        squared=activation == "squared_relu",
        has_norm=norm is not None,
        has_residual=norm is not None and norm.residual is not None,
        has_gate=gate is not None,
        has_bias=bias is not None,
        num_warps=plan.warps,
        **launch_options(inputs),
    )
    return out


def tile_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, plan: TilePlan
) -> Tensor:
    """`linear`, or with the activation after it, by a given plan; partial sums if it splits.

    Raises:
        ValueError: shapes, dtypes or strides do not fit; more rows than the plan's; a plan that
            splits what cannot be added up later.
    """
    n = _outputs(x, weight, bias, activation)
    rows = x.size(0)
    if rows > plan.block_m:
        raise ValueError(f"tile_product: x has {rows} rows, and the plan is for {plan.block_m}.")
    if plan.splits > 1 and (activation or bias is not None):
        raise ValueError("tile_product: partial sums can have neither bias nor activation.")
    if plan.splits > 1:
        out = torch.empty((plan.splits, rows, n), dtype=torch.float32, device=x.device)
    else:
        out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    tile_kernel[(triton.cdiv(n, plan.block_n), plan.splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        x.stride(0),
        rows,
        n,
        k=x.size(1),
        splits=plan.splits,
        block_m=plan.block_m,
        block_n=plan.block_n,
        block_k=plan.block_k,
        gated=activation == "swiglu",
        squared=activation == "squared_relu",
        has_bias=bias is not None,
        swap=plan.swap,
        ahead=plan.ahead,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **launch_options(x),
    )
    return out


def _residual_and_total(x: Tensor | Unnormed) -> tuple[Tensor, Tensor]:
    """The residual of an `Unnormed` and a place for the new one, which it is given; x where there
    is none. Raises on what would read the wrong memory."""
    if not isinstance(x, Unnormed):
        return x, x
    rows, weight = x.x, x.weight
    if weight.shape != rows.shape[1:] or not weight.is_contiguous():
        raise ValueError(
            f"skinny_linear: the norm's weight is {tuple(weight.shape)}, strides "
            f"{weight.stride()}; it must be ({rows.size(1)},), contiguous."
        )
    gate = x.gate
    if gate is not None and (
        gate.shape != rows.shape or gate.stride(1) != 1 or x.residual is not None
    ):
        raise ValueError(
            f"skinny_linear: gate is {tuple(gate.shape)}; it must be like x, {tuple(rows.shape)}, "
            "its elements adjacent, and there can be no residual beside it."
        )
    if x.residual is None:
        x.total = rows
        return rows, rows
    if x.residual.shape != rows.shape or x.residual.stride(1) != 1:
        raise ValueError(
            f"skinny_linear: residual is {tuple(x.residual.shape)}; it must be like x, "
            f"{tuple(rows.shape)}, its elements adjacent."
        )
    x.total = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    return x.residual, x.total


def _outputs(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> int:
    """Number of outputs; raises on what would read or write the wrong memory."""
    gated = activation == "swiglu"
    n = weight.size(0) // 2 if gated else weight.size(0)
    if x.dim() != 2 or weight.dim() != 2 or x.size(1) != weight.size(1):
        raise ValueError(
            f"skinny_linear: x must be [rows, k] and weight [outputs, k]; found {tuple(x.shape)} "
            f"and {tuple(weight.shape)}."
        )
    if x.dtype != weight.dtype or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"skinny_linear: x ({x.dtype}, strides {x.stride()}) and weight ({weight.dtype}, "
            f"strides {weight.stride()}) must have one dtype, the elements of a row of x be "
            "adjacent and weight be contiguous: call .contiguous()."
        )
    if gated and weight.size(0) % 2:
        raise ValueError(f"linear_swiglu: {weight.size(0)} weight rows are not [gate; up].")
    if bias is not None and (activation or bias.shape != (n,) or not bias.is_contiguous()):
        raise ValueError(
            f"linear: bias must be ({n},), without activation; found {tuple(bias.shape)}, "
            f"{activation!r}."
        )
    return n
