"""Rows of 8 bits by weights of 4 bits, both with scales for few inputs each.

Weights that come from a file of 4 bits (GGUF's Q4_0, Q4_1, Q4_K) have a scale and an offset for
each 32 inputs of an output. Kept so they are exact, have half the bytes of 8-bit weights, and need
fewer instructions than those of `integer_products.py`, whose rows have 16 bits: 70 instead of 51
products a nanosecond on one core with AVX2 (docs/records/cpu_throughput.md, 2026-11-27). llama.cpp
multiplies such weights by rows of 8 bits too, in groups of 32.

A block has as many outputs as a register has lanes. It lies in memory as it is read: for each group
its weights, of the first 16 inputs in the low halves of bytes and of the others in the high ones,
then scales, then offsets. Imported only where loops are compiled.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.cpu.row_kernels import LINE
from megatron_async.ops.linear.cpu.group_rows import row_bytes
from megatron_async.ops.linear.cpu.group_tile import GROUP, GroupTileWriter, TileKind, kind_of_host
from megatron_async.ops.linear.cpu.integer_products import AHEAD
from megatron_async.ops.linear.cpu.integer_products import GROUP as ROWS_OF_BLOCK

KIND = kind_of_host()
LANES, GROUP_BYTES = KIND.lanes, KIND.group_bytes
MOST_ROWS = 4
"""Rows of the largest tile."""


def tile(rows: int, kind: TileKind) -> Any:
    """Products of a tile, as an intrinsic of addresses and sizes: see `GroupTileWriter.write`."""

    @intrinsic
    def products(
        typingctx: Any, x: Any, stride: Any, k: Any, weight: Any, out: Any, columns: Any,
        ahead: Any, pace: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            GroupTileWriter(builder, rows, kind).write(*args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return products


_one, _two, _four = (tile(rows, KIND) for rows in (1, 2, MOST_ROWS))


@njit(nogil=True, cache=True, error_model="numpy")
def multiply_groups(
    x: Any, rows: Any, k: Any, weight: Any, blocks: Any, out: Any, first: Any, last: Any
) -> None:  # pragma: no cover - compiled
    """Multiply all rows of x by blocks `first` to `last` - 1 of a weight. Addresses: x, as
    `round_groups` makes it; the weight, `[blocks, k / GROUP, GROUP_BYTES]` bytes; out, float32
    `[rows, LANES blocks]`, written."""
    stride, columns, of_block = row_bytes(k), LANES * blocks, k // GROUP * GROUP_BYTES
    for begin in range(0, rows, ROWS_OF_BLOCK):
        end = min(begin + ROWS_OF_BLOCK, rows)
        left = (end - begin) % MOST_ROWS
        tiles = (end - begin) // MOST_ROWS + (left + 1) // 2
        pace = LINE // tiles
        for block in range(first, last):
            place, row = weight + block * of_block, begin
            ahead = place + AHEAD
            while row < end:
                source, target = x + row * stride, out + 4 * (row * columns + block * LANES)
                if end - row >= MOST_ROWS:
                    _four(source, stride, k, place, target, columns, ahead, pace)
                    row += MOST_ROWS
                elif end - row >= 2:
                    _two(source, stride, k, place, target, columns, ahead, pace)
                    row += 2
                else:
                    _one(source, stride, k, place, target, columns, ahead, pace)
                    row += 1
                ahead += of_block // LINE * pace
