"""The arithmetic of a tile of Mamba-2's scan, where its bits are the same in all kernels
(`replaying_rule`): a scan of chunks, a decode step's replay of the open tile, a flush.

A product of the matrix units adds 16 inputs at a time, in order, whatever the instruction and the
tile (docs/records/one_order.md). Decays add up as whole numbers, so in any order; no other sum over
threads rounds. What a multiplication gives is rounded before it is added to something, or is added
by `tl.fma`: else one kernel's compilation might fuse what another's does not. Tokens that do not
exist have zeros, and change no bits of those before them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.recurrent.kernel_parts import add_products, rounded


@triton.jit
def scores_of(c: tl.tensor, b: tl.tensor) -> tl.tensor:
    """C of queries by B of a tile's tokens, float32."""
    return tl.dot(c, tl.trans(b), input_precision="ieee")


@triton.jit
def weights_of(
    score: tl.tensor, dt: tl.tensor, decay: tl.tensor, here: tl.tensor, seen: tl.tensor
) -> tl.tensor:
    """What a query token's output takes of the x of a tile's tokens that it has `seen`, with its
    `scores_of` and its entry of `decay` in `here`; of any shape."""
    return score * tl.exp(tl.where(seen, here - decay, -float("inf"))) * dt


@triton.jit
def outputs_of(
    weight: tl.tensor,
    c: tl.tensor,
    x: tl.tensor,
    s: tl.tensor,
    left: tl.tensor,
    own: tl.tensor,
    through: tl.tensor,
) -> tl.tensor:
    """Outputs `[queries, lanes]` of tokens with such `weights_of` a tile's x, such C, their x in
    `own`, and what is `left` at them of the state `s`, `[d_state, lanes]`."""
    y = tl.dot(c, s.to(c.dtype), input_precision="ieee")
    y = tl.fma(y, left[:, None], rounded(own.to(tl.float32), through))
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
