"""Work that threads share: who takes part takes the next chunk, until there is none.

One thread has a job at a time, and shares it; the others are in `serve`. What they tell each other
is in `control`, memory of all of them. A job is a product (`integer_products.py`,
`group_products.py`), cut by outputs, or the attention of decode rows (`attention_kernels.py`), cut
by sequences.

All addresses are of memory that the caller keeps. An array made in such a function would be freed
before the threads have read it: Numba does not know of reads by address. Imported only where loops
are compiled.
"""

from __future__ import annotations

from typing import Any

from numba import carray, njit
from numba.extending import register_jitable

from megatron_async.ops.cpu.pointers import call_at
from megatron_async.ops.cpu.products import atomics
from megatron_async.ops.cpu.products.group_products import GROUP_BYTES, LANES, multiply_groups
from megatron_async.ops.cpu.products.group_rows import round_groups
from megatron_async.ops.cpu.products.group_tile import GROUP
from megatron_async.ops.cpu.products.integer_products import multiply, round_rows, whole_tiles
from megatron_async.ops.cpu.products.integer_tile import OUTPUTS, STEP
from megatron_async.ops.cpu.row_kernels import floats, integers, longs, words

TICKET, FINISHED, AWAKE, HELD, JOB = range(0, 5 * 64, 64)
"""Bytes from the start of `control`, 64 apart so that no two share a cache line: the ticket; chunks
that are done; helpers that wait for a job; whether jobs follow each other in one call, so that
helpers do not lose patience; and the job's numbers."""
KIND, LENGTH, SIZE, *_rest = (JOB + 8 * number for number in range(3 + 16))
"""The job's numbers: its kind, its length, and what a chunk has of that."""
ARGUMENT = tuple(_rest)
"""The numbers of its kind."""
PRODUCT, ATTENTION, GROUPED = 0, 1, 2
"""Kinds of jobs."""
CONTROL_BYTES = ARGUMENT[-1] + 8
FIELD = 20
"""Bits of a ticket's two lower numbers: chunks of the job, and the next one to be taken. Above them
jobs are counted, so that no ticket comes twice."""
NEVER = 2**62
"""Bytes of weights from which on a product is shared, of a thread that computes alone."""
LOW, JOBS = 2**FIELD - 1, 2**22 - 1
_read = atomics.read


@register_jitable
def outputs_of_block(scales: Any) -> Any:
    """Outputs of a weight's block; scales: its address of scales, 0 for a `GroupedWeight`."""
    return OUTPUTS if scales != 0 else LANES


@register_jitable
def block_bytes(k: Any, scales: Any) -> Any:
    """Bytes of a weight's block."""
    return OUTPUTS * k if scales != 0 else k // GROUP * GROUP_BYTES


@njit(nogil=True, cache=True, error_model="numpy")
def _attend(control: Any, first: Any, last: Any) -> None:  # pragma: no cover - compiled
    """Sequences first to last of the attention in `control`."""
    heads, kv_heads = _read(control + ARGUMENT[4]), _read(control + ARGUMENT[5])
    dim, places = _read(control + ARGUMENT[6]), _read(control + ARGUMENT[7])
    tables_at, blocks = _read(control + ARGUMENT[8]), _read(control + ARGUMENT[9])
    block_size, last_at = _read(control + ARGUMENT[10]), _read(control + ARGUMENT[11])
    width, first_key = _read(control + ARGUMENT[12]), _read(control + ARGUMENT[13])
    sequences = _read(control + LENGTH)
    rows, cached = (sequences * width, heads, dim), (places, kv_heads, dim)
    query = carray(floats(_read(control + ARGUMENT[0])), rows)
    keys = carray(floats(_read(control + ARGUMENT[1])), cached)
    values = carray(floats(_read(control + ARGUMENT[2])), cached)
    out = carray(floats(_read(control + ARGUMENT[3])), rows)
    tables = carray(words(tables_at), (sequences, blocks))
    last_keys = carray(longs(last_at), (sequences * width,))
    scale = carray(floats(_read(control + ARGUMENT[14])), (1,))[0]
    arguments = (
        query, keys, values, tables, block_size, last_keys, width, first_key, scale, first, last,
        out,
    )  # fmt: skip
    call_at(_read(control + ARGUMENT[15]), arguments)


@njit(nogil=True, cache=True, error_model="numpy")
def _compute(control: Any, first: Any, last: Any) -> None:  # pragma: no cover - compiled
    """From first to last of the job in `control`."""
    if _read(control + KIND) == ATTENTION:
        _attend(control, first, last)
        return
    if _read(control + KIND) == GROUPED:
        rows, k = _read(control + ARGUMENT[1]), _read(control + ARGUMENT[2])
        weight, blocks = _read(control + ARGUMENT[3]), _read(control + LENGTH)
        x, out = _read(control + ARGUMENT[0]), _read(control + ARGUMENT[4])
        multiply_groups(x, rows, k, weight, blocks, out, first, last)
        return
    x, factors = _read(control + ARGUMENT[0]), _read(control + ARGUMENT[1])
    rows, steps = _read(control + ARGUMENT[2]), _read(control + ARGUMENT[3])
    weight, scales = _read(control + ARGUMENT[4]), _read(control + ARGUMENT[5])
    blocks, out = _read(control + LENGTH), _read(control + ARGUMENT[6])
    multiply(x, factors, rows, steps, weight, scales, blocks, out, first, last)


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
def _share(
    control: Any, kind: Any, length: Any, size: Any, arguments: Any
) -> None:  # pragma: no cover - compiled
    """Do a job, with the threads that are in `serve`."""
    atomics.write(control + KIND, kind)
    atomics.write(control + LENGTH, length)
    atomics.write(control + SIZE, size)
    for number in range(len(arguments)):
        atomics.write(control + ARGUMENT[number], arguments[number])
    chunks = (length + size - 1) // size
    atomics.write(control + FINISHED, 0)
    job = (_read(control + TICKET) >> (2 * FIELD)) + 1 & JOBS
    atomics.write(control + TICKET, (job << (2 * FIELD)) | (chunks << FIELD))
    while _take_chunk(control):
        pass
    while _read(control + FINISHED) < chunks:
        atomics.pause()


@njit(nogil=True, cache=True, error_model="numpy")
def product(
    control: Any, scratch: Any, x: Any, rows: Any, k: Any, weight: Any, blocks: Any, scales: Any,
    out: Any, size: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Into out: `x @ weight.T`.

    Args:
        control: of `CONTROL_BYTES` that are this call's and the helpers'.
        scratch: of `scratch_bytes(rows, k)`; written.
        x: of float32 `[rows, k]`.
        rows, k: sizes of x.
        weight: of int8 `[blocks, steps, 4, STEP]`, steps the fewest that hold k; or of a
            `GroupedWeight`.
        blocks: outputs over those of a block.
        scales: of float32 `[4 blocks]`; 0: the weight is a `GroupedWeight`.
        out: of float32 `[whole_tiles(rows), outputs]`; written.
        size: blocks of a chunk; all of them: no thread takes part.
    """
    if scales == 0:
        round_groups(x, rows, k, scratch)
        _share(control, GROUPED, blocks, size, (scratch, rows, k, weight, out))
        return
    tiles, steps = whole_tiles(rows), (k + STEP - 1) // STEP
    factors = scratch + 2 * STEP * tiles * steps
    round_rows(
        x,
        rows,
        k,
        carray(integers(scratch), (tiles, steps * STEP)),
        carray(floats(factors), (tiles,)),
    )
    arguments = (scratch, factors, rows, steps, weight, scales, out)
    _share(control, PRODUCT, blocks, size, arguments)


@njit(nogil=True, cache=True, error_model="numpy")
def attention(
    control: Any, loop: Any, query: Any, keys: Any, values: Any, out: Any, heads: Any,
    kv_heads: Any, dim: Any, places: Any, tables: Any, sequences: Any, blocks: Any,
    block_size: Any, last: Any, width: Any, first_key: Any, scale: Any, size: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """`decode_attention` of all sequences.

    Args:
        control: of `CONTROL_BYTES` that are this call's and the helpers'.
        loop: of `decode_attention`.
        query, out: of float32 `[sequences * width, heads, dim]`; out is written.
        keys, values: of float32 `[places, kv heads, dim]`.
        heads, kv_heads, dim, places, sequences, blocks: sizes.
        tables: of int32 `[sequences, blocks]`.
        block_size: tokens of a block.
        last: of int64 `[sequences * width]`.
        width, first_key: see `decode_attention`.
        scale: of a float32.
        size: sequences of a chunk; all of them: no thread takes part.
    """
    arguments = (
        query, keys, values, out, heads, kv_heads, dim, places, tables, blocks, block_size, last,
        width, first_key, scale, loop,
    )  # fmt: skip
    _share(control, ATTENTION, sequences, size, arguments)


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
