"""RMSNorm with a gate: what a recurrent layer does before its output projection.

RMSNorm: Zhang and Sennrich 2019. Mamba-2 (Dao and Gu 2024) gates, then normalises groups of
channels; Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024) normalises each head, by one weight for
all, then gates. One program a group of a token, or a few heads of one, float32 between load and
store.
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
from megatron_async.ops.op import op, promising
from megatron_async.ops.recurrent.kernel_parts import silu

MAX_GROUP = 16384
"""A group, or a head, is held in the registers of one program."""
ELEMENTS = 2048
"""Elements of heads that a program processes, at least one head."""


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
@promising("invariant")
def gated_rms_norm_gpu(y: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    tokens, channels = y.shape
    if z.shape != y.shape or weight.shape != (channels,) or groups < 1 or channels % groups:
        raise ValueError(
            f"gated_rms_norm: y is {tuple(y.shape)}, so z must be like it, weight ({channels},) and"
            f" groups divide {channels}; found {tuple(z.shape)}, {tuple(weight.shape)}, {groups}."
        )
    size = channels // groups
    _check("gated_rms_norm", "group", size, y, z, weight)
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


@op
def gated_head_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each head of `o`, then gate it with silu(z).

    Args:
        o, z: `[tokens, heads * value_dim]`, as y and z of `gated_rms_norm`.
        weight: `[value_dim]`, for all heads.
        eps: added to the mean square.

    Returns:
        `[tokens, heads * value_dim]`, contiguous, dtype of `o`.

    Raises:
        ValueError: shapes do not match, elements are strided or a head is too long.
    """
    heads, size = _heads(o, z, weight), weight.numel()
    wide = torch.promote_types(o.dtype, torch.float32)
    normed = F.rms_norm(o.to(wide).unflatten(1, (heads, size)), (size,), weight.to(wide), eps)
    return (normed.flatten(1) * F.silu(z.to(wide))).to(o.dtype)


@gated_head_norm.gpu
@promising("invariant")
def gated_head_norm_gpu(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    heads = _heads(o, z, weight)
    tokens, size = o.size(0), weight.numel()
    _check("gated_head_norm", "head", size, o, z, weight)
    out = torch.empty(o.shape, dtype=o.dtype, device=o.device)
    if tokens:
        block = triton.next_power_of_2(size)
        tile = min(max(ELEMENTS // block, 1), triton.next_power_of_2(heads))
        _gated_head_norm_kernel[(tokens, triton.cdiv(heads, tile))](
            o,
            z,
            weight,
            out,
            o.stride(0),
            z.stride(0),
            eps,
            heads=heads,
            size=size,
            tile=tile,
            block=block,
            num_warps=min(max(tile * block // 512, 1), 16),
            **launch_options(o),
        )
    return out


@gated_head_norm.cpu
def gated_head_norm_cpu(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    size = weight.numel()
    fits = o.dim() == 2 and weight.dim() == 1 and size > 0 and o.size(1) % size == 0
    if not (fits and serves_gated(o, z, weight)):
        return gated_head_norm.reference(o, z, weight, eps)
    from megatron_async.ops.cpu import row_kernels

    (rows, channels), out = o.shape, torch.empty(o.shape, dtype=torch.float32)
    row_kernels.head_norm(
        o.data_ptr(), 4 * o.stride(0), z.data_ptr(), 4 * z.stride(0), weight.data_ptr(), rows,
        channels // size, size, np.float32(eps), out.data_ptr(),
    )  # fmt: skip
    return out


def _heads(o: Tensor, z: Tensor, weight: Tensor) -> int:
    if o.dim() != 2 or z.shape != o.shape or weight.dim() != 1 or o.size(1) % weight.numel():
        raise ValueError(
            f"gated_head_norm: o is {tuple(o.shape)}, so z must be like it, and weight one head of "
            f"its channels; found {tuple(z.shape)} and {tuple(weight.shape)}."
        )
    return o.size(1) // weight.numel()


def _check(op: str, part: str, size: int, y: Tensor, z: Tensor, weight: Tensor) -> None:
    """Refuse what a program cannot hold or read."""
    if size > MAX_GROUP:
        raise ValueError(
            f"{op}: a {part} of {size} channels is over {MAX_GROUP}, what one program holds: use "
            f"{op}.reference."
        )
    if y.stride(1) != 1 or z.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"{op}: elements of a row must be adjacent: call .contiguous().")


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


@triton.jit
def _gated_head_norm_kernel(
    o: tl.tensor,
    z: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    o_stride: tl.tensor,
    z_stride: tl.tensor,
    eps: tl.tensor,
    heads: tl.constexpr,
    size: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile + tl.arange(0, tile)
    local = tl.arange(0, block)
    channel = head[:, None] * size + local[None, :]
    inside = (head < heads)[:, None] & (local < size)[None, :]
    scale = tl.load(weight + local, mask=local < size, other=0.0).to(tl.float32)
    wait_for_previous(overlap)
    value = tl.load(o + token * o_stride + channel, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_stride + channel, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 1) / size + eps)
    value = value * factor[:, None] * scale[None, :] * silu(gate)
    tl.store(out + token * (heads * size) + channel, value, mask=inside)
