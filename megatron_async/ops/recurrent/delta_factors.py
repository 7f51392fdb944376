"""What the scan of prefill chunks needs of each tile of tokens, and no state has a part in.

In a tile, with G the running sum of g, the pseudo values solve (I + A) u = beta (v - exp(G) S k),
where A_ij = beta_i exp(G_i - G_j) k_i.k_j below the diagonal (the "UT transform" of Yang et al.
2024, arXiv:2406.06484), and outputs are exp(G) S q + P u, where P_ij = exp(G_i - G_j) q_i.k_j up to
the diagonal. One program a tile and value head makes T = (I + A)^-1 diag(beta) and P. So the scan
multiplies by T and P, and subtracts what the state holds before it rounds: the usual other way,
T v and T (exp(G) k) made here, rounds both before they are subtracted.

The inverse: blocks of 16 by forward substitution, as stable as solving; then pairs of blocks by
[[X, 0], [L, Y]]^-1 = [[X^-1, 0], [-Y^-1 L X^-1, Y^-1]]. (A product of powers of A would need no
substitution, but its terms reach 10^17 at 64 equal keys, and cancel.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.recurrent.delta_pools import DeltaShape
from megatron_async.ops.recurrent.prefill_parts import scan_chunks_before
from megatron_async.ops.recurrent.recurrent_pools import PrefillRows

BLOCK = tl.constexpr(16)
"""Size of the blocks that forward substitution inverts."""


def tile_factors(
    qkv: Tensor, gates: Tensor, rows: PrefillRows, shape: DeltaShape, tile: int
) -> Tensor:
    """T and P of all tiles, `[tokens, value heads, 2, tile]`, dtype of `qkv`; nothing is written
    for padding. `gates` are beta and g, float32 `[2, value heads, tokens]`. Tiles of 16, 32 or 64
    tokens begin at multiples of that in a request's own positions."""
    tokens, chunks = qkv.size(0), rows.write_rows.numel()
    factors = torch.empty((tokens, shape.value_heads, 2, tile), dtype=qkv.dtype, device=qkv.device)
    # A chunk of n tokens reaches into (n - 2) / tile + 2 tiles at the most, and into n.
    tiles = min(tokens, tokens // tile + 2 * chunks)
    _factors_kernel[(tiles, shape.value_heads)](
        qkv,
        gates,
        tokens,
        rows.starts,
        rows.first_positions,
        chunks,
        factors,
        shape=shape,
        tile=tile,
        chunks_tile=max(triton.next_power_of_2(chunks), 16),
        num_warps=4,
        num_stages=1,
        **launch_options(qkv),
    )
    return factors


@triton.jit
def _join_pairs(a: tl.tensor, x: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """Inverses of I + a's blocks of twice `size` along the diagonal, from those of `size` in x."""
    at = tl.arange(0, a.shape[0])
    is_pair = (at[:, None] // (2 * size)) == (at[None, :] // (2 * size))
    is_below = is_pair & ((at[:, None] // size) != (at[None, :] // size))
    below = tl.dot(tl.where(is_below, a, 0.0), x, input_precision="tf32x3")
    return x - tl.dot(x, below, input_precision="tf32x3")


@triton.jit
def _inverse(a: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """(I + a)^-1 of a `[tile, tile]` float32 that is 0 on and above its diagonal."""
    blocks: tl.constexpr = tile // BLOCK
    number, local = tl.arange(0, blocks), tl.arange(0, BLOCK)
    on_diagonal = number[:, None, None, None] == number[None, None, :, None]
    own = tl.where(on_diagonal, tl.reshape(a, (blocks, BLOCK, blocks, BLOCK)), 0.0)
    own = tl.sum(own, 2)
    x = (local[:, None] == local[None, :]).to(tl.float32)[None, :, :]
    x = tl.broadcast_to(x, (blocks, BLOCK, BLOCK))
    for done in tl.static_range(BLOCK - 1):
        # Row `done` is final: take it out of the ones below.
        share = tl.sum(tl.where((local == done)[None, None, :], own, 0.0), 2)
        final = tl.sum(tl.where((local == done)[None, :, None], x, 0.0), 1)
        x = x - share[:, :, None] * final[:, None, :]
    x = tl.reshape(tl.where(on_diagonal, x[:, :, None, :], 0.0), (tile, tile))
    if tile > BLOCK:
        x = _join_pairs(a, x, BLOCK)
    if tile > 2 * BLOCK:
        x = _join_pairs(a, x, 2 * BLOCK)
    return x


# Where prefill rows begin among a step's rows varies, and with it what is aligned.
@triton.jit(
    do_not_specialize=["chunks", "tokens"],
    do_not_specialize_on_alignment=["starts", "first_positions"],
)
def _factors_kernel(
    qkv: tl.tensor,
    gates: tl.tensor,
    tokens: tl.tensor,
    starts: tl.tensor,
    first_positions: tl.tensor,
    chunks: tl.tensor,
    factors: tl.tensor,
    shape: tl.constexpr,
    tile: tl.constexpr,
    chunks_tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    key_dim: tl.constexpr = shape.key_dim
    value_heads: tl.constexpr = shape.value_heads
    head = tl.program_id(1)
    key_head = head // shape.group
    number = tl.program_id(0)
    wait_for_previous(overlap)
    # The chunk whose tile this is, by how many tiles the chunks up to each have.
    each = tl.arange(0, chunks_tile)
    begins = tl.load(first_positions + each, mask=each < chunks, other=0)
    lengths = tl.load(starts + 1 + each, mask=each < chunks, other=0)
    lengths = lengths - tl.load(starts + each, mask=each < chunks, other=0)
    counts = (begins + lengths + tile - 1) // tile - begins // tile
    ends = tl.cumsum(tl.where(lengths > 0, counts, 0), 0)
    chunk = tl.sum((ends <= number).to(tl.int32), 0)
    if chunk < chunks:
        start, first = tl.load(starts + chunk), tl.load(first_positions + chunk)
        end = first + tl.load(starts + chunk + 1) - start
        number -= scan_chunks_before(starts, first_positions, chunk, tile, chunks_tile)
        position = (first // tile + number) * tile + tl.arange(0, tile)
        exists = (position >= first) & (position < end)
        token = (start - first + position).to(tl.int64)
        place = qkv + token[:, None] * shape.conv_dim + key_head * key_dim
        place = place + tl.arange(0, key_dim)[None, :]
        q = tl.load(place, mask=exists[:, None], other=0.0)
        k = tl.load(place + shape.key_inner, mask=exists[:, None], other=0.0)
        place = gates + head.to(tl.int64) * tokens + token
        beta = tl.load(place, mask=exists, other=0.0)
        g = tl.load(place + tokens.to(tl.int64) * value_heads, mask=exists, other=0.0)
        decay = tl.cumsum(g, 0)
        at = tl.arange(0, tile)
        left = decay[:, None] - decay[None, :]
        left = tl.exp(tl.where(at[:, None] >= at[None, :], left, -float("inf")))
        row = factors + (token[:, None] * value_heads + head) * (2 * tile) + at[None, :]
        p = tl.dot(q, tl.trans(k), input_precision="ieee") * left
        tl.store(row + tile, p.to(factors.dtype.element_ty), mask=exists[:, None])
        a = tl.dot(k, tl.trans(k), input_precision="ieee") * left * beta[:, None]
        t = _inverse(tl.where(at[:, None] > at[None, :], a, 0.0), tile) * beta[None, :]
        tl.store(row, t.to(factors.dtype.element_ty), mask=exists[:, None])
