"""Rows of 16 bits by weights of 8 bits, in an instruction that x86 CPUs with AVX2 have.

`pmaddwd` multiplies pairs of 16-bit integers and adds neighbours in 32 bits. Weights are 8 bits in
memory and become 16 in a register. So a row of 16 bits is one row; fbgemm's kernels take it as two
of 8 bits. And no sum saturates, so weights have all of 127 steps on a CPU without VNNI.

Imported only where loops are compiled. Sums are exact: a row depends on no other one, and on
neither the tile nor the thread that computed it. Weights lie in the order in which a tile of one
row reads them: `[outputs / 4, k / STEP, 4, STEP]`. In the order `[outputs, k]` four short streams
are read at a time, and a step of one row of SmolLM2-135M takes 25.7 instead of 12.9 ms on an AVX2
host (docs/records/cpu_throughput.md, 2026-11-25).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic, register_jitable

from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.cpu.row_kernels import LINE, floats, words
from megatron_async.ops.linear.cpu.integer_tile import FETCHES, OUTPUTS, STEP, TileWriter

MOST_ROWS = 4
"""Rows of the largest tile."""
MOST = np.float32(32767.0)
"""The largest element of a row as an integer."""
LEAST = np.float32(1e-30)
"""What the largest element of a row of zeros counts as."""
LARGEST_FINITE, MAGNITUDE = np.int32(0x7F7FFFFF), np.int32(0x7FFFFFFF)
"""Bits of a float32: of the largest finite number, and all but the sign."""
AHEAD = 6912
"""Bytes from the weights that are multiplied to those that the cache is told to fetch. A block's
tiles together fetch as much as a block has. Else memory waits while tiles are computed, and tiles
while memory is read: on one core of a Xeon to which memory gives 9.4 GB/s, 576 x 3072 weights that
are not in its cache took 508 us by eight rows, and take 285; by one row 258, and 140."""
GROUP = 8
"""Rows that are multiplied by a block of outputs before the next block is read. They stay in the
first cache with it, while the next block is on its way."""


def _tile(rows: int, outputs: int) -> Any:
    """Products of a tile, as an intrinsic: see `_one`."""

    @intrinsic
    def products(
        typingctx: Any,
        x: Any,
        stride: Any,
        weight: Any,
        steps: Any,
        factors: Any,
        scales: Any,
        out: Any,
        columns: Any,
        ahead: Any,
        pace: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, stride, weight, steps, factors, scales, out, columns, ahead, pace = args
            writer = TileWriter(builder, rows, outputs)
            totals = writer.totals(x, stride, weight, steps, ahead, pace)
            writer.write(totals, factors, scales, out, columns)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return products


_one = _tile(1, 4)
"""`(x, stride, weight, steps, factors, scales, out, columns, ahead, pace)`: of a tile's rows by its
outputs. Addresses of the first row, of the first output's weights in their block, of the first
row's factor, of the first output's scale and of the first of what is written; `stride` bytes from a
row to the next in x, `columns` numbers in out; `ahead` and `pace`: see `TileWriter.totals`."""
_two = _tile(2, 4)
_four = _tile(4, 2)


@intrinsic
def _as_float(typingctx: Any, bits: Any) -> Any:
    """The float32 of these bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@register_jitable
def whole_tiles(rows: Any) -> Any:
    """The rows, and those that fill the last tile: tiles have 1, 2 or 4 rows."""
    last = rows % MOST_ROWS
    return rows - last + (last if last <= 2 else MOST_ROWS)


@register_jitable
def _tiles_of(rows: Any) -> Any:
    """Tiles of a block of four outputs by so many rows: one of 1 or 2 rows, two of 4."""
    return (rows + 1) // MOST_ROWS * 2 + (1 if 1 <= rows % MOST_ROWS <= 2 else 0)


@register_jitable
def scratch_bytes(rows: Any, k: Any) -> Any:
    """Bytes of a product's rows as integers, and of their factors: of 16 bits, or, with numbers for
    each group, as `round_groups` makes them, which is more."""
    return whole_tiles(rows) * ((k + STEP - 1) // STEP * (3 * STEP) + 4)


@njit(nogil=True, cache=True, error_model="numpy")
def round_rows(
    x_at: Any, rows: Any, k: Any, rounded: Any, factors: Any
) -> None:  # pragma: no cover - compiled
    """Rows of float32 `[rows, k]` at an address as int16 `[tiles of rows, steps of k]`, of which
    those beyond are zeros; into factors `[tiles of rows]` what a sum is to be multiplied by.

    A row that is not finite has the factor NaN and integers of no meaning.
    """
    x, bits = carray(floats(x_at), (rows, k)), carray(words(x_at), (rows, k))
    for row in range(rounded.shape[0]):
        target = rounded[row]
        if row >= rows:
            factors[row] = 0
            target[:] = 0
            continue
        # Without their signs, numbers are ordered as their bits are as integers, and what is not
        # finite stands above all that is. LLVM makes no vectors of float32's own maximum.
        largest, given = np.int32(0), bits[row]
        for i in range(k):
            largest = max(largest, given[i] & MAGNITUDE)
        if largest > LARGEST_FINITE:
            factors[row] = np.float32(np.nan)
            target[:] = 0
            continue
        most = max(_as_float(largest), LEAST)
        factor, numbers = MOST / most, x[row]
        factors[row] = most / MOST
        for i in range(k):
            target[i] = np.int16(np.int32(np.rint(numbers[i] * factor)))
        target[k:] = 0


@njit(nogil=True, cache=True, error_model="numpy")
def multiply(
    x: Any, factors: Any, rows: Any, steps: Any, weight: Any, scales: Any, blocks: Any, out: Any,
    first: Any, last: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Multiply all rows of x by blocks `first` to `last` - 1, of four outputs each, of a weight.
    Addresses: x and its factors, as `round_rows` makes them; the weight, int8 `[blocks, steps, 4,
    STEP]`, and its scales, float32 `[4 blocks]`; out, float32 `[rows, 4 blocks]`, written."""
    stride, columns, line = 2 * STEP * steps, OUTPUTS * blocks, OUTPUTS * STEP
    for group in range(0, rows, GROUP):
        end = min(group + GROUP, rows)
        pace = LINE // _tiles_of(end - group)
        fetched = steps * FETCHES * pace
        for block in range(first, last):
            place, output = weight + block * (steps * line), block * OUTPUTS
            scale, row, ahead = scales + 4 * output, group, place + AHEAD
            while row < end:
                left, source, factor = end - row, x + row * stride, factors + 4 * row
                target = out + 4 * (row * columns + output)
                if left == 1:
                    _one(source, stride, place, steps, factor, scale, target, columns, ahead, pace)
                    row += 1
                elif left == 2:
                    _two(source, stride, place, steps, factor, scale, target, columns, ahead, pace)
                    row += 2
                else:
                    _four(source, stride, place, steps, factor, scale, target, columns, ahead, pace)
                    ahead += fetched
                    _four(
                        source, stride, place + 2 * STEP, steps, factor, scale + 8, target + 8,
                        columns, ahead, pace,
                    )  # fmt: skip
                    row += 4
                ahead += fetched
