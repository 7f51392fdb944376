"""Weight rows times one row of inputs, tile by tile: what kernels of one token share.

A warp takes whole weight rows, a tile of 512 bytes at a time: 16 for each of its threads. It asks
for several tiles of a row at once, and adds up its own sums, so that no warp waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.linear.load_tile import stored_scale

TILE_BYTES = 512
"""Bytes of a weight row in a tile: 16 for each thread of a warp."""


@triton.jit
def ask_first(overlap: tl.constexpr) -> None:
    """Loads before this are issued before any later load.

    Left alone, ptxas moves inputs and products among a row's loads: 3 of 16 were on their way when
    the first product waited for its weight (sm_90, CUDA 12.8). A warp that waits for itself costs
    no instruction.
    """
    if overlap:
        tl.inline_asm_elementwise(
            "{ bar.warp.sync 0xffffffff; mov.u32 $0, 0; }",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_tiles(
    rows: tl.tensor,
    column: tl.tensor,
    length: tl.tensor,
    at: tl.tensor,
    k: tl.constexpr,
    block_k: tl.constexpr,
    depth: tl.constexpr,
) -> tl.tuple:
    """`depth` tiles of weight rows, of `block_k` elements each, from element `at` on; zeros after
    a row's end, which is its `length`, at most `k`. `rows` points to the tiles at element 0."""
    tiles = ()
    for step in tl.static_range(depth):
        if step * block_k < k:
            mask = column[None, :] < (length - at - step * block_k)[:, None]
            # Read once: past the first cache, where the inputs lie.
            tile = tl.load(rows + (at + step * block_k), mask, other=0.0, cache_modifier=".cg")
            tiles += (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def add_products(
    sums: tl.tensor,
    tiles: tl.tuple,
    inputs: tl.tensor,
    column: tl.tensor,
    length: tl.tensor,
    at: tl.tensor,
    block_k: tl.constexpr,
) -> tl.tensor:
    """`sums`, `[rows, block_k]`, and the products of `load_tiles`'s tiles with the inputs, which
    are loaded as wide as a tile: no exchange between threads."""
    for step in tl.static_range(len(tiles)):
        mask = column[None, :] < (length - at - step * block_k)[:, None]
        v = tl.load(inputs + (at + step * block_k), mask=mask, other=0.0).to(tl.float32)
        sums += tiles[step].to(tl.float32) * v
    return sums


@triton.jit
def add_scaled_products(
    sums: tl.tensor,
    tiles: tl.tuple,
    inputs: tl.tensor,
    column: tl.tensor,
    length: tl.tensor,
    at: tl.tensor,
    block_k: tl.constexpr,
    scales: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    covers: tl.constexpr,
) -> tl.tensor:
    """`add_products` of FP8 tiles, loaded as bytes: `sums` are `[rows, block_k / 16]`, one of the
    inputs of a thread, times their scale; or, where a scale covers all inputs, `[rows, block_k]`,
    not multiplied by it yet.

    Args:
        scales: where each row's begin, of `covers` inputs each; 0: of all.
        first, width: `[rows]`: the row's input that tiles begin with, and how many it has.
    """
    rows: tl.constexpr = sums.shape[0]
    parts: tl.constexpr = sums.shape[1]
    part = tl.arange(0, parts) * (block_k // parts)
    for step in tl.static_range(len(tiles)):
        begin = at + step * block_k
        mask = column[None, :] < (length - begin)[:, None]
        v = tl.load(inputs + begin, mask=mask, other=0.0).to(tl.float32)
        w = tiles[step].to(tl.float8e4nv, bitcast=True).to(tl.float32)
        if covers == 0:
            sums += w * v
        else:
            # Loaded the other way round: so Triton lays them out as the tile's threads are.
            place = tl.minimum(first[None, :] + (begin + part)[:, None], width[None, :] - 1)
            scale = stored_scale(tl.load(scales[None, :] + place // covers))
            some = tl.sum(tl.reshape(w * v, (rows, parts, block_k // parts)), 2)
            sums += some * tl.trans(scale)
    return sums


@triton.jit
def add_and_refill(
    tiles: tl.tuple,
    inputs: tl.tensor,
    whole: tl.tensor,
    cells: tl.tensor,
    length: tl.tensor,
    next_cells: tl.tensor,
    next_length: tl.tensor,
    column: tl.tensor,
    k: tl.constexpr,
    block_k: tl.constexpr,
) -> tuple[tl.tensor, tl.tuple]:
    """Products of weight rows with the inputs, while the rows after them are already asked for.

    As soon as a tile is used, the one that is `len(tiles)` tiles behind it is asked for: of the
    same row, and of the next one after its last tile. Arguments are as for `load_tiles`, from where
    `tiles` are; of each row `whole` inputs are read.

    Returns:
        sums `[rows]`, float32, and the first tiles of the next rows.
    """
    depth: tl.constexpr = len(tiles)
    rounds: tl.constexpr = (k + depth * block_k - 1) // (depth * block_k)
    sums = tl.zeros(cells.shape, tl.float32)
    for number in tl.static_range(rounds):
        fresh = ()
        for step in tl.static_range(depth):
            at = (number * depth + step) * block_k
            there = column[None, :] < (whole - at)[:, None]
            v = tl.load(inputs + at, mask=there, other=0.0)
            sums += tiles[step].to(tl.float32) * v.to(tl.float32)
            if number + 1 < rounds:
                mask = column[None, :] < (length - at - depth * block_k)[:, None]
                tile = tl.load(
                    cells + (at + depth * block_k), mask, other=0.0, cache_modifier=".cg"
                )
            else:
                mask = column[None, :] < (next_length - step * block_k)[:, None]
                place = next_cells + step * block_k
                tile = tl.load(place, mask, other=0.0, cache_modifier=".cg")
            fresh += (tile,)  # type: ignore[assignment]
        tiles = fresh
    return tl.sum(sums, 1), tiles
