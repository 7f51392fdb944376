"""What the loops of recurrent layers share (numbers at an address, the convolution, sums of rows),
and the loops of what these layers do once a step: new bases, and inputs that move from the rings
into the states.

Imported only where loops are compiled. Loops are compiled for float32 and for float64, which the
number `one` of their arguments tells; `size` is the bytes of a number. Pools are given by their
addresses, because their rows may be strided, and because arrays cost more time to hand over. An
address is made only of rows that were checked and of places modulo a ring's length.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from megatron_async.ops.cpu.float_math import exp
from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.cpu.row_kernels import REORDERS, longs, words

TURN = 4
"""Rows of a state, or entries of a ring, that are multiplied at once."""


@intrinsic
def _pointer(typingctx: Any, address: Any, one: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(one).as_pointer())

    return types.CPointer(one)(types.int64, one), codegen


@njit(cache=True)
def numbers(address: Any, shape: Any, one: Any) -> Any:  # pragma: no cover - compiled
    """An array at an address, of the type of `one`."""
    return carray(_pointer(address, one), shape)


@njit(cache=True, error_model="numpy")
def pool_rows(
    index_at: Any, is_long: Any, rows: Any, count: Any
) -> Any:  # pragma: no cover - compiled
    """Pool rows of a step's rows, int64 `[rows]`, from int64 or int32 at an address; an IndexError
    if the pools, of `count` rows, have no such row."""
    found = np.empty(rows, np.int64)
    for row in range(rows):
        if is_long:
            found[row] = carray(longs(index_at), (rows,))[row]
        else:
            found[row] = carray(words(index_at), (rows,))[row]
        if found[row] < 0 or found[row] >= count:
            raise IndexError("a row that the pools of recurrent states do not have")
    return found


@njit(cache=True)
def softplus(x: Any) -> Any:  # pragma: no cover - compiled
    """log(1 + exp(x)), float64, as torch computes it."""
    return x if x > 20.0 else math.log1p(math.exp(x))


@njit(cache=True, error_model="numpy")
def _input_at(
    position: Any, first: Any, raw_at: Any, raw_stride: Any, kept_at: Any, entry_bytes: Any,
    ring: Any, zeros_at: Any,
) -> Any:  # pragma: no cover - compiled  # fmt: skip
    """Address of the convolution's inputs of a position: the step's own, or those of the ring."""
    if position >= first:
        return raw_at + (position - first) * raw_stride
    if position < 0:
        return zeros_at
    return kept_at + position % ring * entry_bytes


@njit(cache=True, error_model="numpy")
def taps_of(weight: Any) -> Any:  # pragma: no cover - compiled
    """Weights of a convolution, `[channels, 4]`, as `[4, channels]`.

    Made anew in each call: 6,144 channels take 8 us, and the convolution of one token 7. With the
    weights as they lie it takes 53, because LLVM cannot read them as vectors.
    """
    taps = np.empty((4, weight.shape[0]), weight.dtype)
    for tap in range(4):
        target = taps[tap]
        for i in range(target.shape[0]):
            target[i] = weight[i, tap]
    return taps


@njit(cache=True, error_model="numpy", fastmath=REORDERS)
def convolve(
    raw_at: Any, raw_stride: Any, kept_at: Any, ring: Any, first: Any, query: Any, keeps: Any,
    taps: Any, bias: Any, zeros: Any, out: Any, size: Any, one: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Causal convolution and SiLU of query token `query` of a row: inputs at `raw_at`, its ring of
    earlier ones at `kept_at`, `[4, channels]` taps, into `out`; `keeps`: its inputs go to the
    ring."""
    channels, at = out.shape[0], first + query
    entry, none = channels * size, zeros.ctypes.data
    given = raw_at, raw_stride, kept_at, entry, ring, none
    third = numbers(_input_at(at - 3, first, *given), (channels,), one)
    second = numbers(_input_at(at - 2, first, *given), (channels,), one)
    last = numbers(_input_at(at - 1, first, *given), (channels,), one)
    own = numbers(_input_at(at, first, *given), (channels,), one)
    of_third, of_second, of_last, of_own = taps[0], taps[1], taps[2], taps[3]
    for i in range(channels):
        value = bias[i] + third[i] * of_third[i] + second[i] * of_second[i]
        value += last[i] * of_last[i] + own[i] * of_own[i]
        out[i] = value / (one + exp(-value))
    if keeps:
        kept = numbers(kept_at + at % ring * entry, (channels,), one)
        for i in range(channels):
            kept[i] = own[i]


@njit(cache=True, error_model="numpy", fastmath=REORDERS)
def dot(left: Any, right: Any, one: Any) -> Any:  # pragma: no cover - compiled
    """Sum of products of two rows."""
    total = one - one
    for i in range(left.shape[0]):
        total += left[i] * right[i]
    return total


@njit(cache=True, error_model="numpy", fastmath=REORDERS)
def read_state(
    state: Any, columns: Any, factor: Any, out: Any, one: Any
) -> None:  # pragma: no cover - compiled
    """Into out, `[rows of the head]`: what columns find in a head's state `[rows, columns]`, times
    a factor."""
    p = 0
    while p + TURN <= state.shape[0]:
        first, second, third, fourth = state[p], state[p + 1], state[p + 2], state[p + 3]
        a = b = c = d = one - one
        for i in range(columns.shape[0]):
            a += first[i] * columns[i]
            b += second[i] * columns[i]
            c += third[i] * columns[i]
            d += fourth[i] * columns[i]
        out[p], out[p + 1], out[p + 2], out[p + 3] = a * factor, b * factor, c * factor, d * factor
        p += TURN
    while p < state.shape[0]:
        out[p] = dot(state[p], columns, one) * factor
        p += 1


@njit(cache=True, error_model="numpy", fastmath=REORDERS)
def read_state_twice(
    state: Any, keys: Any, queries: Any, factor: Any, by_keys: Any, by_queries: Any, one: Any
) -> None:  # pragma: no cover - compiled
    """`read_state` with two columns: the state is read once."""
    p = 0
    while p + 2 <= state.shape[0]:
        first, second = state[p], state[p + 1]
        a = b = c = d = one - one
        for i in range(keys.shape[0]):
            a += first[i] * keys[i]
            b += second[i] * keys[i]
            c += first[i] * queries[i]
            d += second[i] * queries[i]
        by_keys[p], by_keys[p + 1] = a * factor, b * factor
        by_queries[p], by_queries[p + 1] = c * factor, d * factor
        p += 2
    while p < state.shape[0]:
        by_keys[p] = dot(state[p], keys, one) * factor
        by_queries[p] = dot(state[p], queries, one) * factor
        p += 1


@njit(cache=True, error_model="numpy", fastmath=REORDERS)
def add_entries(
    ring_at: Any, places: Any, weights: Any, begin: Any, end: Any, out: Any, one: Any
) -> None:  # pragma: no cover - compiled
    """Add entries `begin` to `end` - 1 of a ring to out, each times its weight; `places` are bytes
    from `ring_at` to each."""
    elements, i = (out.shape[0],), begin
    while i + TURN <= end:
        first = numbers(ring_at + places[i], elements, one)
        second = numbers(ring_at + places[i + 1], elements, one)
        third = numbers(ring_at + places[i + 2], elements, one)
        fourth = numbers(ring_at + places[i + 3], elements, one)
        a, b, c, d = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        for p in range(out.shape[0]):
            out[p] += a * first[p] + b * second[p] + c * third[p] + d * fourth[p]
        i += TURN
    while i < end:
        first, a = numbers(ring_at + places[i], elements, one), weights[i]
        for p in range(out.shape[0]):
            out[p] += a * first[p]
        i += 1


@njit(cache=True, error_model="numpy")
def next_bases(
    base_at: Any, count: Any, index_at: Any, is_long: Any, positions_at: Any, rows: Any,
    width: Any, period: Any, lag: Any, before_at: Any, after_at: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Bases of decode rows before and after a step, from and to int32 and int64 at these addresses;
    an IndexError for a wrong row comes before any change."""
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
    """Bring the states of decode rows to their new bases, and keep some of them; arguments as the
    loops of `decode_loops.py` take them."""
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
