"""The layers of a dense decoder with 8-bit weights, as one compiled call.

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
from numba import carray

from megatron_async.ops.attention.cpu.attention_kernels import attention_addresses
from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.cpu.row_kernels import floats, norm_addresses
from megatron_async.ops.linear.cpu.jobs import (
    ACTIVATE,
    ATTEND,
    NEVER,
    NORM,
    ROW_CHUNKS,
    TURN,
    multiply_rounded,
    rows_of_chunk,
    share,
)
from megatron_async.ops.linear.cpu.weight_record import OUTPUTS, block_bytes, field

COLUMNS = (
    "attention_norm", "qkv", "qkv_record", "qkv_bias", "q_norm", "k_norm", "cache", "proj",
    "proj_record", "mlp_norm", "fc1", "fc1_record", "fc2", "fc2_record",
)  # fmt: skip
"""Columns of the table of layers, int64. Addresses: norms are float32 factors and products are of a
`WidenedWeight` or a `GroupedWeight`, each with its record; 0 where there is no norm of heads, or no
bias. `cache`: the layer's number in the KV cache."""
(
    ATTENTION_NORM, QKV, QKV_RECORD, QKV_BIAS, Q_NORM, K_NORM, CACHE, PROJ, PROJ_RECORD,
    MLP_NORM, FC1, FC1_RECORD, FC2, FC2_RECORD,
) = range(len(COLUMNS))  # fmt: skip

SIZES = ("hidden", "ffn", "heads", "kv_heads", "dim", "rotated", "rope_positions")
"""Sizes of the model: int64. The last two are of the tables of the rotary embedding."""
BATCH = (
    "rows", "sequences", "blocks", "block_size", "width", "first_key", "places", "layer_floats",
)  # fmt: skip
"""Sizes of the step: int64. See `decode_attention`; `rows` are sequences x width, `layer_floats`
from a layer's keys to the next one's in the cache, whose values follow its keys."""
ADDRESSES = (
    "cos", "sin", "positions", "write_index", "tables", "last", "keys", "x", "out", "stream",
    "other", "normed", "qkv", "query", "attended", "both", "activated", "scratch",
)  # fmt: skip
"""Addresses of what the step reads and writes:

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

FACTORS = ("eps", "head_eps", "scale")
"""By one address, float32: of the layers' norms, of heads' norms, and of scores."""


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply(
    work: Any, k: Any, weight: Any, record: Any, outputs: Any, out: Any
) -> None:  # pragma: no cover - compiled
    """`multiply_rounded`, in chunks of so many bytes if the weight has at least `least`."""
    control, least, chunk_bytes, scratch, rows = work
    blocks, of_block = outputs // field(record, OUTPUTS), block_bytes(record, k)
    size = max(chunk_bytes // of_block, 1) if blocks * of_block >= least else blocks
    multiply_rounded(control, scratch, rows, k, weight, blocks, record, out, size)


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
def run_layers(
    loops: Any, control: Any, least: Any, chunk_bytes: Any, table: Any, sizes: Any, batch: Any,
    addresses: Any, factors: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """All layers, without the norm after them: loops of `loop_addresses`, which may reorder sums,
    `control` and `least` of `Helpers.held`, and the table and the records of numbers above."""
    norm, add_norm, rope_append, decode_attention = loops
    hidden, ffn, heads, kv_heads, dim, rotated, rope_positions = sizes
    rows, sequences, blocks, block_size, width, first_key, places, layer_floats = batch
    (
        cos, sin, positions, write_index, tables, last, keys_at, x, out, stream, other, normed,
        qkv, query, attended, both, activated, scratch,
    ) = addresses  # fmt: skip
    eps, head_eps, scale = factors, factors + 4, factors + 8
    group, qkv_width = heads // kv_heads, (heads + 2 * kv_heads) * dim
    is_shared = least < NEVER
    some_rows = rows_of_chunk(rows, is_shared)
    some_sequences = (sequences + ROW_CHUNKS - 1) // ROW_CHUNKS if is_shared else sequences
    residual, work = x, (control, least, chunk_bytes, scratch, rows)
    for layer in range(len(table)):
        one = table[layer]
        record, weight = one[QKV_RECORD], one[ATTENTION_NORM]
        if layer == 0:
            arguments = (x, hidden, record, scratch, 0, weight, eps, 0, normed, norm)
        else:
            arguments = (
                out, hidden, record, scratch, residual, weight, eps, other, normed, add_norm,
            )  # fmt: skip
            residual = other
        share(control, NORM, rows, some_rows, arguments)
        _multiply(work, hidden, one[QKV], record, qkv_width, qkv)
        if one[QKV_BIAS] != 0:
            _add_bias(qkv, one[QKV_BIAS], rows, qkv_width)
        keys = keys_at + 4 * layer_floats * one[CACHE]
        values = keys + 4 * places * kv_heads * dim
        has_norm = one[Q_NORM] != 0
        # Where heads have no norms, these factors are not read.
        q_norm = one[Q_NORM] if has_norm else one[ATTENTION_NORM]
        k_norm = one[K_NORM] if has_norm else one[ATTENTION_NORM]
        turn = (
            qkv, cos, sin, positions, write_index, keys, values, q_norm, k_norm, int(has_norm),
            head_eps, group, query, kv_heads, dim, rotated, rope_positions, places, rope_append,
        )  # fmt: skip
        share(control, TURN, rows, some_rows, turn)
        record = one[PROJ_RECORD]
        attend = (
            query, keys, values, attended, heads, kv_heads, dim, places, tables, blocks,
            block_size, last, width, first_key, scale, decode_attention, record, scratch,
        )  # fmt: skip
        share(control, ATTEND, sequences, some_sequences, attend)
        _multiply(work, heads * dim, one[PROJ], record, hidden, out)
        record, weight = one[FC1_RECORD], one[MLP_NORM]
        arguments = (
            out, hidden, record, scratch, residual, weight, eps, stream, normed, add_norm,
        )  # fmt: skip
        share(control, NORM, rows, some_rows, arguments)
        residual = stream
        _multiply(work, hidden, one[FC1], record, 2 * ffn, both)
        record = one[FC2_RECORD]
        share(control, ACTIVATE, rows, some_rows, (both, ffn, record, scratch, activated, 1))
        _multiply(work, ffn, one[FC2], record, hidden, out)


@cache
def loop_addresses() -> tuple[int, int, int, int]:
    """Addresses of `norm`, `add_norm`, `rope_append` and `decode_attention`."""
    return *norm_addresses(), *attention_addresses()


def compile_loops() -> None:
    """Compile `run_layers`, so that no first step does: with no layers it reads nothing."""
    table = np.zeros((0, len(COLUMNS)), np.int64)
    sizes, batch, addresses = ((1,) * len(names) for names in (SIZES, BATCH, ADDRESSES))
    run_layers(loop_addresses(), 0, 0, 0, table, sizes, batch, addresses, 0)
