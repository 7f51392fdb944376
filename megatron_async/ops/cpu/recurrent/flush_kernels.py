"""Loops of what recurrent layers do once a step on a CPU: new bases, and inputs that move from the
rings into the states.

Imported only where loops are compiled. What is computed: `ops/recurrent/bases.py` and
`ops/recurrent/flush.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from megatron_async.ops.cpu.float_math import exp
from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.cpu.recurrent.recurrent_loops import add_entries, numbers, pool_rows
from megatron_async.ops.cpu.row_kernels import REORDERS, longs, words


@njit(cache=True, error_model="numpy")
def next_bases(
    base_at: Any, count: Any, index_at: Any, is_long: Any, positions_at: Any, rows: Any,
    width: Any, period: Any, lag: Any, before_at: Any, after_at: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Bases of decode rows before and after a step; the latter are stored.

    Args:
        base_at: address of int32 `[count]`, changed.
        count: rows of the pools.
        index_at: address of int64 or int32 `[rows]`: the pool row of each.
        is_long: whether they are int64.
        positions_at: address of int64 `[rows * width]`.
        rows, width: decode rows of the step, and query tokens of each.
        period, lag: of the flush rule.
        before_at, after_at: addresses of int32 `[rows]`, written.

    Raises:
        IndexError: the pools do not have a row; nothing was changed.
    """
    own_rows = pool_rows(index_at, is_long, rows, count)
    base, positions = carray(words(base_at), (count,)), carray(longs(positions_at), (rows * width,))
    before, after = carray(words(before_at), (rows,)), carray(words(after_at), (rows,))
    for row in range(rows):
        before[row] = base[own_rows[row]]
    for row in range(rows):
        first, found = positions[row * width], np.int64(before[row])
        if first > 0:
            found = max(found, max(first - lag, 0) // period * period)
        after[row] = found
        base[own_rows[row]] = found


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REORDERS)
def flush(
    at: Any, layer_strides: Any, row_strides: Any, sizes: Any, is_long: Any, has_saves: Any,
    one: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Bring the states of decode rows to their new bases, and keep some of them.

    Args:
        at: addresses of the state, ring_xb, ring_gates and conv of `RecurrentPools`, of row_index,
            of the bases before and after, and of saves.
        layer_strides, row_strides: bytes from a layer, and from a row, of the four pools to the
            next.
        sizes: layers, decode rows, rows of the pools, heads, rows of a head, columns, gates,
            channels of ring_xb, entries of the ring, numbers of the convolution's ring, bytes of a
            number.
        is_long: whether row_index is int64, not int32.
        has_saves: whether saves are given.
        one: 1 in the dtype of all numbers.

    Raises:
        IndexError: the pools do not have a row; nothing was changed.
    """
    state_at, ring_at, gates_at, conv_at, index_at, before_at, after_at, saves_at = at
    layers, rows, count, heads, lanes, columns, gates, channels, ring, inputs, size = sizes
    own_rows = pool_rows(index_at, is_long, rows, count)
    before, after = carray(words(before_at), (rows,)), carray(words(after_at), (rows,))
    saves = carray(words(saves_at), (rows,))
    if has_saves:
        for row in range(rows):
            if saves[row] >= count:
                raise IndexError("a row for a state to keep that the pools do not have")
    each = heads * columns // (channels - heads * lanes)
    like = numbers(state_at, (1,), one)
    places, weights = np.empty(ring, np.int64), np.empty((heads, ring), like.dtype)
    parts, kept = np.empty(ring, like.dtype), np.empty(heads, like.dtype)
    for layer in range(layers):
        for row in range(rows):
            begin, end = np.int64(before[row]), np.int64(after[row])
            due = min(end - begin, ring)
            if due <= 0:
                continue
            own_ring = ring_at + layer * layer_strides[1] + own_rows[row] * row_strides[1]
            own_gates = gates_at + layer * layer_strides[2] + own_rows[row] * row_strides[2]
            for h in range(heads):
                kept[h] = one - one
            for i in range(due - 1, -1, -1):
                entry = (begin + i) % ring
                places[i] = entry * channels * size
                gate = numbers(own_gates + entry * gates * heads * size, (gates, heads), one)
                for h in range(heads):
                    weights[h, i] = exp(kept[h])
                    kept[h] += gate[0, h]
                    if gates > 1:
                        weights[h, i] *= gate[1, h]
            own_state = state_at + layer * layer_strides[0] + own_rows[row] * row_strides[0]
            states = numbers(own_state, (heads, lanes, columns), one)
            for h in range(heads):
                left = exp(kept[h])
                right_at = own_ring + (heads * lanes + h // each * columns) * size
                for p in range(lanes):
                    lane_at = own_ring + (h * lanes + p) * size
                    for i in range(due):
                        parts[i] = numbers(lane_at + places[i], (1,), one)[0] * weights[h, i]
                    state = states[h, p]
                    for n in range(columns):
                        state[n] *= left
                    add_entries(right_at, places, parts, 0, due, state, one)
        for row in range(rows):
            if not has_saves or saves[row] < 0:
                continue
            state = state_at + layer * layer_strides[0]
            conv = conv_at + layer * layer_strides[3]
            source, target, whole = own_rows[row], np.int64(saves[row]), heads * lanes * columns
            given = numbers(state + source * row_strides[0], (whole,), one)
            copy = numbers(state + target * row_strides[0], (whole,), one)
            for i in range(whole):
                copy[i] = given[i]
            given = numbers(conv + source * row_strides[3], (inputs,), one)
            copy = numbers(conv + target * row_strides[3], (inputs,), one)
            for i in range(inputs):
                copy[i] = given[i]
