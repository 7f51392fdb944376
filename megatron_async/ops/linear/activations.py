"""Activations of an MLP's first projection, each in one kernel: SwiGLU and its relatives (Shazeer
2020) and, without a gate, squared ReLU (So et al. 2021, Primer).

Computed in float32 and rounded once, as Megatron's fused kernels do (`bias_activation_fusion`).
Unfused SwiGLU rounds twice in a 16-bit dtype (silu to the dtype, then the product), so the two may
differ by one unit in the last place.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.cpu.rows import serves
from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.op import op, promising

BLOCK = 1024
WARPS = 4
QUICK_GELU = tl.constexpr(1.702)
"""GELU is about x * sigmoid(1.702 x) (Hendrycks and Gimpel 2016)."""
GELU_SCALE, GELU_CUBE = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)
"""GELU by tanh of the same paper: x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))."""


class Gating(NamedTuple):
    """A gated linear unit: `function(gate) * (up + offset)`.

    Attributes:
        function: "silu" (SwiGLU), "quick_gelu" or "fast_gelu" (by tanh), Megatron's names.
        clamp: `gate` is at most this, and `up` between this and its negative; 0: there is no bound.
        offset: added to `up`.
    """

    function: Literal["silu", "quick_gelu", "fast_gelu"] = "silu"
    clamp: float = 0.0
    offset: float = 0.0

    def of(self, gate: Tensor, up: Tensor) -> Tensor:
        """The unit of float32 tensors of one shape, in plain torch."""
        if self.clamp:
            gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
        if self.function == "silu":
            gate = F.silu(gate)
        elif self.function == "quick_gelu":
            gate = gate * torch.sigmoid(QUICK_GELU.value * gate)
        else:
            gate = F.gelu(gate, approximate="tanh")
        return gate * (up + self.offset)


SWIGLU = Gating()


@op
def swiglu(x: Tensor, gating: Gating = SWIGLU) -> Tensor:
    """`silu(first half) * second half` of every row, or another gated unit of both halves.

    Args:
        x: `[tokens, 2 * ffn]` = [gate; up], as `linear_fc1` writes it; bfloat16, float16 or
            float32 on a GPU; rows may be strided, elements not.
        gating: the unit.

    Returns:
        `[tokens, ffn]`, same dtype.

    Raises:
        ValueError: the rows have an odd length or strided elements.
    """
    gate, up = x.to(torch.float32).chunk(2, dim=-1)
    return gating.of(gate, up).to(x.dtype)


@swiglu.gpu
@promising("invariant")
def swiglu_gpu(x: Tensor, gating: Gating = SWIGLU) -> Tensor:
    width = x.size(1)
    if width % 2 or x.stride(1) != 1:
        raise ValueError(
            f"swiglu: rows must be [gate; up] of one even, adjacent length; x is {tuple(x.shape)} "
            f"with strides {x.stride()}: pass the projection's output, or call .contiguous()."
        )
    return _launched(_swiglu_kernel, x, width // 2, gating=gating)


@swiglu.cpu
def swiglu_cpu(x: Tensor, gating: Gating = SWIGLU) -> Tensor:
    if gating != SWIGLU or not serves(x):
        return swiglu.reference(x, gating)
    from megatron_async.ops.cpu import row_kernels

    rows, width = x.size(0), x.size(1) // 2
    out = torch.empty((rows, width), dtype=torch.float32)
    row_kernels.swiglu(x.data_ptr(), rows, width, out.data_ptr())
    return out


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
@promising("invariant")
def squared_relu_gpu(x: Tensor) -> Tensor:
    ffn = x.size(1)
    if x.stride(1) != 1:
        raise ValueError(
            f"squared_relu: elements of a row must be adjacent; x is {tuple(x.shape)} with strides "
            f"{x.stride()}: call .contiguous()."
        )
    return _launched(_squared_relu_kernel, x, ffn)


def _launched(kernel: Any, x: Tensor, ffn: int, **constants: Any) -> Tensor:
    """`[tokens, ffn]` of rows `x`, by a kernel of this file."""
    out = torch.empty((x.size(0), ffn), dtype=x.dtype, device=x.device)
    if out.numel():
        kernel[(x.size(0), triton.cdiv(ffn, BLOCK))](
            x, out, x.stride(0), ffn=ffn, block=BLOCK, **constants, num_warps=WARPS,
            **launch_options(x),
        )  # fmt: skip
    return out


@triton.jit
def round_to(value: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """A float32 value as `dtype` holds it."""
    return value.to(dtype).to(tl.float32)


@triton.jit
def rounded_product(a: tl.tensor, b: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """`a * b`, float32, as `dtype` holds it. Of `*` the compiler would make a product in `dtype`
    (exact, as both are rounded), and of that and a sum behind it one operation with one rounding.
    """
    return round_to(tl.fma(a, b, 0.0), dtype)


@triton.jit
def gated_by(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """SwiGLU of float32 values: one function for all kernels that must round alike."""
    return gate * tl.sigmoid(gate) * up


@triton.jit
def unit_of(gate: tl.tensor, up: tl.tensor, gating: tl.constexpr) -> tl.tensor:
    """`Gating.of` of float32 values."""
    if gating.clamp > 0:
        gate = tl.minimum(gate, gating.clamp)
        up = tl.minimum(tl.maximum(up, -gating.clamp), gating.clamp)
    if gating.offset != 0:
        up = up + gating.offset
    if gating.function == "silu":
        unit = gated_by(gate, up)
    elif gating.function == "quick_gelu":
        unit = gate * tl.sigmoid(QUICK_GELU * gate) * up
    else:
        unit = gate * tl.sigmoid(GELU_SCALE * (gate + GELU_CUBE * gate * gate * gate)) * up
    return unit


@triton.jit
def squared_relu_of(value: tl.tensor) -> tl.tensor:
    """Squared ReLU of float32 values."""
    value = tl.maximum(value, 0.0)
    return value * value


@triton.jit
def _swiglu_kernel(
    x: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    ffn: tl.constexpr,
    block: tl.constexpr,
    gating: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < ffn
    start = x + row * x_stride + column
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + ffn, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * ffn + column, unit_of(gate, up, gating), mask=inside)


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
    tl.store(out + row * ffn + column, squared_relu_of(value), mask=inside)


@triton.jit
def narrow(x: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """Numbers as a cache of e4m3 stores them (`ops/attention/narrow_cache.py`), of one over their
    scale. NaN stays NaN."""
    scaled = x.to(tl.float32) * inverse
    scaled = tl.maximum(scaled, -448.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(scaled, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
