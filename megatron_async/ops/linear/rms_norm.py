"""Fused residual add and RMSNorm: one kernel where the modules launch two or more.

RMSNorm: Zhang and Sennrich 2019. One program a row. The roundings are those of the modules it
replaces, so the result is theirs: the sum is rounded to the dtype (Megatron's `bias_dropout_add`),
and the norm of the rounded sum is computed in float32 and rounded once (`torch.nn.RMSNorm`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.cpu.rows import serves
from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.linear.quantised_weight import BLOCK
from megatron_async.ops.linear.rounded_rows import RoundedRows, new_rounded, round_blocks
from megatron_async.ops.linear.streamed import (
    ONE_WARPGROUP,
    STREAMED_FROM,
    STREAMED_INPUTS,
    STREAMED_ROWS,
)
from megatron_async.ops.op import op, promising

MAX_HIDDEN = 16384
"""A row is held in the registers of one program."""
PER_WARP = 512
"""Elements of a row that a warp takes."""
EARLY_WIDTH = 1024
"""Longest rows after whose norm the next product is let start before the norm's own wait, so that
its weights arrive while the kernel before the norm ends; of one row, whatever its length, and of
rows for a streamed product. The step of 64 rows of SmolLM2 takes 0.697 instead of 0.726 ms by it,
of Granite-4.0-H-350M 1.18 instead of 1.22, of Llama-3.1-8B 4.649 instead of 4.664; the step of
Llama-3.2-1B would take 1.092 instead of 1.082 (docs/records/products.md, 2026-11-25 and 27)."""
NOT_ROUNDED: dict[str, Any] = {
    "scales": None, "input_scale": None, "scale_stride": None, "has_scale": False,
}  # fmt: skip


@op
def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream and normalise the sum.

    Args:
        x: `[tokens, hidden]`, output of the previous block (of the embedding, for the first);
            bfloat16, float16 or float32 on a GPU; rows may be strided, elements not. Or that
            output's partial sums, float32 `[parts, tokens, hidden]`, contiguous: they are added in
            order and rounded to the residual's dtype, as a product would have been.
        residual: `[tokens, hidden]`, or None: `x` is the whole residual stream.
        weight: `[hidden]`, the norm's weight, in any dtype.
        eps: added to the mean square.

    Returns:
        normed `[tokens, hidden]`, and the new residual: `x + residual`, or `x` itself.

    Raises:
        ValueError: shapes do not match, elements are strided or the row is too long.
    """
    if x.dim() == 3:
        x = x.sum(0) if residual is None else x.sum(0).to(residual.dtype)
    total = x if residual is None else residual + x
    if weight.dtype == total.dtype:
        return F.rms_norm(total, weight.shape, weight, eps), total
    return F.rms_norm(total.to(weight.dtype), weight.shape, weight, eps).to(total.dtype), total


@add_rms_norm.gpu
@promising("invariant")
def add_rms_norm_gpu(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    tokens, hidden = x.shape[-2:]
    dtype = x.dtype if residual is None else residual.dtype
    normed = torch.empty((tokens, hidden), dtype=dtype, device=x.device)
    total = _add_rms_norm(x, residual, weight, eps, normed, {})
    return normed, total


def add_rms_norm_rounded(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    input_scale: Tensor | None,
    multiple: int,
) -> tuple[RoundedRows, Tensor]:
    """`add_rms_norm` on a GPU, and the normed rows rounded as by `round_rows`."""
    tokens, hidden = x.shape[-2:]
    if hidden % BLOCK:
        raise ValueError(f"add_rms_norm_rounded: {hidden} elements are not blocks of {BLOCK}.")
    rows = new_rounded(tokens, hidden, x.device, multiple)
    scales = {
        "scales": rows.scales,
        "input_scale": rows.scales if input_scale is None else input_scale,
        "scale_stride": rows.scales.size(1),
        "has_scale": input_scale is not None,
    }
    return rows, _add_rms_norm(x, residual, weight, eps, rows.codes, scales)


def _add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    normed: Tensor,
    rounding: dict[str, Any],
) -> Tensor:
    """Launch the kernel, which writes to `normed`; gives the new residual."""
    parts = x.size(0) if x.dim() == 3 else 1
    if parts > 1 and (residual is None or x.dtype != torch.float32 or not x.is_contiguous()):
        raise ValueError(
            "add_rms_norm: partial sums must be float32, contiguous and have a residual; found "
            f"{x.dtype}, strides {x.stride()}, residual {residual is not None}."
        )
    part_stride = x.stride(0) if x.dim() == 3 else 0
    x = x[0] if x.dim() == 3 else x
    tokens, hidden = x.shape
    if hidden > MAX_HIDDEN:
        raise ValueError(
            f"add_rms_norm: hidden size {hidden} is over {MAX_HIDDEN}, what one program holds: "
            "use add_rms_norm.reference."
        )
    if weight.shape != (hidden,) or (residual is not None and residual.shape != x.shape):
        found = None if residual is None else tuple(residual.shape)
        raise ValueError(
            f"add_rms_norm: x is {tuple(x.shape)}, so weight must be ({hidden},) and residual like "
            f"x; found {tuple(weight.shape)} and {found}."
        )
    if x.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("add_rms_norm: elements of a row must be adjacent: call .contiguous().")
    total = x
    if residual is not None:
        total = torch.empty((tokens, hidden), dtype=residual.dtype, device=x.device)
    if tokens:
        block = triton.next_power_of_2(hidden)
        _add_rms_norm_kernel[(tokens,)](
            x,
            residual if residual is not None else x,
            weight,
            normed,
            total,
            x.stride(0),
            part_stride,
            residual.stride(0) if residual is not None else 0,
            eps,
            hidden=hidden,
            block=block,
            has_residual=residual is not None,
            parts=parts,
            early=tokens == 1
            or hidden <= EARLY_WIDTH
            or _is_streamed(tokens, hidden, bool(rounding)),
            num_warps=norm_warps(block),
            **(NOT_ROUNDED | rounding),
            **launch_options(x),
        )
    return total


@add_rms_norm.cpu
def add_rms_norm_cpu(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if x.dim() != 2 or not serves(x, residual, weight):
        return add_rms_norm.reference(x, residual, weight, eps)
    from megatron_async.ops.cpu import row_kernels

    normed, (rows, hidden) = torch.empty_like(x), x.shape
    if residual is None:
        row_kernels.norm(
            x.data_ptr(), weight.data_ptr(), rows, hidden, np.float32(eps), normed.data_ptr()
        )
        return normed, x
    total = torch.empty_like(x)
    row_kernels.add_norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), rows, hidden, np.float32(eps),
        normed.data_ptr(), total.data_ptr(),
    )  # fmt: skip
    return normed, total


def norm_warps(block: int) -> int:
    """Warps of a program that takes `block` elements; by their layout a row is summed."""
    return min(max(block // PER_WARP, 1), 16)


def _is_streamed(tokens: int, hidden: int, is_rounded: bool) -> bool:
    """Whether products of such rows ask for their first weights before they wait, all at once."""
    if is_rounded:
        return tokens <= STREAMED_ROWS
    return STREAMED_FROM <= tokens <= ONE_WARPGROUP and hidden >= STREAMED_INPUTS


@triton.jit
def norm_factor(value: tl.tensor, hidden: tl.constexpr, eps: tl.tensor) -> tl.tensor:
    """What a whole row, float32, is multiplied by."""
    return tl.rsqrt(tl.sum(value * value) / hidden + eps)


@triton.jit
def _add_rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    x_stride: tl.tensor,
    part_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    hidden: tl.constexpr,
    block: tl.constexpr,
    has_residual: tl.constexpr,
    parts: tl.constexpr,
    early: tl.constexpr,
    overlap: tl.constexpr,
    scales: tl.tensor | None,
    input_scale: tl.tensor | None,
    scale_stride: tl.tensor | None,
    has_scale: tl.constexpr,
) -> None:
    """Sum and norm of one row, which is rounded to FP8 if there are `scales`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < hidden
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(overlap, early)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if parts > 1:
        for part in tl.static_range(1, parts):
            place = part * part_stride + row * x_stride + column
            value += tl.load(x + place, mask=inside, other=0.0)
        value = value.to(total.dtype.element_ty).to(tl.float32)
    if has_residual:
        before = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        rounded = (before.to(tl.float32) + value).to(total.dtype.element_ty)
        tl.store(total + row * hidden + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    factor = norm_factor(value, hidden, eps)
    value = value * factor * scale
    if scales is None:
        tl.store(normed + row * hidden + column, value, mask=inside)
    else:
        value = value.to(total.dtype.element_ty).to(tl.float32)
        numbers, row_scales = round_blocks(
            tl.reshape(value, [block // 128, 128]), input_scale, has_scale
        )
        place = tl.arange(0, block // 128)
        column = place[:, None] * 128 + tl.arange(0, 128)[None, :]
        tl.store(normed + row * hidden + column, numbers, mask=column < hidden)
        place = place.to(tl.int64) * scale_stride + row
        tl.store(scales + place, row_scales, mask=tl.arange(0, block // 128) * 128 < hidden)
