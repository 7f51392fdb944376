"""Weight rows times one row of inputs, tile by tile: what kernels of one token share.

A warp takes whole weight rows, a tile of 512 bytes at a time: 16 for each of its threads. It asks
for several tiles of a row at once, and adds up its own sums, so that no warp waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
    """`depth` tiles of weight rows, from element `at` on; zeros after a row's end.

    Args:
        rows: pointers to the tile at element 0, `[rows, block_k]`.
        column: place in a tile, `[block_k]`.
        length: elements of each row, `[rows]`; none are loaded of a row of 0.
        at: first element.
        k: most elements of a row.
        block_k: elements of a tile.
        depth: tiles.
    """
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
