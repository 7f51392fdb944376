"""Launches of the kernels for products of few rows, each by a given plan.

`ops/linear/skinny_linear.py` chooses the plan; tests and benchmarks give their own.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options
from megatron_async.ops.linear.long_row_kernel import long_row_kernel
from megatron_async.ops.linear.qkv_places import (
    QkvPlaces,
    check_places,
    new_outputs,
    place_arguments,
    place_constants,
)
from megatron_async.ops.linear.resident_kernel import resident_kernel, segments_of
from megatron_async.ops.linear.row_tiles import TILE_BYTES
from megatron_async.ops.linear.skinny_kernels import one_row_kernel, tile_kernel
from megatron_async.ops.linear.skinny_plan import (
    LONG_ROW_REGISTERS,
    LongRowPlan,
    OneRowPlan,
    ResidentPlan,
    TilePlan,
    may_be_copied,
)
from megatron_async.ops.linear.unnormed import Unnormed
from megatron_async.ops.linear.warpgroup_kernel import chunks_of, pairs_of, warpgroup_kernel
from megatron_async.ops.linear.warpgroup_plan import WarpgroupPlan

Activation = Literal["", "swiglu", "squared_relu"]
"""The activation after a product."""


def one_row_product(
    x: Tensor | Unnormed,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    plan: OneRowPlan,
    added: Tensor | None = None,
    places: QkvPlaces | None = None,
) -> Tensor:
    """`linear` of one row, or with the activation after it, by a given plan.

    `added`, `[1, outputs]`, is added to the rounded outputs. With `places`, `linear_rope_append`.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    norm = x if isinstance(x, Unnormed) else None
    row = x.x if isinstance(x, Unnormed) else x
    n = outputs_of(row, weight, bias, activation)
    if row.size(0) != 1:
        raise ValueError(f"one_row_product: x has {row.size(0)} rows; use tile_product.")
    residual, total = _residual_and_total(x)
    squares, parts = _squares(x, activation)
    _check_added(added, n, row)
    check_places(places, plan.block_n, activation, parts)
    out = new_outputs(places, 1, n, row)
    one_row_kernel[(triton.cdiv(n, plan.block_n),)](
        row,
        residual,
        weight if norm is None else norm.weight,
        total,
        weight,
        weight if bias is None else bias,
        squares,
        row if added is None else added,
        *place_arguments(places, n, row),
        out,
        n,
        0.0 if norm is None else norm.eps,
        k=row.size(1),
        block_n=plan.block_n // 2 if places else plan.block_n,
        block_k=plan.block_k,
        **place_constants(places, n),
        parts=parts,
        block_parts=triton.next_power_of_2(parts),
        gated=activation == "swiglu",
        squared=activation == "squared_relu",
        has_norm=norm is not None and not parts,
        has_residual=norm is not None and norm.residual is not None,
        has_bias=bias is not None,
        has_added=added is not None,
        ahead=plan.ahead,
        num_warps=plan.warps,
        **launch_options(row),
    )
    return out


def long_row_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    plan: LongRowPlan,
    added: Tensor | None = None,
) -> Tensor:
    """`linear` of one row, or with the activation after it, by a given plan.

    `added`, `[1, outputs]`, is added to the rounded outputs.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    n = outputs_of(x, weight, bias, activation)
    _check_added(added, n, x)
    if x.size(0) != 1:
        raise ValueError(f"long_row_product: x has {x.size(0)} rows; use tile_product.")
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    long_row_kernel[(triton.cdiv(n, plan.block_n * plan.turns),)](
        x,
        weight,
        weight if bias is None else bias,
        x if added is None else added,
        out,
        n,
        k=x.size(1),
        block_n=plan.block_n,
        block_k=TILE_BYTES // x.itemsize,
        depth=plan.depth,
        turns=plan.turns,
        gated=activation == "swiglu",
        squared=activation == "squared_relu",
        has_bias=bias is not None,
        has_residual=added is not None,
        num_warps=plan.warps,
        maxnreg=LONG_ROW_REGISTERS,
        **launch_options(x),
    )
    return out


def resident_product(
    x: Tensor | Unnormed,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    plan: ResidentPlan,
    places: QkvPlaces | None = None,
) -> Tensor:
    """`linear`, or with the activation after it, by a given plan; bfloat16, on a GPU.

    With `places`, `linear_rope_append`.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    norm = x if isinstance(x, Unnormed) else None
    inputs = x.x if isinstance(x, Unnormed) else x
    n = outputs_of(inputs, weight, bias, activation)
    if inputs.dtype != torch.bfloat16:
        raise ValueError(f"resident_product: x is {inputs.dtype}; use tile_product.")
    residual, total = _residual_and_total(x)
    squares, parts = _squares(x, activation)
    rows, k = inputs.shape
    check_places(places, plan.block_n, activation, parts)
    out = new_outputs(places, rows, n, inputs)
    resident_kernel[(triton.cdiv(n, plan.block_n), triton.cdiv(rows, plan.block_m))](
        inputs,
        residual,
        weight if norm is None else norm.weight,
        total,
        weight,
        weight if bias is None else bias,
        squares,
        *place_arguments(places, n, inputs),
        out,
        inputs.stride(0),
        residual.stride(0),
        rows,
        n,
        0.0 if norm is None else norm.eps,
        k=k,
        segments=segments_of(k, plan.warps),
        warps=plan.warps,
        block_m=plan.block_m,
        block_n=plan.block_n,
        **place_constants(places, n),
        gated=activation == "swiglu",
        squared=activation == "squared_relu",
        has_norm=norm is not None and not parts,
        has_residual=norm is not None and norm.residual is not None,
        parts=parts,
        block_parts=triton.next_power_of_2(parts),
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
    n = outputs_of(x, weight, bias, activation)
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


def warpgroup_product(
    x: Tensor | Unnormed,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    plan: WarpgroupPlan,
    places: QkvPlaces | None = None,
) -> Tensor:
    """`linear`, or with the activation after it, by a given plan; partial sums if it splits;
    bfloat16 or float16, on a GPU with warpgroups (Hopper). With `places`, `linear_rope_append`.

    An `Unnormed` must have squares, of one group.

    Raises:
        ValueError: shapes, dtypes, strides or alignment do not fit; a plan that splits what cannot
            be added up later.
    """
    squares, parts = _squares(x, activation)
    eps = 0.0
    if isinstance(x, Unnormed):
        eps, x = x.eps, x.x
    n = outputs_of(x, weight, bias, activation)
    rows, k = x.shape
    if x.itemsize != 2:
        raise ValueError(f"warpgroup_product: x is {x.dtype}; it is for 16-bit numbers.")
    if not may_be_copied(x) or not may_be_copied(weight):
        raise ValueError(
            "warpgroup_product: rows of x and weight must begin at multiples of 16 bytes; found "
            f"strides {x.stride()} and {weight.stride()}."
        )
    if plan.splits > 1 and (activation or bias is not None or places):
        raise ValueError("warpgroup_product: partial sums can have neither bias nor activation.")
    check_places(places, plan.block_n, activation, parts)
    if plan.splits > 1:
        out = torch.empty((plan.splits, rows, n), dtype=torch.float32, device=x.device)
    else:
        out = new_outputs(places, rows, n, x)
    if places is None:
        weight_chunks = chunks_of(weight, plan.block_n, plan.chunk)
    else:
        weight_chunks = pairs_of(weight, places.dim, plan.block_n // 2, plan.chunk)
    grid = (triton.cdiv(n, plan.block_n), plan.splits, triton.cdiv(rows, plan.block_m))
    warpgroup_kernel[grid](
        chunks_of(x, plan.block_m, plan.chunk),
        weight_chunks,
        weight if bias is None else bias,
        squares,
        *place_arguments(places, n, x),
        out,
        rows,
        n,
        k,
        eps,
        chunks=plan.chunks,
        ring=plan.ring,
        **place_constants(places, n),
        gated=activation == "swiglu",
        squared=activation == "squared_relu",
        parts=parts,
        block_parts=triton.next_power_of_2(parts),
        has_bias=bias is not None,
        num_warps=plan.block_m // 16,
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


def _squares(x: Tensor | Unnormed, activation: Activation) -> tuple[Tensor, int]:
    """Sums of squares, and the parts of a row's; x and 0 where there are none. Raises on what would
    read the wrong memory."""
    if not isinstance(x, Unnormed):
        return x, 0
    squares, rows = x.squares, x.x
    if squares is None:
        return rows, 0
    fits = squares.dim() == 3 and squares.shape[:2] == (rows.size(0), 1) and squares.is_contiguous()
    if not fits or squares.dtype != torch.float32 or x.residual is not None or activation:
        raise ValueError(
            f"skinny_linear: squares must be float32 [{rows.size(0)}, 1, parts], contiguous, "
            "without a residual or an activation; found "
            f"{squares.dtype} {tuple(squares.shape)}, residual {x.residual is not None}, "
            f"activation {activation!r}."
        )
    return squares, squares.size(2)


def _check_added(added: Tensor | None, n: int, row: Tensor) -> None:
    if added is None:
        return
    if added.shape != (1, n) or added.dtype != row.dtype or added.stride(1) != 1:
        raise ValueError(
            f"skinny_linear: what is added must be (1, {n}) of {row.dtype}, its elements adjacent; "
            f"found {tuple(added.shape)} of {added.dtype}, strides {added.stride()}."
        )


def outputs_of(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> int:
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
