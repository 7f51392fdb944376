"""Loops of the decode rows of Mamba-2 and of Gated DeltaNet on a CPU; what they compute:
`mamba_reference.py` and `delta_reference.py`. Imported only where loops are compiled.

They take addresses (`at`), bytes from a row of a tensor to its next (`strides`) and sizes, each in
the order of its first lines, whether row_index is int64, not int32, and 1 in the dtype of all
numbers (`one`). An IndexError for a row that the pools do not have comes before any change.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray

from megatron_async.ops.cpu.float_math import exp
from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.cpu.row_kernels import REORDERS, longs, words
from megatron_async.ops.recurrent.cpu.step_loops import (
    add_entries,
    convolve,
    dot,
    numbers,
    pool_rows,
    read_state,
    read_state_twice,
    softplus,
    taps_of,
)


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REORDERS)
def mamba_decode(
    at: Any, strides: Any, sizes: Any, is_long: Any, one: Any
) -> None:  # pragma: no cover - compiled
    """Convolution and recurrence of Mamba-2's decode rows."""
    inputs_at, weight_at, bias_at, shift_at, a_log_at, d_at = at[:6]
    state_at, ring_at, gates_at, conv_at, index_at, positions_at, base_at, out_at = at[6:]
    input_row, state_row, ring_row, gates_row, conv_row, out_row = strides
    rows, width, count, heads, head_dim, groups, d_state, ring, conv_ring, size = sizes
    inner, strip, each = heads * head_dim, groups * d_state, heads // groups
    channels = inner + 2 * strip
    own_rows = pool_rows(index_at, is_long, rows, count)
    positions = carray(longs(positions_at), (rows * width,))
    bases = carray(words(base_at), (rows,))
    taps = taps_of(numbers(weight_at, (channels, 4), one))
    bias = numbers(bias_at, (channels,), one)
    shift, through = numbers(shift_at, (heads,), one), numbers(d_at, (heads,), one)
    a_log, rate = numbers(a_log_at, (heads,), one), np.empty(heads, bias.dtype)
    for h in range(heads):
        rate[h] = -exp(a_log[h])
    # Of a row's query tokens: all channels behind the convolution, C, and what C finds of each B.
    convolved, zeros = np.empty(channels, bias.dtype), np.zeros(channels, bias.dtype)
    c = np.empty((width, groups, d_state), bias.dtype)
    scores = np.empty((width, groups, ring), bias.dtype)
    # Of the tokens behind the state: bytes to each in the ring, sums of decays, gains.
    places, weights = np.empty(ring, np.int64), np.empty(ring, bias.dtype)
    decays, gains = np.empty((heads, ring), bias.dtype), np.empty((heads, ring), bias.dtype)
    for row in range(rows):
        first, base, pool_row = positions[row * width], np.int64(bases[row]), own_rows[row]
        raw_at = inputs_at + row * width * input_row + inner * size
        own_ring, own_gates = ring_at + pool_row * ring_row, gates_at + pool_row * gates_row
        end = first
        for query in range(width):
            position = first + query
            if first <= 0 or positions[row * width + query] != position:
                y = numbers(out_at + (row * width + query) * out_row, (inner,), one)
                for i in range(inner):
                    y[i] = one - one
                continue
            end += 1
            convolve(
                raw_at, input_row, conv_at + pool_row * conv_row, conv_ring, first, query, True,
                taps, bias, zeros, convolved, size, one,
            )  # fmt: skip
            entry = position % ring
            kept = numbers(own_ring + entry * (inner + strip) * size, (inner + strip,), one)
            for i in range(kept.shape[0]):
                kept[i] = convolved[i]
            for g in range(groups):
                for i in range(d_state):
                    c[query, g, i] = convolved[inner + strip + g * d_state + i]
            gates = numbers(own_gates + entry * 2 * heads * size, (2, heads), one)
            dts = numbers(raw_at + query * input_row + channels * size, (heads,), one)
            for h in range(heads):
                dt = bias.dtype.type(softplus(np.float64(dts[h]) + np.float64(shift[h])))
                gates[0, h], gates[1, h] = dt * rate[h], dt
        if end == first:
            continue
        exist = min(max(end - base, 0), ring)
        for i in range(exist):
            entry = (base + i) % ring
            places[i] = entry * (inner + strip) * size
            gates = numbers(own_gates + entry * 2 * heads * size, (2, heads), one)
            for h in range(heads):
                before = decays[h, i - 1] if i > 0 else one - one
                decays[h, i], gains[h, i] = before + gates[0, h], gates[1, h]
        for query in range(width):
            for g in range(groups):
                for i in range(min(first + query + 1 - base, exist)):
                    b_at = own_ring + places[i] + (inner + g * d_state) * size
                    scores[query, g, i] = dot(c[query, g], numbers(b_at, (d_state,), one), one)
        for h in range(heads):
            state_of_head = state_at + pool_row * state_row + h * head_dim * d_state * size
            state = numbers(state_of_head, (head_dim, d_state), one)
            decay, gain = decays[h], gains[h]
            for query in range(width):
                if positions[row * width + query] != first + query:
                    continue
                seen = min(first + query + 1 - base, exist)
                here, score = one - one, scores[query, h // each]
                if seen > 0:
                    here = decay[seen - 1]
                for i in range(seen):
                    weights[i] = exp(here - decay[i]) * gain[i] * score[i]
                if seen > 0:
                    weights[seen - 1] += through[h]
                y_at = out_at + (row * width + query) * out_row + h * head_dim * size
                y = numbers(y_at, (head_dim,), one)
                read_state(state, c[query, h // each], exp(here), y, one)
                add_entries(own_ring + h * head_dim * size, places, weights, 0, seen, y, one)


@njit(cache=True, error_model="numpy", fastmath=REORDERS)
def _normalise(
    strip: Any, begin: Any, heads: Any, eps: Any, scale: Any, out: Any, one: Any
) -> None:  # pragma: no cover - compiled
    """Into out, `[heads, key_dim]`: the elements of strip from `begin` on, each head of length
    `scale`."""
    dim = out.shape[1]
    for head in range(heads):
        target = out[head]
        for i in range(dim):
            target[i] = strip[begin + head * dim + i]
        factor = scale / np.sqrt(dot(target, target, one) + eps)
        for i in range(dim):
            target[i] *= factor


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REORDERS)
def delta_decode(
    at: Any, strides: Any, sizes: Any, is_long: Any, eps: Any, one: Any
) -> None:  # pragma: no cover - compiled
    """Convolution and recurrence of Gated DeltaNet's decode rows; `eps` is added to sums of
    squares."""
    inputs_at, weight_at, shift_at, a_log_at, state_at, ring_at, gates_at, conv_at = at[:8]
    index_at, positions_at, base_at, out_at = at[8:]
    input_row, state_row, ring_row, gates_row, conv_row, out_row = strides
    rows, width, count, key_heads, key_dim, heads, value_dim, ring, conv_ring, size = sizes
    keys, inner, each = key_heads * key_dim, heads * value_dim, heads // key_heads
    channels, entry_bytes = 2 * keys + inner, (inner + keys) * size
    own_rows = pool_rows(index_at, is_long, rows, count)
    positions = carray(longs(positions_at), (rows * width,))
    bases = carray(words(base_at), (rows,))
    taps = taps_of(numbers(weight_at, (channels, 4), one))
    shift, a_log = numbers(shift_at, (heads,), one), numbers(a_log_at, (heads,), one)
    # Of a row's query tokens: all channels behind the convolution, then q, k, v and beta, and what
    # the two find of each key.
    convolved, zeros = np.empty(channels, shift.dtype), np.zeros(channels, shift.dtype)
    q = np.empty((width, key_heads, key_dim), shift.dtype)
    k, v = np.empty_like(q), np.empty((width, heads, value_dim), shift.dtype)
    beta = np.empty((width, heads), shift.dtype)
    q_scores = np.empty((width, key_heads, ring), shift.dtype)
    k_scores = np.empty_like(q_scores)
    # Of the tokens behind the state: bytes to each in the ring, sums of decays.
    places, decays = np.empty(ring, np.int64), np.empty((heads, ring), shift.dtype)
    q_weights, k_weights = np.empty(ring, shift.dtype), np.empty(ring, shift.dtype)
    found = np.empty(value_dim, shift.dtype)
    for row in range(rows):
        first, base, pool_row = positions[row * width], np.int64(bases[row]), own_rows[row]
        raw_at = inputs_at + row * width * input_row
        own_ring, own_gates = ring_at + pool_row * ring_row, gates_at + pool_row * gates_row
        end = first
        for query in range(width):
            position = first + query
            if first <= 0 or positions[row * width + query] != position:
                y = numbers(out_at + (row * width + query) * out_row, (inner,), one)
                for i in range(inner):
                    y[i] = one - one
                continue
            end = position + 1
            convolve(
                raw_at, input_row, conv_at + pool_row * conv_row, conv_ring, first, query, True,
                taps, zeros, zeros, convolved, size, one,
            )  # fmt: skip
            scale = one / np.sqrt(shift.dtype.type(key_dim))
            _normalise(convolved, 0, key_heads, eps, scale, q[query], one)
            _normalise(convolved, keys, key_heads, eps, one, k[query], one)
            own_v = v[query]
            for h in range(heads):
                for p in range(value_dim):
                    own_v[h, p] = convolved[2 * keys + h * value_dim + p]
            entry = position % ring
            kept_at = own_ring + entry * entry_bytes + inner * size
            kept, own_k = numbers(kept_at, (key_heads, key_dim), one), k[query]
            for head in range(key_heads):
                for i in range(key_dim):
                    kept[head, i] = own_k[head, i]
            gates = numbers(own_gates + entry * heads * size, (heads,), one)
            gates_of_input = raw_at + query * input_row + (channels + inner) * size
            given = numbers(gates_of_input, (2, heads), one)
            for h in range(heads):
                beta[query, h] = 1.0 / (1.0 + math.exp(-np.float64(given[0, h])))
                step = softplus(np.float64(given[1, h]) + np.float64(shift[h]))
                gates[h] = -math.exp(np.float64(a_log[h])) * step
        if end == first:
            continue
        exist = min(max(end - base, 0), ring)
        for i in range(exist):
            entry = (base + i) % ring
            places[i] = entry * entry_bytes
            gates = numbers(own_gates + entry * heads * size, (heads,), one)
            for h in range(heads):
                decays[h, i] = (decays[h, i - 1] if i > 0 else one - one) + gates[h]
        for query in range(width):
            for head in range(key_heads):
                for i in range(min(first + query + 1 - base, exist)):
                    key_at = own_ring + places[i] + (inner + head * key_dim) * size
                    key = numbers(key_at, (key_dim,), one)
                    q_scores[query, head, i] = dot(q[query, head], key, one)
                    k_scores[query, head, i] = dot(k[query, head], key, one)
        for h in range(heads):
            head, values = h // each, own_ring + h * value_dim * size
            state_of_head = state_at + pool_row * state_row + h * value_dim * key_dim * size
            state, decay = numbers(state_of_head, (value_dim, key_dim), one), decays[h]
            for query in range(width):
                position = first + query
                if positions[row * width + query] != position:
                    continue
                seen = min(position + 1 - base, exist)
                here, by_q, by_k = one - one, q_scores[query, head], k_scores[query, head]
                if seen > 0:
                    here = decay[seen - 1]
                for i in range(seen):
                    share = exp(here - decay[i])
                    q_weights[i], k_weights[i] = share * by_q[i], share * by_k[i]
                y_at = out_at + (row * width + query) * out_row + h * value_dim * size
                y = numbers(y_at, (value_dim,), one)
                read_state_twice(state, k[query, head], q[query, head], exp(here), found, y, one)
                # The token's own entry is the last that it sees.
                add_entries(values, places, k_weights, 0, seen - 1, found, one)
                u = numbers(values + position % ring * entry_bytes, (value_dim,), one)
                own_v, step = v[query, h], beta[query, h]
                for p in range(value_dim):
                    u[p] = step * (own_v[p] - found[p])
                add_entries(values, places, q_weights, 0, seen, y, one)
