"""The parts of a job that are cut by rows: what stands between the products of a layer.

Each rounds the rows that it has made for the product behind it, as long as they are in its cache.
Where one thread did this alone, the others waited for a tenth of a step of eight rows.

A function has its rows from first to last, and finds the rest in `control`, in the order in which
`jobs.py` puts it there. Imported only where loops are compiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray
from numba.extending import register_jitable

from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.cpu.pointers import call_at
from megatron_async.ops.cpu.row_kernels import (
    floats,
    integers,
    longs,
    squared_relu,
    swiglu,
    words,
)
from megatron_async.ops.linear.cpu.atomics import LENGTH, argument, read
from megatron_async.ops.linear.cpu.group_rows import round_groups, row_bytes
from megatron_async.ops.linear.cpu.integer_products import round_rows, whole_tiles
from megatron_async.ops.linear.cpu.integer_tile import STEP
from megatron_async.ops.linear.cpu.weight_record import IS_FINE, SCALES, field

OF_LAYER, OF_STEP = 10, 16
"""Numbers of a Mamba-2 layer, and of a step of such layers: see `mixing`."""


@register_jitable
def factors_at(scratch: Any, rows: Any, k: Any) -> Any:
    """Where in scratch the factors of `round_rows` are."""
    return scratch + 2 * STEP * whole_tiles(rows) * ((k + STEP - 1) // STEP)


@njit(nogil=True, cache=True, error_model="numpy")
def round_some(
    x: Any, rows: Any, k: Any, record: Any, scratch: Any, first: Any, last: Any
) -> None:  # pragma: no cover - compiled
    """Rows of x, float32 `[rows, k]`, into scratch, as the product by a weight reads them; record:
    the weight's."""
    source, count = x + 4 * first * k, last - first
    if field(record, SCALES) == 0:
        is_fine = field(record, IS_FINE) != 0
        round_groups(source, count, k, is_fine, scratch + first * row_bytes(k, is_fine))
        return
    width = (k + STEP - 1) // STEP * STEP
    # The part with the last row has the rows that fill its tile.
    room = count if last < rows else whole_tiles(rows) - first
    round_rows(
        source,
        count,
        k,
        carray(integers(scratch + 2 * width * first), (room, width)),
        carray(floats(factors_at(scratch, rows, k) + 4 * first), (room,)),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def rounding(control: Any, first: Any, last: Any) -> None:  # pragma: no cover - compiled
    """`(x, k, record, scratch)`: see `round_some`."""
    x, k, record = argument(control, 0), argument(control, 1), argument(control, 2)
    round_some(x, read(control + LENGTH), k, record, argument(control, 3), first, last)


@njit(nogil=True, cache=True, error_model="numpy")
def normalising(control: Any, first: Any, last: Any) -> None:  # pragma: no cover - compiled
    """`(x, k, record, scratch, residual, weight, eps, total, out, loop)`: `norm` of x, or
    `add_norm` where the address of a residual is not 0; then its rounding. eps is the address of a
    float32, and loop the norm's address."""
    x, k, residual = argument(control, 0), argument(control, 1), argument(control, 4)
    weight, eps = argument(control, 5), carray(floats(argument(control, 6)), (1,))[0]
    total, out, loop = argument(control, 7), argument(control, 8), argument(control, 9)
    begin, count = 4 * first * k, last - first
    if residual == 0:
        call_at(loop, (x + begin, weight, count, k, eps, out + begin))
    else:
        arguments = (
            x + begin, residual + begin, weight, count, k, eps, out + begin, total + begin,
        )  # fmt: skip
        call_at(loop, arguments)
    record, scratch = argument(control, 2), argument(control, 3)
    round_some(out, read(control + LENGTH), k, record, scratch, first, last)


@njit(nogil=True, cache=True, error_model="numpy")
def activating(control: Any, first: Any, last: Any) -> None:  # pragma: no cover - compiled
    """`(x, k, record, scratch, out, gated)`: `swiglu` of x, `[rows, 2, k]`, or `squared_relu`, of
    `[rows, k]`, and its rounding."""
    x, k, out = argument(control, 0), argument(control, 1), argument(control, 4)
    if argument(control, 5) != 0:
        swiglu(x + 8 * first * k, last - first, k, out + 4 * first * k)
    else:
        squared_relu(x + 4 * first * k, (last - first) * k, out + 4 * first * k)
    record, scratch = argument(control, 2), argument(control, 3)
    round_some(out, read(control + LENGTH), k, record, scratch, first, last)


@njit(nogil=True, cache=True, error_model="numpy")
def turning(control: Any, first: Any, last: Any) -> None:  # pragma: no cover - compiled
    """`(qkv, cos, sin, positions, write_index, keys, values, q_norm, k_norm, has_norm, eps, group,
    query, kv_heads, dim, rotated, rope_positions, places, loop)`: `rope_append`; eps is the address
    of a float32."""
    group, kv_heads, dim = argument(control, 11), argument(control, 13), argument(control, 14)
    count, heads = last - first, group * kv_heads
    table = (argument(control, 16), argument(control, 15))
    cached = (argument(control, 17), kv_heads, dim)
    qkv = argument(control, 0) + 4 * first * (heads + 2 * kv_heads) * dim
    eps = carray(floats(argument(control, 10)), (1,))[0]
    arguments = (
        carray(floats(qkv), (count, kv_heads, group + 2, dim)),
        carray(floats(argument(control, 1)), table), carray(floats(argument(control, 2)), table),
        carray(longs(argument(control, 3) + 8 * first), (count,)),
        carray(longs(argument(control, 4) + 8 * first), (count,)),
        carray(floats(argument(control, 5)), cached), carray(floats(argument(control, 6)), cached),
        carray(floats(argument(control, 7)), (dim,)), carray(floats(argument(control, 8)), (dim,)),
        argument(control, 9) != 0, eps, group, 0,
        carray(floats(argument(control, 12) + 4 * first * heads * dim), (count, heads, dim)),
    )  # fmt: skip
    call_at(argument(control, 18), arguments)


@njit(nogil=True, cache=True, error_model="numpy")
def attending(control: Any, first: Any, last: Any) -> None:  # pragma: no cover - compiled
    """`(query, keys, values, out, heads, kv_heads, dim, places, tables, blocks, block_size, last,
    width, first_key, scale, loop, record, scratch)`: `decode_attention` of sequences first to last,
    and the rounding of their rows; scale is the address of a float32."""
    heads, kv_heads, dim = argument(control, 4), argument(control, 5), argument(control, 6)
    sequences, width = read(control + LENGTH), argument(control, 12)
    rows, cached = (sequences * width, heads, dim), (argument(control, 7), kv_heads, dim)
    query = carray(floats(argument(control, 0)), rows)
    keys = carray(floats(argument(control, 1)), cached)
    values = carray(floats(argument(control, 2)), cached)
    out = carray(floats(argument(control, 3)), rows)
    tables = carray(words(argument(control, 8)), (sequences, argument(control, 9)))
    last_keys = carray(longs(argument(control, 11)), (sequences * width,))
    scale = carray(floats(argument(control, 14)), (1,))[0]
    no_sinks = carray(floats(argument(control, 14)), (0,))
    arguments = (
        query, keys, values, tables, argument(control, 10), last_keys, width,
        argument(control, 13), 0, scale, np.float32(0.0), no_sinks, first, last, out,
    )  # fmt: skip
    call_at(argument(control, 15), arguments)
    record, scratch = argument(control, 16), argument(control, 17)
    round_some(
        argument(control, 3), sequences * width, heads * dim, record, scratch, first * width,
        last * width,
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def mixing(control: Any, first: Any, last: Any) -> None:  # pragma: no cover - compiled
    """`(projected, outputs, y, normed, layer, step, eps, loop, norm_loop, record, scratch)`:
    `mamba_decode` of sequences first to last, their gated norm, and the rounding of their rows. eps
    is the address of a float32. At `layer` are `OF_LAYER` addresses, of the parameters, the norm's
    weight and the pools; at `step` `OF_STEP` numbers: where pool rows, positions and bases are,
    whether rows are int64, and sizes and strides as `mamba_decode` takes them."""
    outputs, y, normed = argument(control, 1), argument(control, 2), argument(control, 3)
    layer = carray(longs(argument(control, 4)), (OF_LAYER,))
    step = carray(longs(argument(control, 5)), (OF_STEP,))
    eps = carray(floats(argument(control, 6)), (1,))[0]
    sequences, width = read(control + LENGTH), step[4]
    heads, head_dim, groups = step[6], step[7], step[8]
    inner, begin, count = heads * head_dim, first * width, last - first
    own, out = argument(control, 0) + 4 * begin * outputs, y + 4 * begin * inner
    at = (
        own, layer[0], layer[1], layer[2], layer[3], layer[4], layer[6], layer[7], layer[8],
        layer[9], step[0] + (8 if step[3] != 0 else 4) * first, step[1] + 8 * begin,
        step[2] + 4 * first, out,
    )  # fmt: skip
    strides = (4 * outputs, step[12], step[13], step[14], step[15], 4 * inner)
    sizes = (
        count, width, step[5], heads, head_dim, groups, step[9], step[10], step[11], np.int64(4),
    )  # fmt: skip
    call_at(argument(control, 7), (at, strides, sizes, step[3] != 0, np.float32(1)))
    target = normed + 4 * begin * inner
    arguments = (
        out, 4 * inner, own, 4 * outputs, layer[5], count * width, groups, inner // groups, eps,
        target,
    )  # fmt: skip
    call_at(argument(control, 8), arguments)
    record, scratch = argument(control, 9), argument(control, 10)
    round_some(normed, sequences * width, inner, record, scratch, begin, last * width)
