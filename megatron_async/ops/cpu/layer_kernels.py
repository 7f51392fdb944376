"""The layers of a dense or hybrid decoder with weights of few bits, as one compiled call.

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
from numba import carray, types

from megatron_async.ops.attention.cpu.attention_kernels import attention_addresses
from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.cpu.pointers import address_of
from megatron_async.ops.cpu.row_kernels import floats, gated_norm, norm_addresses
from megatron_async.ops.linear.cpu.jobs import (
    ACTIVATE,
    ATTEND,
    MIX,
    NEVER,
    NORM,
    ROW_CHUNKS,
    TURN,
    multiply_rounded,
    rows_of_chunk,
    share,
)
from megatron_async.ops.linear.cpu.row_jobs import OF_LAYER
from megatron_async.ops.linear.cpu.weight_record import OUTPUTS, block_bytes, field
from megatron_async.ops.recurrent.cpu.decode_loops import mamba_decode

COLUMNS = (
    "kind", "norm", "first", "first_record", "outputs", "last", "last_record", "inputs", "bias",
    "q_norm", "k_norm", "number", "gated",
)  # fmt: skip
"""Columns of the table of layers, int64. Each layer is a norm, a product with so many outputs, what
`kind` says, and a product with so many inputs. Addresses: norms are float32 factors and products
are of a `WidenedWeight` or a `GroupedWeight`, each with its record; 0 where there is no norm of
heads, or no bias. `number`: of the layer in the KV cache, or among the Mamba-2 layers; `gated`: an
MLP has SwiGLU, else squared ReLU."""
(
    KIND, BEFORE, FIRST, FIRST_RECORD, FIRST_OUTPUTS, LAST, LAST_RECORD, INPUTS, BIAS, Q_NORM,
    K_NORM, NUMBER, GATED,
) = range(len(COLUMNS))  # fmt: skip
ATTENTION, MLP, MAMBA = range(3)
"""Kinds of layers."""

SIZES = ("hidden", "heads", "kv_heads", "dim", "rotated", "rope_positions")
"""Sizes of the model: int64. The last two are of the tables of the rotary embedding."""
BATCH = (
    "rows", "sequences", "blocks", "block_size", "width", "first_key", "places", "layer_floats",
)  # fmt: skip
"""Sizes of the step: int64. See `decode_attention`; `rows` are sequences x width, `layer_floats`
from a layer's keys to the next one's in the cache, whose values follow its keys."""
ADDRESSES = (
    "cos", "sin", "positions", "write_index", "tables", "last", "keys", "x", "out", "stream",
    "other", "states", "state_step", "normed", "projected", "query", "mixed", "scratch",
)  # fmt: skip
"""Addresses of what the step reads and writes:

cos, sin: float32 `[rope_positions, rotated]`.
positions, write_index: int64 `[rows]`.
tables, last: see `decode_attention`.
keys: of the first layer in the cache.
x: float32 `[rows, hidden]`, the first layer's input.
out: float32 `[whole_tiles(rows), hidden]`, the last layer's output; written.
stream, other: float32 `[rows, hidden]`; written. The residual that `out` belongs to is in `stream`
    of an even number of layers, else in `other`.
states: int64 `[Mamba-2 layers, OF_LAYER]`, and state_step: int64 `[OF_STEP]`; see `mixing`.
normed, projected, query, mixed: float32, room for each part of a layer `[whole_tiles(rows), its
    width]`.
scratch: see `product`; of the product with the most inputs.
"""

FACTORS = ("eps", "head_eps", "scale", "gated_eps")
"""By one address, float32: of the layers' norms, of heads' norms, of scores, and of Mamba-2's
norms."""


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
    norm, add_norm, rope_append, decode_attention, mamba_decode, gated_norm = loops
    hidden, heads, kv_heads, dim, rotated, rope_positions = sizes
    rows, sequences, blocks, block_size, width, first_key, places, layer_floats = batch
    (
        cos, sin, positions, write_index, tables, last, keys_at, x, out, stream, other, states,
        state_step, normed, projected, query, mixed, scratch,
    ) = addresses  # fmt: skip
    eps, head_eps, scale, gated_eps = factors, factors + 4, factors + 8, factors + 12
    group = heads // kv_heads
    is_shared = least < NEVER
    some_rows = rows_of_chunk(rows, is_shared)
    some_sequences = (sequences + ROW_CHUNKS - 1) // ROW_CHUNKS if is_shared else sequences
    residual, work = x, (control, least, chunk_bytes, scratch, rows)
    for layer in range(len(table)):
        one = table[layer]
        record, weight = one[FIRST_RECORD], one[BEFORE]
        if layer == 0:
            arguments = (x, hidden, record, scratch, 0, weight, eps, 0, normed, norm)
        else:
            total = stream if layer % 2 else other
            arguments = (
                out, hidden, record, scratch, residual, weight, eps, total, normed, add_norm,
            )  # fmt: skip
            residual = total
        share(control, NORM, rows, some_rows, arguments)
        outputs, inputs, kind = one[FIRST_OUTPUTS], one[INPUTS], one[KIND]
        _multiply(work, hidden, one[FIRST], record, outputs, projected)
        if one[BIAS] != 0:
            _add_bias(projected, one[BIAS], rows, outputs)
        record = one[LAST_RECORD]
        if kind == ATTENTION:
            keys = keys_at + 4 * layer_floats * one[NUMBER]
            values = keys + 4 * places * kv_heads * dim
            has_norm = one[Q_NORM] != 0
            # Where heads have no norms, these factors are not read.
            q_norm = one[Q_NORM] if has_norm else weight
            k_norm = one[K_NORM] if has_norm else weight
            turn = (
                projected, cos, sin, positions, write_index, keys, values, q_norm, k_norm,
                int(has_norm), head_eps, group, query, kv_heads, dim, rotated, rope_positions,
                places, rope_append,
            )  # fmt: skip
            share(control, TURN, rows, some_rows, turn)
            attend = (
                query, keys, values, mixed, heads, kv_heads, dim, places, tables, blocks,
                block_size, last, width, first_key, scale, decode_attention, record, scratch,
            )  # fmt: skip
            share(control, ATTEND, sequences, some_sequences, attend)
        elif kind == MLP:
            activate = (projected, inputs, record, scratch, mixed, one[GATED])
            share(control, ACTIVATE, rows, some_rows, activate)
        else:
            mix = (
                projected, outputs, query, mixed, states + 8 * OF_LAYER * one[NUMBER], state_step,
                gated_eps, mamba_decode, gated_norm, record, scratch,
            )  # fmt: skip
            share(control, MIX, sequences, some_sequences, mix)
        _multiply(work, inputs, one[LAST], record, hidden, out)


@cache
def loop_addresses() -> tuple[int, ...]:
    """Addresses of `norm`, `add_norm`, `rope_append`, `decode_attention`, `mamba_decode` and
    `gated_norm`."""
    number = types.int64
    mamba = address_of(
        mamba_decode,
        *(types.UniTuple(number, count) for count in (14, 6, 10)),
        types.boolean,
        types.float32,
    )
    gated = address_of(gated_norm, *[number] * 8, types.float32, number)
    return *norm_addresses(), *attention_addresses(), mamba, gated


def compile_loops() -> None:
    """Compile `run_layers`, so that no first step does: with no layers it reads nothing."""
    table = np.zeros((0, len(COLUMNS)), np.int64)
    sizes, batch, addresses = ((1,) * len(names) for names in (SIZES, BATCH, ADDRESSES))
    run_layers(loop_addresses(), 0, 0, 0, table, sizes, batch, addresses, 0)
