"""The arithmetic of a tile of Gated DeltaNet where its bits are the same in all kernels
(`replaying_rule`): a scan of chunks, a decode step's replay of the open tile, a flush.

The scan's equations (`delta_factors.py`), with tiles of 16 tokens: a decode step computes its tile
again, and the system to be solved in it is then one block of forward substitution. A product of the
matrix units adds 16 inputs at a time, in order, whatever the instruction and the tile
(docs/records/one_order.md). Decays add up as whole numbers, so in any order. No other sum over
threads rounds: each picks one number among zeros. A multiplication is rounded before its result is
added to something, or both are one `tl.fma`: else one kernel's compilation might fuse what
another's does not. Tokens that do not exist have zeros, and change no bits of those before them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.recurrent.kernel_parts import add_products, decays_of, rounded


@triton.jit
def factors_of(
    q: tl.tensor,
    k: tl.tensor,
    beta: tl.tensor,
    decay: tl.tensor,
    tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """T and P `[tile, tile]` of a tile (`delta_factors.py`), dtype of `k`."""
    at = tl.arange(0, tile)
    share = tl.where(at[:, None] >= at[None, :], decay[:, None] - decay[None, :], -float("inf"))
    share = tl.exp(share)
    p = tl.dot(q, tl.trans(k), input_precision="ieee") * share
    a = tl.dot(k, tl.trans(k), input_precision="ieee") * share * beta[:, None]
    x = (at[:, None] == at[None, :]).to(tl.float32)
    a = tl.where(at[:, None] > at[None, :], a, 0.0)
    for done in tl.static_range(tile - 1):
        # Row `done` is final: take it out of the ones below.
        part = tl.sum(tl.where((at == done)[None, :], a, 0.0), 1)
        final = tl.sum(tl.where((at == done)[:, None], x, 0.0), 0)
        x = tl.fma(-part[:, None], final[None, :], x)
    t = x * beta[None, :]
    return t.to(k.dtype), p.to(k.dtype)


@triton.jit
def pseudo_values_of(
    k: tl.tensor, v: tl.tensor, t: tl.tensor, decay: tl.tensor, held: tl.tensor
) -> tl.tensor:
    """Pseudo values `[tile, lanes]`, dtype of `k`; `held` is the state, in that dtype."""
    found = tl.dot(k, held, input_precision="ieee")
    right = tl.fma(-found, tl.exp(decay)[:, None], v.to(tl.float32))
    return tl.dot(t, right.to(k.dtype), input_precision="ieee").to(k.dtype)


@triton.jit
def outputs_of(
    q: tl.tensor, u: tl.tensor, p: tl.tensor, decay: tl.tensor, held: tl.tensor
) -> tl.tensor:
    """Outputs `[tile, lanes]`, float32."""
    o = tl.dot(q, held, input_precision="ieee")
    o = rounded(o, tl.exp(decay)[:, None])
    return tl.dot(p, u, o, input_precision="ieee")


@triton.jit
def advanced(
    s: tl.tensor, k: tl.tensor, u: tl.tensor, decay: tl.tensor, tile: tl.constexpr
) -> tl.tensor:
    """The state `[key_dim, lanes]` at the next border, float32."""
    total = tl.sum(tl.where(tl.arange(0, tile) == tile - 1, decay, 0.0), 0)
    added = rounded(u.to(tl.float32), tl.exp(total - decay)[:, None])
    return add_products(s * tl.exp(total), tl.trans(k), added, False)


@triton.jit
def moved(
    s: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    beta: tl.tensor,
    g: tl.tensor,
    tile: tl.constexpr,
) -> tl.tensor:
    """The state at the next border, of what the ring has of a whole tile."""
    decay = decays_of(g)
    t, _p = factors_of(k, k, beta, decay, tile)
    u = pseudo_values_of(k, v, t, decay, s.to(k.dtype))
    return advanced(s, k, u, decay, tile)
