"""Functions of a number that the kernels of recurrent layers share."""

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
