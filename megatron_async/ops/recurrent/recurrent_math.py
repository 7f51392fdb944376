"""Arithmetic that the kernels of recurrent layers share."""

from __future__ import annotations

import triton
import triton.language as tl


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
def add_products(
    total: tl.tensor, left: tl.tensor, right: tl.tensor, is_exact: tl.constexpr
) -> tl.tensor:
    """`total + left @ right`, total and right float32.

    A `left` of 16 bits is multiplied by the two 16-bit parts of `right`, which is exact to 2^-17.
    """
    if is_exact:
        return tl.dot(left, right, total, input_precision="ieee")
    high = right.to(left.dtype)
    low = (right - high.to(tl.float32)).to(left.dtype)
    return tl.dot(left, high, tl.dot(left, low, total))
