"""Loops of attention on float32: from the qkv projection to the cache, and decode attention."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from megatron_async.ops.cpu.float_math import exp
from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.cpu.pointers import address_of
from megatron_async.ops.cpu.row_kernels import LINE, REORDERS, fetch

KEYS = 4
"""Keys that are multiplied at once: a query is read, and an output written, once for them. Which
keys stand together depends on the row's own positions alone."""
AHEAD = 8
"""Keys from those that are multiplied to those that the cache is told to fetch. Of 200 keys of each
of eight sequences, a step of SmolLM2-135M on two threads of a Xeon takes 4.2 instead of 8.2 ms."""


@njit(inline="always", fastmath=REORDERS)
def _turn(
    source: Any, target: Any, cos: Any, sin: Any, weight: Any, has_norm: Any, eps: Any
) -> None:  # pragma: no cover - compiled
    """Normalise and rotate one head."""
    dim, rotated = source.shape[0], cos.shape[0]
    half = rotated // 2
    factor = np.float32(1.0)
    if has_norm:
        square = np.float32(0.0)
        for i in range(dim):
            square += source[i] * source[i]
        factor = np.float32(1.0) / np.sqrt(square / np.float32(dim) + eps)
        for i in range(dim):
            target[i] = source[i] * factor * weight[i]
    else:
        for i in range(dim):
            target[i] = source[i]
    low, high = target[:half], target[half:rotated]
    high_cos, high_sin = cos[half:], sin[half:]
    for i in range(half):
        first, second = low[i], high[i]
        low[i] = first * cos[i] - second * sin[i]
        high[i] = second * high_cos[i] + first * high_sin[i]


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REORDERS)
def rope_append(
    qkv: Any, cos: Any, sin: Any, positions: Any, places: Any, keys: Any, values: Any,
    q_weight: Any, k_weight: Any, has_norm: Any, eps: Any, group: Any, gates: Any, query: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """`ops/attention/rope_append.py`; qkv `[tokens, kv heads, heads of each, dim]`, caches flat."""
    for token in range(qkv.shape[0]):
        row_cos, row_sin = cos[positions[token]], sin[positions[token]]
        place = places[token]
        for head in range(qkv.shape[1]):
            for i in range(group):
                _turn(
                    qkv[token, head, i], query[token, head * group + i], row_cos, row_sin,
                    q_weight, has_norm, eps,
                )  # fmt: skip
            _turn(
                qkv[token, head, group + gates], keys[place, head], row_cos, row_sin,
                k_weight, has_norm, eps,
            )  # fmt: skip
            for i in range(keys.shape[2]):
                values[place, head, i] = qkv[token, head, group + gates + 1, i]


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REORDERS)
def decode_attention(
    query: Any, keys: Any, values: Any, tables: Any, block_size: Any, positions: Any, width: Any,
    first_key: Any, window: Any, scale: Any, softcap: Any, sinks: Any, first_row: Any,
    end_row: Any, out: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Attention of decode rows `first_row` to `end_row`, each of `width` query tokens.

    query, out `[rows * width, heads, dim]`; keys, values `[places, kv heads, dim]`; tables `[rows,
    blocks]`; positions `[rows * width]`: a query sees the keys from min(its position, first_key) to
    its position, and of these the last `window`, unless that is 0. `softcap` bounds scores, unless
    it is 0. sinks `[heads]`, or empty.
    """
    heads, dim, kv_heads = query.shape[1], query.shape[2], keys.shape[1]
    group = heads // kv_heads
    most = np.int64(0)
    for token in range(first_row * width, end_row * width):
        most = max(most, positions[token])
    room = most + 1 if window == 0 else min(most + 1, window + block_size)
    scores = np.empty((heads, room), dtype=np.float32)
    key_bytes = 4 * kv_heads * dim
    keys_ahead = keys.ctypes.data + AHEAD * key_bytes
    values_ahead = values.ctypes.data + AHEAD * key_bytes
    for row in range(first_row, end_row):
        for token in range(row * width, (row + 1) * width):
            length = positions[token] + 1
            begin = min(positions[token], first_key)
            if window > 0:
                begin = max(begin, length - window)
            first_block, end_block = begin // block_size, (length - 1) // block_size + 1
            origin = first_block * block_size  # of the row's scores
            one, target = query[token], out[token]
            # All heads of a key before the next key: memory is read in its own order.
            for block in range(first_block, end_block):
                start = block * block_size
                place = tables[row, block] * block_size - start
                j, end = max(begin, start), min(length, start + block_size)
                while j + KEYS <= end:
                    for line in range(0, KEYS * key_bytes, LINE):
                        fetch(keys_ahead + (place + j) * key_bytes + line)
                    for head in range(kv_heads):
                        first, second = keys[place + j, head], keys[place + j + 1, head]
                        third, fourth = keys[place + j + 2, head], keys[place + j + 3, head]
                        for h in range(head * group, (head + 1) * group):
                            _dot4(
                                one[h], first, second, third, fourth, scale, scores[h], j - origin
                            )
                    j += KEYS
                while j < end:
                    for head in range(kv_heads):
                        for h in range(head * group, (head + 1) * group):
                            scores[h, j - origin] = _dot(one[h], keys[place + j, head]) * scale
                    j += 1
            for h in range(heads):
                seen = scores[h, begin - origin : length - origin]
                if softcap > 0:
                    _cap(seen, softcap)
                _softmax(seen, sinks, h)
                for i in range(dim):
                    target[h, i] = np.float32(0.0)
            for block in range(first_block, end_block):
                start = block * block_size
                place = tables[row, block] * block_size - start
                j, end = max(begin, start), min(length, start + block_size)
                while j + KEYS <= end:
                    for line in range(0, KEYS * key_bytes, LINE):
                        fetch(values_ahead + (place + j) * key_bytes + line)
                    for head in range(kv_heads):
                        first, second = values[place + j, head], values[place + j + 1, head]
                        third, fourth = values[place + j + 2, head], values[place + j + 3, head]
                        for h in range(head * group, (head + 1) * group):
                            _add4(target[h], first, second, third, fourth, scores[h], j - origin)
                    j += KEYS
                while j < end:
                    for head in range(kv_heads):
                        for h in range(head * group, (head + 1) * group):
                            _add(target[h], values[place + j, head], scores[h, j - origin])
                    j += 1


@njit(inline="always", fastmath=REORDERS)
def _dot(one: Any, key: Any) -> Any:  # pragma: no cover - compiled
    total = np.float32(0.0)
    for i in range(one.shape[0]):
        total += one[i] * key[i]
    return total


@njit(inline="always", fastmath=REORDERS)
def _dot4(
    one: Any, first: Any, second: Any, third: Any, fourth: Any, scale: Any, scores: Any, j: Any
) -> None:  # pragma: no cover - compiled
    """Four `_dot`s, times scale, into `scores[j]` to `scores[j + 3]`."""
    a = b = c = d = np.float32(0.0)
    for i in range(one.shape[0]):
        a += one[i] * first[i]
        b += one[i] * second[i]
        c += one[i] * third[i]
        d += one[i] * fourth[i]
    scores[j] = a * scale
    scores[j + 1] = b * scale
    scores[j + 2] = c * scale
    scores[j + 3] = d * scale


@njit(inline="always", fastmath=REORDERS)
def _add(target: Any, value: Any, weight: Any) -> None:  # pragma: no cover - compiled
    for i in range(target.shape[0]):
        target[i] += weight * value[i]


@njit(inline="always", fastmath=REORDERS)
def _add4(
    target: Any, first: Any, second: Any, third: Any, fourth: Any, weights: Any, j: Any
) -> None:  # pragma: no cover - compiled
    """Four `_add`s, with the weights from `weights[j]` on."""
    a, b, c, d = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
    for i in range(target.shape[0]):
        target[i] += a * first[i] + b * second[i] + c * third[i] + d * fourth[i]


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REORDERS)
def _cap(scores: Any, softcap: Any) -> None:  # pragma: no cover - compiled
    double = np.float32(2.0) * softcap
    share = np.float32(2.0) / softcap
    for j in range(len(scores)):
        # tanh by one exponential, whose error is some 1e-7 of the cap.
        scores[j] = softcap - double / (exp(scores[j] * share) + np.float32(1.0))


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REORDERS)
def _softmax(seen: Any, sinks: Any, head: Any) -> None:  # pragma: no cover - compiled
    has_sink = len(sinks) > 0
    most = sinks[head] if has_sink else seen[0]
    for j in range(len(seen)):
        most = max(most, seen[j])
    total = exp(sinks[head] - most) if has_sink else np.float32(0.0)
    for j in range(len(seen)):
        weight = exp(seen[j] - most)
        seen[j] = weight
        total += weight
    share = np.float32(1.0) / total
    for j in range(len(seen)):
        seen[j] *= share


def attention_addresses() -> tuple[int, int]:
    """`pointers.address_of` of `rope_append` and of `decode_attention`."""
    one, two, three, four = (types.Array(types.float32, count, "C") for count in range(1, 5))
    number, longs = types.int64, types.Array(types.int64, 1, "C")
    tables = types.Array(types.int32, 2, "C")
    return (
        address_of(
            rope_append, four, two, two, longs, longs, three, three, one, one, types.boolean,
            types.float32, number, number, three,
        ),
        address_of(
            decode_attention, three, three, three, tables, number, longs, number, number, number,
            types.float32, types.float32, one, number, number, three,
        ),
    )  # fmt: skip
