"""Squared ReLU (So et al. 2021, Primer): the activation of MLPs without a gate, in one kernel.

Computed in float32 and rounded once, as the reference is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.op import op

BLOCK = 1024
WARPS = 4


@op
def squared_relu(x: Tensor) -> Tensor:
    """`max(x, 0) ** 2`.

    Args:
        x: `[tokens, ffn]` of bfloat16, float16 or float32 on a GPU; rows may be strided, elements
            not.

    Returns:
        `[tokens, ffn]`, contiguous, same dtype.

    Raises:
        ValueError: strided elements.
    """
    return x.to(torch.float32).relu().square().to(x.dtype)


@squared_relu.gpu
def squared_relu_gpu(x: Tensor) -> Tensor:
    tokens, ffn = x.shape
    if x.stride(1) != 1:
        raise ValueError(
            f"squared_relu: elements of a row must be adjacent; x is {tuple(x.shape)} with strides "
            f"{x.stride()}: call .contiguous()."
        )
    out = torch.empty((tokens, ffn), dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (tokens, triton.cdiv(ffn, BLOCK))
        _squared_relu_kernel[grid](
            x, out, x.stride(0), ffn=ffn, block=BLOCK, num_warps=WARPS, **launch_options(x)
        )
    return out


@triton.jit
def _squared_relu_kernel(
    x: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    ffn: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < ffn
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.maximum(value, 0.0)
    tl.store(out + row * ffn + column, value * value, mask=inside)
