"""Mamba-2 decode: one to eight query tokens a row against the row's state and the last inputs.

Mamba-2: Dao and Gu 2024. To write the state only every few tokens, with later inputs in a ring, is
ReplaySSM's idea (Dao AI Lab and NVIDIA 2026). There are two kernels. The first (`mamba_inputs.py`)
computes a row's convolution, stores its inputs in the rings and computes their weights. The second
reads a tile of one head's state and adds the contents of the rings. Neither writes the state:
`flush.py` does, before them. A step reads only data at or before its own positions, so running a
step again gives the same bits.

The second kernel is here for one query token a row, and for all dtypes; for several in bfloat16 on
a GPU the kernel of `mamba_outputs.py` is used. A step of one row has one kernel (`mamba_row.py`).
With a rule that replays, all steps have the second kernel of `mamba_replay.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.op import promising
from megatron_async.ops.recurrent.mamba_inputs import take_inputs, window_of
from megatron_async.ops.recurrent.mamba_outputs import MAX_STATE, outputs_by_matrix_units
from megatron_async.ops.recurrent.mamba_pools import (
    LANES,
    Gating,
    MambaParams,
    check_gating,
    shape_of,
)
from megatron_async.ops.recurrent.mamba_reference import mamba_decode
from megatron_async.ops.recurrent.mamba_replay import replay
from megatron_async.ops.recurrent.mamba_row import MOST_ROWS, decode_row
from megatron_async.ops.recurrent.recurrent_pools import (
    DecodeRows,
    FlushRule,
    RecurrentPools,
    begin_decode,
)

WARPS = 2


@mamba_decode.gpu
@promising("invariant")
def mamba_decode_gpu(
    zxbcdt: Tensor,
    params: MambaParams,
    pools: RecurrentPools,
    step: DecodeRows,
    rule: FlushRule,
    out: Tensor | None = None,
    gating: Gating | None = None,
) -> Tensor:
    op = "mamba_decode"
    shape, out = begin_decode(op, shape_of, zxbcdt, params, pools, step, rule, out)
    rows, width = step.row_index.numel(), step.width
    if gating is not None:
        check_gating(op, gating, shape, rows, width)
    if not rows:
        return out
    if rule.replays:
        if gating is not None:
            raise ValueError(f"{op}: {rule} has outputs without gating: leave gating out.")
        replay(zxbcdt, params, pools, step, rule, shape, out)
        return out
    if rows <= MOST_ROWS and width == 1 and gating is None:
        decode_row(zxbcdt, params, pools, step, rule, shape, out)
        return out
    strides, is_gated = pools.strides, gating is not None
    inputs = take_inputs(zxbcdt, params, pools, strides, step, rule, shape, is_gated)
    by_matrix_units = width > 1 and shape.d_state <= MAX_STATE
    if by_matrix_units and zxbcdt.is_cuda and zxbcdt.dtype == torch.bfloat16:
        outputs_by_matrix_units(inputs, pools, step, shape, out)
        return out
    _outputs_kernel[(shape.heads * triton.cdiv(shape.head_dim, LANES), rows)](
        inputs,
        pools,
        strides,
        *step[:3],
        out if gating is None else gating.weight,
        out if gating is None else gating.squares,
        out,
        out.stride(0),
        shape=shape,
        width=width,
        ring=pools.ring_xb.size(1),
        tile=LANES,
        window=window_of(rule, width),
        is_gated=is_gated,
        num_warps=WARPS,
        **launch_options(zxbcdt),
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["row_index", "positions", "bases", "out"])
def _outputs_kernel(
    inputs: tl.tuple,
    pools: tl.tuple,
    strides: tl.tuple,
    row_index: tl.tensor,
    positions: tl.tensor,
    bases: tl.tensor,
    norm_weight: tl.tensor,
    squares: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    shape: tl.constexpr,
    width: tl.constexpr,
    ring: tl.constexpr,
    tile: tl.constexpr,
    window: tl.constexpr,
    is_gated: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    heads: tl.constexpr = shape.heads
    head_dim: tl.constexpr = shape.head_dim
    d_state: tl.constexpr = shape.d_state
    bc_dim: tl.constexpr = shape.bc_dim
    xb_dim: tl.constexpr = shape.ring_dim
    tiles: tl.constexpr = (head_dim + tile - 1) // tile
    head, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tl.program_id(1).to(tl.int64)
    group = head // shape.group_heads
    lane = part * tile + tl.arange(0, tile)
    inside = lane < head_dim
    column = tl.arange(0, d_state)
    # No kernel of this step's layers writes what is read before the wait: rows, positions and bases
    # are there before the first layer, and states since the flush.
    pool_row = tl.load(row_index + row).to(tl.int64)
    first = tl.load(positions + row * width).to(tl.int32)
    base = tl.load(bases + row)
    place = pools.state + pool_row * strides.state + head * (head_dim * d_state)
    place = place + lane[:, None] * d_state + column[None, :]
    s = tl.load(place, mask=inside[:, None] & (first > 0), other=0.0, cache_modifier=".cg")
    s = s.to(tl.float32)
    channel = head * head_dim + lane
    if is_gated:
        scale = tl.load(norm_weight + channel, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(overlap)

    # Query tokens that count: the first ones.
    count = (first > 0).to(tl.int32)
    for query in tl.static_range(1, width):
        follows = tl.load(positions + row * width + query).to(tl.int32) == first + query
        count += ((first > 0) & follows).to(tl.int32)
    since = tl.arange(0, window)
    position = base + since
    exists = position < first + count
    place = pools.ring_xb + pool_row * strides.ring_xb + (position % ring)[:, None] * xb_dim
    place = place + (head * head_dim + lane)[None, :]
    x = tl.load(place, mask=exists[:, None] & inside[None, :], other=0.0).to(tl.float32)
    if is_gated:
        gate = tl.load(inputs.gates + row * (heads * head_dim) + channel, mask=inside, other=0.0)
    for query in tl.static_range(width):
        token = row * width + query
        c = tl.load(inputs.c + token * bc_dim + group * d_state + column).to(tl.float32)
        weight = tl.load(inputs.weights + (token * heads + head) * window + since)
        y = tl.sum(s * c[None, :], 1) * tl.load(inputs.decays + token * heads + head)
        y += tl.sum(x * weight[:, None], 0)
        if is_gated:
            y *= gate
        y = tl.where((query < count) & inside, y, 0.0)
        if is_gated:
            tl.store(squares + (row * heads + head) * tiles + part, tl.sum(y * y, 0))
            y = y * scale
        target = out + token * out_stride + channel
        tl.store(target, y.to(out.dtype.element_ty), mask=inside)
