"""Device functions that the kernels of recurrent layers share: arithmetic, and the convolution of
decode rows.

Kernels take a layer's pools, their `RowStrides` and its parameters as tuples with the fields of
these classes, and its shape as one constant: `shape.heads` in a kernel is a number. Counts, and
pointers that vary in how they are aligned, are arguments of their own, because Triton 3.6 knows
`do_not_specialize` and `do_not_specialize_on_alignment` of these only.

The convolution: four inputs make an output, the token's own and the three before, whose raw values
the pools keep by position. Kernels load the history before they wait for the layer's first product:
it is of earlier steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNIT = tl.constexpr(2.0**32)
"""Whole numbers in one natural logarithm of a decay."""


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    """Sigmoid linear unit, float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), float32, as exact for small results as for large ones.

    1 + u is rounded; what log makes of the rounded number, times u over what was really added, is
    log(1 + u) to the last place (a trick of the HP-15C's handbook). A dt of 1e-4 would else be
    wrong in its fourth digit.
    """
    u = tl.exp(-tl.abs(x))
    raised = 1.0 + u
    added = raised - 1.0
    log = tl.where(added == 0.0, u, tl.log(raised) * (u / tl.where(added == 0.0, 1.0, added)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def rounded(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    """A product, rounded before anything is added to it, in every kernel: a compiler may join a
    multiplication and an addition, but nothing to this."""
    return tl.fma(left, right, 0.0)


@triton.jit
def held(x: tl.tensor, overlap: tl.constexpr) -> tl.tensor:
    """`x`, of 16 bits. What another layout of it needs changes threads here, once, and not where
    what makes `x` was loaded, which Triton 3.6 prefers: each load would be waited for by itself."""
    if overlap:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)
    return x


@triton.jit
def decays_of(g: tl.tensor) -> tl.tensor:
    """Logarithms of what is left of the state at a tile's border after each of its tokens, of what
    each leaves; tokens are the first dimension. Whole numbers add up alike in any order."""
    return rounded(tl.cumsum((g * UNIT).to(tl.int64), 0).to(tl.float32), 1.0 / UNIT)


@triton.jit
def add_products(
    total: tl.tensor, left: tl.tensor, right: tl.tensor, is_exact: tl.constexpr
) -> tl.tensor:
    """`total + left @ right`, total and right float32; a `left` of 16 bits meets the two 16-bit
    parts of `right`, which is exact to 2^-17."""
    if is_exact:
        return tl.dot(left, right, total, input_precision="ieee")
    high = right.to(left.dtype)
    low = (right - high.to(tl.float32)).to(left.dtype)
    return tl.dot(left, high, tl.dot(left, low, total))


@triton.jit
def taps(
    conv_weight: tl.tensor, channel: tl.tensor, inside: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The convolution's four weights of some channels, the oldest input's first."""
    place = conv_weight + channel * 4
    weight_0 = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    weight_1 = tl.load(place + 1, mask=inside, other=0.0).to(tl.float32)
    weight_2 = tl.load(place + 2, mask=inside, other=0.0).to(tl.float32)
    weight_3 = tl.load(place + 3, mask=inside, other=0.0).to(tl.float32)
    return weight_0, weight_1, weight_2, weight_3


@triton.jit
def history(
    kept: tl.tensor,
    first: tl.tensor,
    inside: tl.tensor,
    conv_dim: tl.constexpr,
    conv_ring: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Raw inputs of the three tokens before; zeros before position 0."""
    place = kept + (tl.maximum(first - 3, 0) % conv_ring) * conv_dim
    input_0 = tl.load(place, mask=inside & (first >= 3), other=0.0).to(tl.float32)
    place = kept + (tl.maximum(first - 2, 0) % conv_ring) * conv_dim
    input_1 = tl.load(place, mask=inside & (first >= 2), other=0.0).to(tl.float32)
    place = kept + (tl.maximum(first - 1, 0) % conv_ring) * conv_dim
    input_2 = tl.load(place, mask=inside & (first >= 1), other=0.0).to(tl.float32)
    return input_0, input_1, input_2
