"""RMSNorm of each head, then a gate: what a Gated DeltaNet layer does before its output projection.

Gated DeltaNet: Yang, Kautz and Hatamizadeh 2024; RMSNorm: Zhang and Sennrich 2019. The norm comes
before the gate, and one weight serves all heads; Mamba-2's (`gated_rms_norm.py`) is the other way
round. One program a few heads of a token, float32 between load and store.
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

ELEMENTS = 2048
"""Elements that a program processes, at least one head."""
MAX_HEAD = 16384
"""A head is held in the registers of one program."""


@op
def gated_head_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each head of `o`, then gate it with silu(z).

    Args:
        o: `[tokens, heads * value_dim]`; bfloat16, float16 or float32 on a GPU; rows may be
            strided, elements not.
        z: like `o`: the gate, which may be a strip of in_proj's output.
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
def gated_head_norm_gpu(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    heads = _heads(o, z, weight)
    tokens, size = o.size(0), weight.numel()
    if size > MAX_HEAD:
        raise ValueError(
            f"gated_head_norm: a head of {size} channels is over {MAX_HEAD}, what one program "
            "holds: use gated_head_norm.reference."
        )
    if o.stride(1) != 1 or z.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("gated_head_norm: elements of a row must be adjacent: call .contiguous().")
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
