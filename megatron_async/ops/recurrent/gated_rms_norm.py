"""RMSNorm of groups of channels, behind a gate: what a Mamba-2 layer does before its output
projection.

Mamba-2: Dao and Gu 2024; RMSNorm: Zhang and Sennrich 2019. One program a group of a token, float32
between load and store.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.cpu.rows import serves_gated
from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.op import op
from megatron_async.ops.recurrent.recurrent_math import silu

MAX_GROUP = 16384
"""A group is held in the registers of one program."""


@op
def gated_rms_norm(y: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Gate `y` with silu(z), then normalise each group of channels.

    Args:
        y: `[tokens, channels]`; bfloat16, float16 or float32 on a GPU; rows may be strided,
            elements not.
        z: like `y`: the gate, which may be a strip of in_proj's output.
        weight: `[channels]`.
        groups: each channels / groups neighbours are normalised together.
        eps: added to the mean square.

    Returns:
        `[tokens, channels]`, contiguous, dtype of `y`.

    Raises:
        ValueError: shapes do not match, elements are strided or a group is too long.
    """
    gated = y.to(torch.float32) * F.silu(z.to(torch.float32))
    normed = F.rms_norm(gated.unflatten(1, (groups, -1)), (gated.size(1) // groups,), eps=eps)
    return (normed.flatten(1) * weight.to(torch.float32)).to(y.dtype)


@gated_rms_norm.gpu
def gated_rms_norm_gpu(y: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    tokens, channels = y.shape
    if z.shape != y.shape or weight.shape != (channels,) or groups < 1 or channels % groups:
        raise ValueError(
            f"gated_rms_norm: y is {tuple(y.shape)}, so z must be like it, weight ({channels},) and"
            f" groups divide {channels}; found {tuple(z.shape)}, {tuple(weight.shape)}, {groups}."
        )
    size = channels // groups
    if size > MAX_GROUP:
        raise ValueError(
            f"gated_rms_norm: a group of {size} channels is over {MAX_GROUP}, what one program "
            "holds: use gated_rms_norm.reference."
        )
    if y.stride(1) != 1 or z.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("gated_rms_norm: elements of a row must be adjacent: call .contiguous().")
    out = torch.empty((tokens, channels), dtype=y.dtype, device=y.device)
    if tokens:
        block = triton.next_power_of_2(size)
        _gated_rms_norm_kernel[(tokens, groups)](
            y,
            z,
            weight,
            out,
            y.stride(0),
            z.stride(0),
            eps,
            size=size,
            block=block,
            # Measured for one token alone (docs/records/hybrid.md, 2026-11-25).
            early=y.size(0) == 1,
            num_warps=min(max(block // 512, 1), 16),
            **launch_options(y),
        )
    return out


@gated_rms_norm.cpu
def gated_rms_norm_cpu(y: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    fits = y.dim() == 2 and groups > 0 and y.size(1) % groups == 0 and weight.shape == y.shape[1:]
    if not (fits and serves_gated(y, z, weight)):
        return gated_rms_norm.reference(y, z, weight, groups, eps)
    from megatron_async.ops.cpu import row_kernels

    (rows, channels), out = y.shape, torch.empty(y.shape, dtype=torch.float32)
    row_kernels.gated_norm(
        y.data_ptr(), 4 * y.stride(0), z.data_ptr(), 4 * z.stride(0), weight.data_ptr(), rows,
        groups, channels // groups, np.float32(eps), out.data_ptr(),
    )  # fmt: skip
    return out


@triton.jit
def _gated_rms_norm_kernel(
    y: tl.tensor,
    z: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    y_stride: tl.tensor,
    z_stride: tl.tensor,
    eps: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    local = tl.arange(0, block)
    inside = local < size
    channel = group * size + local
    scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(overlap, early)
    value = tl.load(y + token * y_stride + channel, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_stride + channel, mask=inside, other=0.0).to(tl.float32)
    value = value * silu(gate)
    factor = tl.rsqrt(tl.sum(value * value) / size + eps)
    place = out + token * (size * tl.num_programs(1)) + channel
    tl.store(place, value * factor * scale, mask=inside)
