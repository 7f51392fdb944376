"""Ops of recurrent layers on a CPU by loops that Numba compiles: what they do once a step (new
bases, inputs that move from the rings into the states), and decode rows.

Where tensors are of another kind (16 bits, a state of another dtype than the activations,
parameters of several dtypes), outputs are to be gated, or bases are also of prefill chunks, the
references in plain torch do it. All raise an IndexError for a row that the pools do not have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_async.ops.recurrent import delta_pools, mamba_pools
from megatron_async.ops.recurrent.bases import next_bases
from megatron_async.ops.recurrent.delta_pools import DeltaParams
from megatron_async.ops.recurrent.delta_reference import delta_decode
from megatron_async.ops.recurrent.flush import flush
from megatron_async.ops.recurrent.mamba_pools import Gating, MambaParams
from megatron_async.ops.recurrent.mamba_reference import mamba_decode
from megatron_async.ops.recurrent.recurrent_pools import (
    DecodeRows,
    FlushRule,
    PrefillRows,
    RecurrentPools,
    begin_decode,
)

ONES: dict[torch.dtype, Any] = {torch.float32: np.float32(1), torch.float64: np.float64(1)}
"""1 in each dtype that the loops are compiled for."""
EPS: dict[torch.dtype, Any] = {
    dtype: type(one)(delta_pools.NORM_EPS) for dtype, one in ONES.items()
}
"""`NORM_EPS` in each of them."""


@next_bases.cpu
def next_bases_cpu(
    base: Tensor,
    row_index: Tensor,
    positions: Tensor,
    width: int,
    prefill: PrefillRows | None,
    rule: FlushRule,
) -> tuple[Tensor, Tensor]:
    rows = row_index.numel()
    serves = (
        prefill is None
        and base.dtype == torch.int32
        and positions.dtype == torch.int64
        and row_index.dtype in (torch.int32, torch.int64)
        and positions.numel() >= rows * width
        and all(tensor.is_contiguous() for tensor in (base, row_index, positions))
    )
    if not serves:
        return next_bases.reference(base, row_index, positions, width, prefill, rule)
    from megatron_async.ops.recurrent.cpu import step_loops

    rule.check()
    before, after = torch.empty((2, rows), dtype=torch.int32)
    step_loops.next_bases(
        base.data_ptr(), base.numel(), row_index.data_ptr(), row_index.dtype == torch.int64,
        positions.data_ptr(), rows, width, rule.period, rule.lag, before.data_ptr(),
        after.data_ptr(),
    )  # fmt: skip
    return before, after


def _flush_serves(
    pools: RecurrentPools, row_index: Tensor, before: Tensor, after: Tensor, saves: Tensor | None
) -> bool:
    """Whether the loop takes these tensors: pools of one dtype, which fit each other."""
    state, ring_xb, ring_gates, conv = pools
    layers, count, heads, size, columns = state.shape
    shared = ring_xb.size(3) - heads * size
    of_step = (before, after) if saves is None else (before, after, saves)
    return (
        state.dtype in ONES
        and all(pool.dtype == state.dtype for pool in pools)
        and all(pool.shape[:2] == (layers, count) for pool in pools)
        and ring_gates.shape[2:] == (ring_xb.size(2), ring_gates.size(3), heads)
        and shared > 0
        and shared % columns == 0
        and heads % (shared // columns) == 0
        and all(pool.is_contiguous() or pool[0, 0].is_contiguous() for pool in pools)
        and row_index.dtype in (torch.int32, torch.int64)
        and all(tensor.dtype == torch.int32 for tensor in of_step)
        and all(tensor.numel() >= row_index.numel() for tensor in of_step)
        and all(tensor.is_contiguous() for tensor in (row_index, *of_step))
        and conv.dim() == 4
    )


@flush.cpu
def flush_cpu(
    pools: RecurrentPools,
    row_index: Tensor,
    base_before: Tensor,
    base_after: Tensor,
    rule: FlushRule,
    saves: Tensor | None = None,
) -> None:
    rows = row_index.numel()
    if not rows:
        return
    if not _flush_serves(pools, row_index, base_before, base_after, saves):
        flush.reference(pools, row_index, base_before, base_after, rule, saves)
        return
    from megatron_async.ops.recurrent.cpu import step_loops

    state, ring_xb, ring_gates, conv = pools
    layers, count, heads, lanes, columns = state.shape
    size = state.element_size()
    step = row_index, base_before, base_after, base_after if saves is None else saves
    step_loops.flush(
        tuple(tensor.data_ptr() for tensor in (*pools, *step)),
        tuple(size * pool.stride(0) for pool in pools),
        tuple(size * pool.stride(1) for pool in pools),
        (
            layers, rows, count, heads, lanes, columns, ring_gates.size(3), ring_xb.size(3),
            ring_xb.size(2), conv.size(2) * conv.size(3), size,
        ),
        row_index.dtype == torch.int64,
        saves is not None,
        ONES[state.dtype],
    )  # fmt: skip


def _serves(
    inputs: Tensor, params: tuple[Tensor, ...], pools: RecurrentPools, step: DecodeRows
) -> bool:
    """Whether the loops of decode rows take a layer's tensors (one dtype for all, float32 or
    float64) and a step's."""
    dtype, at = inputs.dtype, step[:3]
    return (
        dtype in ONES
        and all(tensor.dtype == dtype for tensor in (*params, *pools))
        and step.row_index.dtype in (torch.int32, torch.int64)
        and step.positions.dtype == torch.int64
        and step.bases.dtype == torch.int32
        and all(tensor.is_contiguous() for tensor in at)
    )


def _decode(
    op: str,
    shape_of: Callable[..., tuple[int, ...]],
    loop: Any,
    inputs: Tensor,
    params: tuple[Tensor, ...],
    pools: RecurrentPools,
    step: DecodeRows,
    rule: FlushRule,
    out: Tensor | None,
    *others: Any,
) -> Tensor:
    """Run the loop of a layer's decode rows; `others`: what this loop takes besides."""
    shape, out = begin_decode(op, shape_of, inputs, params, pools, step, rule, out)
    at, width = step[:3], step.width
    rows, size = step.row_index.numel(), inputs.element_size()
    loop(
        tuple(tensor.data_ptr() for tensor in (inputs, *params, *pools, *at, out)),
        tuple(size * tensor.stride(0) for tensor in (inputs, *pools, out)),
        (
            rows, width, len(pools.state), *shape, pools.ring_xb.size(1), pools.conv.size(1), size,
        ),
        step.row_index.dtype == torch.int64,
        *others,
        ONES[inputs.dtype],
    )  # fmt: skip
    return out


@mamba_decode.cpu
def mamba_decode_cpu(
    zxbcdt: Tensor,
    params: MambaParams,
    pools: RecurrentPools,
    step: DecodeRows,
    rule: FlushRule,
    out: Tensor | None = None,
    gating: Gating | None = None,
) -> Tensor:
    if gating is not None or not _serves(zxbcdt, params, pools, step):
        return mamba_decode.reference(zxbcdt, params, pools, step, rule, out, gating)
    from megatron_async.ops.recurrent.cpu.decode_loops import mamba_decode as loop

    of_layer = ("mamba_decode", mamba_pools.shape_of, loop, zxbcdt, params, pools)
    return _decode(*of_layer, step, rule, out)


@delta_decode.cpu
def delta_decode_cpu(
    qkvzba: Tensor,
    params: DeltaParams,
    pools: RecurrentPools,
    step: DecodeRows,
    rule: FlushRule,
    out: Tensor | None = None,
) -> Tensor:
    if not _serves(qkvzba, params, pools, step):
        return delta_decode.reference(qkvzba, params, pools, step, rule, out)
    from megatron_async.ops.recurrent.cpu.decode_loops import delta_decode as loop

    of_layer = ("delta_decode", delta_pools.shape_of, loop, qkvzba, params, pools)
    return _decode(*of_layer, step, rule, out, EPS[qkvzba.dtype])


def compile_loops(dtype: torch.dtype = torch.float32) -> None:
    """Compile the loops of decode rows, by calls for a dummy row of the smallest layers."""
    zeros, ones = partial(torch.zeros, dtype=dtype), partial(torch.ones, dtype=dtype)
    rule, heads, dim, keys = FlushRule(), 1, 16, 16
    index, base = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)

    def pools(entry: int, gates: int, channels: int) -> RecurrentPools:
        ring, conv = rule.ring_length(1), rule.conv_length(1)
        return RecurrentPools(
            zeros(1, heads, dim, keys),
            zeros(1, ring, entry),
            zeros(1, ring, gates, heads),
            zeros(1, conv, channels),
        )

    one, channels = ones(heads), dim + 2 * keys
    weight, columns = ones(channels, 4), dim + channels + heads
    mamba = MambaParams(weight, ones(channels), one, one, one)
    step = DecodeRows(index, index, base, 1)
    own = pools(dim + keys, mamba_pools.GATES, channels)
    mamba_decode_cpu(ones(1, columns), mamba, own, step, rule)
    own = pools(dim + keys, delta_pools.GATES, channels)
    delta_decode_cpu(ones(1, columns + heads), DeltaParams(weight, one, one), own, step, rule)


def compile_step_loops(dtype: torch.dtype = torch.float32) -> None:
    """Compile the loops of what is done once a step, by calls for a dummy row of the smallest
    layer."""
    rule, base = FlushRule(), torch.zeros(1, dtype=torch.int32)
    index, one = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 1, 1, 1, dtype=dtype)
    pools = RecurrentPools(one, torch.zeros(1, 1, 1, 2, dtype=dtype), one, one[0])
    flush_cpu(pools, index, *next_bases_cpu(base, index, index, 1, None, rule), rule)
