"""Rows of 16 bits by weights of 8 bits, in an instruction that x86 CPUs with AVX2 have.

`pmaddwd` multiplies 16 pairs of 16-bit integers and adds neighbours in 32 bits. Weights are 8 bits
in memory and become 16 in a register. So a row of 16 bits is one row; fbgemm's kernels take it as
two of 8 bits. And no sum saturates, so weights have all of 127 steps on a CPU without VNNI.

Imported only where loops are compiled. Sums are exact: a row depends on no other one, and on
neither the tile nor the thread that computed it. Weights lie in the order in which a tile of one
row reads them: `[outputs / 4, k / 16, 4, 16]`. In the order `[outputs, k]` four short streams are
read at a time, and a step of one row of SmolLM2-135M takes 25.7 instead of 12.9 ms
(docs/records/cpu_throughput.md, 2026-11-25).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic, register_jitable

from megatron_async.ops.cpu import atomics
from megatron_async.ops.cpu.integer_tile import OUTPUTS, STEP, TileWriter
from megatron_async.ops.cpu.row_kernels import floats, integers

MOST_ROWS = 4
"""Rows of the largest tile."""
MOST = np.float32(32767.0)
"""Of an element of a row as an integer."""
LEAST = np.float32(1e-30)
"""What the largest element of a row of zeros counts as."""
LARGEST_FINITE = np.finfo(np.float32).max
GROUP = 8
"""Rows that are multiplied by a block of outputs before the next block is read. They stay in the
first cache with it, while the next block is on its way."""

TICKET, FINISHED, AWAKE, JOB = 0, 64, 128, 192
"""Bytes from the start of `control`, 64 apart so that no two share a cache line: the ticket, the
chunks that are done, the helpers that wait for a job, and the job's numbers."""
X, ROWS, WEIGHT, STEPS, SCALES, FACTORS, OUT, BLOCKS, CHUNK_BLOCKS = (
    JOB + 8 * number for number in range(9)
)
"""Bytes from the start of `control` to each of the job's numbers."""
CONTROL_BYTES = CHUNK_BLOCKS + 8
FIELD = 20
"""Bits of a ticket's two lower numbers: chunks of the job, and the next one to be taken. Above them
jobs are counted, so that no ticket comes twice."""
LOW, JOBS = 2**FIELD - 1, 2**22 - 1


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
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, stride, weight, steps, factors, scales, out, columns = args
            writer = TileWriter(builder, rows, outputs)
            totals = writer.totals(x, stride, weight, steps)
            writer.store(totals, factors, scales, out, columns)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return products


_one = _tile(1, 4)
"""`(x, stride, weight, steps, factors, scales, out, columns)`: of a tile's rows by its outputs.
Addresses of the first row, of the first output's weights in their block, of the first row's factor,
of the first output's scale and of the first of what is written; `stride` bytes from a row to the
next in x, `columns` numbers in out."""
_two = _tile(2, 4)
_four = _tile(4, 2)


@register_jitable
def whole_tiles(rows: Any) -> Any:
    """So many rows, and those that fill the last tile: tiles have 1, 2 or 4 rows."""
    last = rows % MOST_ROWS
    return rows - last + (last if last <= 2 else MOST_ROWS)


@register_jitable
def scratch_bytes(rows: Any, k: Any) -> Any:
    """Bytes of a product's rows as integers, and of their factors."""
    return whole_tiles(rows) * ((k + STEP - 1) // STEP * (2 * STEP) + 4)


@njit(nogil=True, cache=True, error_model="numpy")
def round_rows(x: Any, rounded: Any, factors: Any) -> None:  # pragma: no cover - compiled
    """Rows of float32 `[rows, k]` as int16 `[tiles of rows, steps of k]`, of which those beyond are
    zeros; into factors `[tiles of rows]` what a sum is to be multiplied by.

    A row that is not finite has the factor NaN and integers of no meaning.
    """
    for row in range(rounded.shape[0]):
        target = rounded[row]
        if row >= x.shape[0]:
            factors[row] = 0
            target[:] = 0
            continue
        given = x[row]
        most, is_broken = np.float32(0.0), 0
        for i in range(x.shape[1]):
            most = max(most, abs(given[i]))
            is_broken |= not abs(given[i]) <= LARGEST_FINITE
        if is_broken:
            factors[row] = np.float32(np.nan)
            target[:] = 0
            continue
        most = max(most, LEAST)
        factor = MOST / most
        factors[row] = most / MOST
        for i in range(x.shape[1]):
            target[i] = np.int16(np.int32(np.rint(given[i] * factor)))
        target[x.shape[1] :] = 0


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply(control: Any, first: Any, last: Any) -> None:  # pragma: no cover - compiled
    """Blocks of four outputs, from first to last, of the job in `control`, for all its rows."""
    rows, steps = atomics.read(control + ROWS), atomics.read(control + STEPS)
    x, stride = atomics.read(control + X), 2 * STEP * steps
    weight, columns = atomics.read(control + WEIGHT), OUTPUTS * atomics.read(control + BLOCKS)
    scales, factors = atomics.read(control + SCALES), atomics.read(control + FACTORS)
    out = atomics.read(control + OUT)
    for group in range(0, rows, GROUP):
        for block in range(first, last):
            place, output = weight + block * (steps * OUTPUTS * STEP), block * OUTPUTS
            scale, row = scales + 4 * output, group
            while row < min(group + GROUP, rows):
                left, source, factor = rows - row, x + row * stride, factors + 4 * row
                target = out + 4 * (row * columns + output)
                if left == 1:
                    _one(source, stride, place, steps, factor, scale, target, columns)
                    row += 1
                elif left == 2:
                    _two(source, stride, place, steps, factor, scale, target, columns)
                    row += 2
                else:
                    _four(source, stride, place, steps, factor, scale, target, columns)
                    _four(
                        source, stride, place + 2 * STEP, steps, factor, scale + 8, target + 8,
                        columns,
                    )  # fmt: skip
                    row += 4


@njit(nogil=True, cache=True, error_model="numpy")
def _take_chunk(control: Any) -> bool:  # pragma: no cover - compiled
    """Take and compute the next chunk of the job, if there is one; whether there was.

    A ticket is swapped only if it is still the one that was read. So the job's numbers, read behind
    that, are of this job: it does not end before this chunk has.
    """
    ticket = atomics.read(control + TICKET)
    chunk = ticket & LOW
    if chunk >= (ticket >> FIELD) & LOW:
        return False
    if atomics.swap_if(control + TICKET, ticket, ticket + 1):
        size = atomics.read(control + CHUNK_BLOCKS)
        end = min((chunk + 1) * size, atomics.read(control + BLOCKS))
        _multiply(control, chunk * size, end)
        atomics.add(control + FINISHED, 1)
    return True


@njit(nogil=True, cache=True, error_model="numpy")
def product(
    control: Any,
    scratch: Any,
    x: Any,
    rows: Any,
    k: Any,
    weight: Any,
    blocks: Any,
    scales: Any,
    out: Any,
    size: Any,
) -> None:  # pragma: no cover - compiled
    """Into out: `x @ weight.T`; threads that are in `serve` take part.

    All are addresses of memory that the caller keeps. An array made here would be freed before the
    threads have read it: Numba does not know of reads by address.

    Args:
        control: of `CONTROL_BYTES` that are this call's and the helpers'.
        scratch: of `scratch_bytes(rows, k)`; written.
        x: of float32 `[rows, k]`.
        rows, k: sizes of x.
        weight: of int8 `[blocks, steps, 4, 16]`, steps the fewest that hold k.
        blocks: outputs over four.
        scales: of float32 `[4 blocks]`.
        out: of float32 `[whole_tiles(rows), 4 blocks]`; written.
        size: blocks of a chunk; all of them: no thread takes part.
    """
    tiles, steps = whole_tiles(rows), (k + STEP - 1) // STEP
    factors = scratch + 2 * STEP * tiles * steps
    round_rows(
        carray(floats(x), (rows, k)),
        carray(integers(scratch), (tiles, steps * STEP)),
        carray(floats(factors), (tiles,)),
    )
    atomics.write(control + X, scratch)
    atomics.write(control + ROWS, rows)
    atomics.write(control + WEIGHT, weight)
    atomics.write(control + STEPS, steps)
    atomics.write(control + SCALES, scales)
    atomics.write(control + FACTORS, factors)
    atomics.write(control + OUT, out)
    atomics.write(control + BLOCKS, blocks)
    atomics.write(control + CHUNK_BLOCKS, size)
    chunks = (blocks + size - 1) // size
    atomics.write(control + FINISHED, 0)
    job = (atomics.read(control + TICKET) >> (2 * FIELD)) + 1 & JOBS
    atomics.write(control + TICKET, (job << (2 * FIELD)) | (chunks << FIELD))
    while _take_chunk(control):
        pass
    while atomics.read(control + FINISHED) < chunks:
        atomics.pause()


@njit(nogil=True, cache=True, error_model="numpy")
def serve(control: Any, patience: Any) -> None:  # pragma: no cover - compiled
    """Take chunks of other threads' products until none has come for so many turns."""
    atomics.add(control + AWAKE, 1)
    turn = 0
    while turn < patience:
        if _take_chunk(control):
            turn = 0
        else:
            atomics.pause()
            turn += 1
    atomics.add(control + AWAKE, -1)
