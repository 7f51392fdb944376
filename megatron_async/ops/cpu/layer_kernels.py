"""The layers of a dense decoder with 8-bit weights, as one compiled call for a step's decode rows.

A step of a small model is some 300 small loops. Between two of them Python and torch take as long
as many a loop (docs/records/cpu_throughput.md, 2026-11-26): modules are called, tensors made, locks
taken. Here the same loops follow each other without Python, and without its lock. Their results are
those of the modules, bit by bit.

Imported only where loops are compiled. See `jobs.py` about addresses.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit

from megatron_async.ops.cpu.attention_kernels import attention_addresses
from megatron_async.ops.cpu.pointers import call_at
from megatron_async.ops.cpu.products.jobs import (
    NEVER,
    attention,
    block_bytes,
    outputs_of_block,
    product,
)
from megatron_async.ops.cpu.row_kernels import floats, longs, norm_addresses, swiglu

COLUMNS = (
    "attention_norm", "qkv", "qkv_scales", "qkv_bias", "q_norm", "k_norm", "cache", "proj",
    "proj_scales", "mlp_norm", "fc1", "fc1_scales", "fc2", "fc2_scales",
)  # fmt: skip
"""Of the table of layers. Addresses: norms are float32 factors and products are of
`WidenedWeight`, or, without scales, of `GroupedWeight`; 0 where there is no norm of heads, or no
bias. `cache`: the layer's number in the
KV cache."""
(
    ATTENTION_NORM, QKV, QKV_SCALES, QKV_BIAS, Q_NORM, K_NORM, CACHE, PROJ, PROJ_SCALES,
    MLP_NORM, FC1, FC1_SCALES, FC2, FC2_SCALES,
) = range(len(COLUMNS))  # fmt: skip

SIZES = ("hidden", "ffn", "heads", "kv_heads", "dim", "rotated", "rope_positions")
"""Of the model: int64. The last two are of the tables of the rotary embedding."""
BATCH = (
    "rows", "sequences", "blocks", "block_size", "width", "first_key", "places", "layer_floats",
)  # fmt: skip
"""Of the step: int64. See `decode_attention`; `rows` are sequences x width, `layer_floats` from a
layer's keys to the next one's in the cache, whose values follow its keys."""
ADDRESSES = (
    "cos", "sin", "positions", "write_index", "tables", "last", "keys", "x", "out", "stream",
    "other", "normed", "qkv", "query", "attended", "both", "activated", "scratch",
)  # fmt: skip
"""Of what the step reads and writes:

cos, sin: float32 `[rope_positions, rotated]`.
positions, write_index: int64 `[rows]`.
tables, last: see `decode_attention`.
keys: of the first layer in the cache.
x: float32 `[rows, hidden]`, the first layer's input.
out: float32 `[whole_tiles(rows), hidden]`, the last layer's output; written.
stream, other: float32 `[rows, hidden]`; written. `stream` is the residual that `out` belongs to.
normed, qkv, query, attended, both, activated: float32, room for each part of a layer
    `[whole_tiles(rows), its width]`.
scratch: see `product`; of the product with the most inputs.
"""


@njit(nogil=True, cache=True, error_model="numpy")
def _product(
    control: Any, least: Any, chunk_bytes: Any, scratch: Any, x: Any, rows: Any, k: Any,
    weight: Any, scales: Any, outputs: Any, out: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """`product`, shared in chunks of so many bytes if the weight has at least `least`."""
    blocks, of_block = outputs // outputs_of_block(scales), block_bytes(k, scales)
    size = max(chunk_bytes // of_block, 1) if blocks * of_block >= least else blocks
    product(control, scratch, x, rows, k, weight, blocks, scales, out, size)


@njit(nogil=True, cache=True, error_model="numpy")
def _add_bias(
    x_at: Any, bias_at: Any, rows: Any, width: Any
) -> None:  # pragma: no cover - compiled
    x, bias = carray(floats(x_at), (rows, width)), carray(floats(bias_at), (width,))
    for row in range(rows):
        target = x[row]
        for i in range(width):
            target[i] += bias[i]


@njit(nogil=True, cache=True, error_model="numpy")
def decode_layers(
    loops: Any, control: Any, least: Any, chunk_bytes: Any, table: Any, sizes: Any, batch: Any,
    addresses: Any, eps: Any, head_eps: Any, scale: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """All layers, without the norm after them.

    Args:
        loops: addresses of the loops that may reorder sums: `loop_addresses`.
        control, least: see `Helpers.held`.
        chunk_bytes: of the weights that a thread takes at a time.
        table: int64 `[layers, COLUMNS]`.
        sizes, batch, addresses: int64 tuples of `SIZES`, `BATCH` and `ADDRESSES`.
        eps, head_eps: float32, of the layers' norms and of those of heads.
        scale: address of the factor of scores, float32.
    """
    norm, add_norm, rope_append, decode_attention = loops
    hidden, ffn, heads, kv_heads, dim, rotated, rope_positions = sizes
    rows, sequences, blocks, block_size, width, first_key, places, layer_floats = batch
    (
        cos_at, sin_at, positions_at, write_index_at, tables, last, keys_at, x, out, stream,
        other, normed, qkv, query_at, attended, both, activated, scratch,
    ) = addresses  # fmt: skip
    group, attention_size = heads // kv_heads, 1 if least < NEVER else sequences
    cos = carray(floats(cos_at), (rope_positions, rotated))
    sin = carray(floats(sin_at), (rope_positions, rotated))
    positions = carray(longs(positions_at), (rows,))
    write_index = carray(longs(write_index_at), (rows,))
    by_head = carray(floats(qkv), (rows, kv_heads, group + 2, dim))
    query = carray(floats(query_at), (rows, heads, dim))
    residual = x
    for layer in range(len(table)):
        one = table[layer]
        if layer == 0:
            call_at(norm, (x, one[ATTENTION_NORM], rows, hidden, eps, normed))
        else:
            weight = one[ATTENTION_NORM]
            call_at(add_norm, (out, residual, weight, rows, hidden, eps, normed, other))
            residual = other
        _product(
            control, least, chunk_bytes, scratch, normed, rows, hidden, one[QKV],
            one[QKV_SCALES], (heads + 2 * kv_heads) * dim, qkv,
        )  # fmt: skip
        if one[QKV_BIAS] != 0:
            _add_bias(qkv, one[QKV_BIAS], rows, (heads + 2 * kv_heads) * dim)
        layer_keys = keys_at + 4 * layer_floats * one[CACHE]
        layer_values = layer_keys + 4 * places * kv_heads * dim
        keys = carray(floats(layer_keys), (places, kv_heads, dim))
        values = carray(floats(layer_values), (places, kv_heads, dim))
        has_norm = one[Q_NORM] != 0
        # Where heads have no norms, these factors are not read.
        q_norm = carray(floats(one[Q_NORM] if has_norm else one[ATTENTION_NORM]), (dim,))
        k_norm = carray(floats(one[K_NORM] if has_norm else one[ATTENTION_NORM]), (dim,))
        arguments = (
            by_head, cos, sin, positions, write_index, keys, values, q_norm, k_norm, has_norm,
            head_eps, group, 0, query,
        )  # fmt: skip
        call_at(rope_append, arguments)
        attention(
            control, decode_attention, query_at, layer_keys, layer_values, attended, heads,
            kv_heads, dim, places, tables, sequences, blocks, block_size, last, width,
            first_key, scale, attention_size,
        )  # fmt: skip
        _product(
            control, least, chunk_bytes, scratch, attended, rows, heads * dim, one[PROJ],
            one[PROJ_SCALES], hidden, out,
        )  # fmt: skip
        weight = one[MLP_NORM]
        call_at(add_norm, (out, residual, weight, rows, hidden, eps, normed, stream))
        residual = stream
        _product(
            control, least, chunk_bytes, scratch, normed, rows, hidden, one[FC1],
            one[FC1_SCALES], 2 * ffn, both,
        )  # fmt: skip
        swiglu(both, rows, ffn, activated)
        _product(
            control, least, chunk_bytes, scratch, activated, rows, ffn, one[FC2],
            one[FC2_SCALES], hidden, out,
        )  # fmt: skip


@cache
def loop_addresses() -> tuple[int, int, int, int]:
    """Addresses of `norm`, `add_norm`, `rope_append` and `decode_attention`."""
    return *norm_addresses(), *attention_addresses()


def compile_loops() -> None:
    """Compile `decode_layers`, so that no first step does: with no layers it reads nothing."""
    table, eps = np.zeros((0, len(COLUMNS)), np.int64), np.float32(0)
    sizes, batch, addresses = ((1,) * len(names) for names in (SIZES, BATCH, ADDRESSES))
    decode_layers(loop_addresses(), 0, 0, 0, table, sizes, batch, addresses, eps, eps, 0)
