"""Work that threads share: each thread takes the next chunk, until there is none.

One thread has a job at a time, and shares it; the others are in `serve`. What they tell each other
is in memory of all of them (`atomics.py`). A job is a product (`integer_products.py`,
`group_products.py`), cut by outputs, or what stands between two products (`row_jobs.py`), cut by
rows.

All addresses are of memory that the caller keeps. An array made in such a function would be freed
before the threads have read it: Numba does not know of reads by address. Imported only where loops
are compiled.
"""

from __future__ import annotations

from typing import Any

from numba import carray
from numba.extending import register_jitable

from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.cpu.pointers import call_at
from megatron_async.ops.cpu.row_kernels import longs
from megatron_async.ops.linear.cpu import atomics, row_jobs
from megatron_async.ops.linear.cpu.atomics import (
    ARGUMENT,
    AWAKE,
    FINISHED,
    HELD,
    KIND,
    LENGTH,
    SIZE,
    TICKET,
    argument,
)
from megatron_async.ops.linear.cpu.integer_products import multiply
from megatron_async.ops.linear.cpu.integer_tile import STEP
from megatron_async.ops.linear.cpu.row_jobs import factors_at
from megatron_async.ops.linear.cpu.weight_record import LOOP, SCALES, field

PRODUCT, GROUPED, ROUND, NORM, ACTIVATE, TURN, ATTEND, EXPERTS, MIX = range(9)
"""Kinds of jobs."""
LEAST_ROWS = 4
"""Rows from which on threads share them."""
ROW_CHUNKS = 32
"""Most chunks of rows. One has two rows or more, a microsecond or two."""
FIELD = 20
"""Bits of a ticket's two lower numbers: chunks of the job, and the next one to be taken. Above them
jobs are counted, so that no ticket comes twice."""
NEVER = 2**62
"""Bytes of weights from which on a product is shared, of a thread that computes alone."""
LOW, JOBS = 2**FIELD - 1, 2**22 - 1
_read = atomics.read


@register_jitable
def rows_of_chunk(rows: Any, is_shared: Any) -> Any:
    """Rows that a thread takes at a time; all of them: no thread takes part."""
    if not is_shared or rows < LEAST_ROWS:
        return rows
    return max((rows + ROW_CHUNKS - 1) // ROW_CHUNKS, 2)


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_experts(control: Any, first: Any, last: Any) -> None:  # pragma: no cover - compiled
    """`(x, k, weight, blocks, out, loop, which, starts, of_block, stride, outputs)`: rows of x by a
    weight of several experts. Expert `which[i]` has rows `starts[i]` to `starts[i + 1]` - 1, and
    `blocks` of the weight; the job's are those of all, one expert after the other."""
    x, k, weight = argument(control, 0), argument(control, 1), argument(control, 2)
    blocks, out, loop = argument(control, 3), argument(control, 4), argument(control, 5)
    which, starts = longs(argument(control, 6)), longs(argument(control, 7))
    of_block, stride = argument(control, 8), argument(control, 9)
    outputs, block = argument(control, 10), first
    while block < last:
        number = block // blocks
        begin = block - number * blocks
        end = min(blocks, begin + last - block)
        expert = carray(which, (number + 1,))[number]
        ends = carray(starts, (number + 2,))
        start, stop = ends[number], ends[number + 1]
        numbers = (
            x + start * stride, stop - start, k, weight + expert * blocks * of_block, blocks,
            out + 4 * start * outputs, begin, end, 0,
        )  # fmt: skip
        call_at(loop, numbers)
        block += end - begin


@njit(nogil=True, cache=True, error_model="numpy")
def _compute(control: Any, first: Any, last: Any) -> None:  # pragma: no cover - compiled
    """From first to last of the job in `control`."""
    kind = _read(control + KIND)
    if kind == GROUPED:
        x, rows, k = argument(control, 0), argument(control, 1), argument(control, 2)
        weight, blocks, out = argument(control, 3), _read(control + LENGTH), argument(control, 4)
        # The last number is the form, which each loop has one of and does not read.
        numbers = (x, rows, k, weight, blocks, out, first, last, 0)
        call_at(argument(control, 5), numbers)
    elif kind == PRODUCT:
        x, factors, rows = argument(control, 0), argument(control, 1), argument(control, 2)
        steps, weight, scales = argument(control, 3), argument(control, 4), argument(control, 5)
        blocks, out = _read(control + LENGTH), argument(control, 6)
        multiply(x, factors, rows, steps, weight, scales, blocks, out, first, last)
    elif kind == ROUND:
        row_jobs.rounding(control, first, last)
    elif kind == NORM:
        row_jobs.normalising(control, first, last)
    elif kind == ACTIVATE:
        row_jobs.activating(control, first, last)
    elif kind == TURN:
        row_jobs.turning(control, first, last)
    elif kind == MIX:
        row_jobs.mixing(control, first, last)
    elif kind == EXPERTS:
        _multiply_experts(control, first, last)
    else:
        row_jobs.attending(control, first, last)


@njit(nogil=True, cache=True, error_model="numpy")
def _take_chunk(control: Any) -> bool:  # pragma: no cover - compiled
    """Take and compute the next chunk of the job, if there is one; whether there was.

    A ticket is swapped only if it is still the one that was read. So the job's numbers, read behind
    that, are of this job: it does not end before this chunk has.
    """
    ticket = _read(control + TICKET)
    chunk = ticket & LOW
    if chunk >= (ticket >> FIELD) & LOW:
        return False
    if atomics.swap_if(control + TICKET, ticket, ticket + 1):
        size = _read(control + SIZE)
        end = min((chunk + 1) * size, _read(control + LENGTH))
        _compute(control, chunk * size, end)
        atomics.add(control + FINISHED, 1)
    return True


@njit(nogil=True, cache=True, error_model="numpy")
def share(
    control: Any, kind: Any, length: Any, size: Any, arguments: Any
) -> None:  # pragma: no cover - compiled
    """Do a job, in chunks of `size` of `length`, with the threads that are in `serve` if there is
    more than one; arguments: a tuple of this kind's numbers (`row_jobs.py`, `multiply_rounded`).
    """
    atomics.put(control + KIND, kind)
    atomics.put(control + LENGTH, length)
    atomics.put(control + SIZE, size)
    for number in range(len(arguments)):
        atomics.put(control + ARGUMENT[number], arguments[number])
    if size >= length:
        # No ticket: nobody but this thread reads the numbers.
        _compute(control, 0, length)
        return
    chunks = (length + size - 1) // size
    atomics.put(control + FINISHED, 0)
    job = (_read(control + TICKET) >> (2 * FIELD)) + 1 & JOBS
    atomics.write(control + TICKET, (job << (2 * FIELD)) | (chunks << FIELD))
    while _take_chunk(control):
        pass
    while _read(control + FINISHED) < chunks:
        atomics.pause()


@njit(nogil=True, cache=True, error_model="numpy")
def multiply_rounded(
    control: Any, scratch: Any, rows: Any, k: Any, weight: Any, blocks: Any, record: Any, out: Any,
    size: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """`product` of rows that `row_jobs.round_some` has rounded into scratch."""
    scales = field(record, SCALES)
    if scales == 0:
        loop = field(record, LOOP)
        share(control, GROUPED, blocks, size, (scratch, rows, k, weight, out, loop))
        return
    factors, steps = factors_at(scratch, rows, k), (k + STEP - 1) // STEP
    arguments = (scratch, factors, rows, steps, weight, scales, out)
    share(control, PRODUCT, blocks, size, arguments)


@njit(nogil=True, cache=True, error_model="numpy")
def product(
    control: Any, scratch: Any, x: Any, rows: Any, k: Any, weight: Any, blocks: Any, record: Any,
    out: Any, size: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Into out: `x @ weight.T`; all by their addresses.

    Args:
        control: `CONTROL_BYTES` that are this call's and the helpers'.
        scratch: `scratch_bytes(rows, k)`; written.
        x: float32 `[rows, k]`.
        weight: int8 `[blocks, steps, 4, STEP]`, steps the fewest that hold k; or a `GroupedWeight`.
        record: the weight's (`weight_record.py`).
        out: float32 `[whole_tiles(rows), outputs]`; written.
        size: blocks of a chunk; all of them: no thread takes part.
    """
    share(control, ROUND, rows, rows_of_chunk(rows, size < blocks), (x, k, record, scratch))
    multiply_rounded(control, scratch, rows, k, weight, blocks, record, out, size)


@njit(nogil=True, cache=True, error_model="numpy")
def serve(control: Any, patience: Any) -> None:  # pragma: no cover - compiled
    """Take chunks of other threads' jobs until none has come for so many turns, and none is about
    to."""
    atomics.add(control + AWAKE, 1)
    turn = 0
    while turn < patience:
        if _take_chunk(control):
            turn = 0
        else:
            atomics.pause()
            turn = 0 if _read(control + HELD) else turn + 1
    atomics.add(control + AWAKE, -1)
