"""The arithmetic of a tile of Mamba-2's scan, where its bits are the same in all kernels
(`replaying_rule`): a scan of chunks, a decode step's replay of the open tile, a flush.

A product of the matrix units adds 16 inputs at a time, in order, whatever the instruction and the
tile (docs/records/one_order.md). No sum over threads but `tl.cumsum` of one vector rounds: its
layout is the same wherever it is called. What a multiplication gives is rounded before it is added
to something, or is added by `tl.fma`: else one kernel's compilation might fuse what another's does
not. Tokens that do not exist have zeros, and change no bits of those before them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.recurrent.kernel_parts import add_products, rounded


@triton.jit
def decays_of(dt: tl.tensor, rate: tl.tensor) -> tl.tensor:
    """Logarithms of what each token of a tile leaves of the state at the tile's border."""
    return tl.cumsum(rounded(dt, rate), 0)


@triton.jit
def scores_of(c: tl.tensor, b: tl.tensor) -> tl.tensor:
    """C of queries by B of a tile's tokens, float32."""
    return tl.dot(c, tl.trans(b), input_precision="ieee")


@triton.jit
def outputs_of(
    score: tl.tensor,
    c: tl.tensor,
    x: tl.tensor,
    dt: tl.tensor,
    s: tl.tensor,
    decay: tl.tensor,
    here: tl.tensor,
    seen: tl.tensor,
    own: tl.tensor,
    through: tl.tensor,
) -> tl.tensor:
    """Outputs `[queries, lanes]` of tokens that see, each, those of the tile for which `seen`; with
    their `scores_of`, their C, their entries of `decay` in `here`, and their x in `own`. `s`:
    `[d_state, lanes]`."""
    share_of = tl.where(seen, here[:, None] - decay[None, :], -float("inf"))
    weight = score * tl.exp(share_of) * dt[None, :]
    y = tl.dot(c, s.to(c.dtype), input_precision="ieee")
    y = tl.fma(y, tl.exp(here)[:, None], rounded(own.to(tl.float32), through))
    return tl.dot(weight.to(x.dtype), x, y, input_precision="ieee")


@triton.jit
def advanced(
    s: tl.tensor,
    x: tl.tensor,
    b: tl.tensor,
    dt: tl.tensor,
    decay: tl.tensor,
    tile: tl.constexpr,
    is_exact: tl.constexpr,
) -> tl.tensor:
    """The state `[d_state, lanes]` at the next border."""
    # One entry and zeros: exact in any order.
    total = tl.sum(tl.where(tl.arange(0, tile) == tile - 1, decay, 0.0), 0)
    weight = tl.exp(total - decay) * dt
    added = rounded(x.to(tl.float32), weight[:, None])
    return add_products(s * tl.exp(total), tl.trans(b), added, is_exact)
