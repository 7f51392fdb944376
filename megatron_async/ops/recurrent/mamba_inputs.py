"""The first kernel of Mamba-2 decode: convolution, inputs for the rings, weights of past inputs.

Beside the state's part, a query token's output is a weighted sum of the inputs x in the ring. The
weights (C of the query by B of an input, times that input's dt and the decay since) are the same
for all elements of a head, and C by B for all heads of a group. So they are computed here, once,
and the second kernel (`mamba_decode.py`) reads neither B nor dt.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, let_next_start, wait_for_previous
from megatron_async.ops.recurrent.kernel_parts import decays_of, held, history, silu, softplus, taps
from megatron_async.ops.recurrent.mamba_pools import MambaParams, MambaShape
from megatron_async.ops.recurrent.mamba_tile import scores_of, weights_of
from megatron_async.ops.recurrent.recurrent_pools import (
    TILE,
    DecodeRows,
    FlushRule,
    RecurrentPools,
    RowStrides,
)

CHANNELS = 256
"""Channels of x that a program takes."""
HEADS = 8
"""Heads of a group that a program takes: each makes B and C again, the first one keeps them."""
MANY_ROWS = 32
"""From so many rows of one query token on, a program has two warps instead of four: programs are
many then, and each takes as many instructions (Granite-4.0-H-350M's step at 64 rows 1.211 -> 1.204
ms). Rows of four tokens are slower so: 76.8 instead of 73.4 us for 64 rows of Nemotron-3-Nano's
layer (an H200, 2026-11-26)."""


class DecodeInputs(NamedTuple):
    """Inputs of the second kernel for a step's query tokens; written for all tokens."""

    c: Tensor
    """`[tokens, groups d_state]`, dtype of the activations: C after the convolution."""
    weights: Tensor
    """float32 `[tokens, heads, window]`: of the ring's inputs from the base on. With a rule that
    replays `[tokens, heads, 64]` of the tile of the row's last token, dtype of the activations."""
    decays: Tensor
    """float32 `[tokens, heads]`: what is left of the state at the query token."""
    gates: Tensor
    """float32 `[tokens, d_inner]`: SiLU of z; anything where outputs are not gated."""


def window_of(rule: FlushRule, width: int) -> int:
    """Weights of a query token: the window of the rule, to a power of two."""
    return triton.next_power_of_2(rule.window(width))


def take_inputs(
    zxbcdt: Tensor,
    params: MambaParams,
    pools: RecurrentPools,
    strides: RowStrides,
    step: DecodeRows,
    rule: FlushRule,
    shape: MambaShape,
    is_gated: bool = False,
) -> DecodeInputs:
    """Put the inputs of a step's query tokens into rings and conv, and make what their outputs
    need; arguments as of `mamba_decode`.

    `is_gated` makes gates too, of rows of one query token: here a thread makes one or two of them,
    and the second kernel would make each in 32 threads.
    """
    rows, width, replays = step.row_index.numel(), step.width, rule.replays
    window = TILE if replays else window_of(rule, width)
    tokens, device = rows * width, zxbcdt.device
    c = torch.empty((tokens, shape.bc_dim), dtype=zxbcdt.dtype, device=device)
    dtype = zxbcdt.dtype if replays else torch.float32
    weights = torch.empty((tokens, shape.heads, window), dtype=dtype, device=device)
    decays = torch.empty((tokens, shape.heads), dtype=torch.float32, device=device)
    gates = decays.new_empty((tokens, shape.d_inner)) if is_gated else decays
    inputs = DecodeInputs(c, weights, decays, gates)
    heads_tile = min(triton.next_power_of_2(shape.group_heads), HEADS)
    parts = shape.groups * triton.cdiv(shape.group_heads, heads_tile)
    _inputs_kernel[(parts + triton.cdiv(shape.d_inner, CHANNELS), rows)](
        zxbcdt,
        zxbcdt.stride(0),
        params,
        pools,
        strides,
        *step[:3],
        inputs,
        shape=shape,
        width=width,
        heads_tile=heads_tile,
        ring=pools.ring_xb.size(1),
        conv_ring=pools.conv.size(1),
        window=window,
        tile=CHANNELS,
        is_gated=is_gated,
        replays=replays,
        num_warps=2 if not replays and rows >= MANY_ROWS and width == 1 else 4,
        **launch_options(zxbcdt),
    )
    return inputs


@triton.jit
def _take_group(
    part: tl.tensor,
    row: tl.tensor,
    zxbcdt: tl.tensor,
    input_stride: tl.tensor,
    parameters: tl.tuple,
    pools: tl.tuple,
    strides: tl.tuple,
    row_index: tl.tensor,
    positions: tl.tensor,
    bases: tl.tensor,
    outputs: tl.tuple,
    shape: tl.constexpr,
    width: tl.constexpr,
    heads_tile: tl.constexpr,
    ring: tl.constexpr,
    conv_ring: tl.constexpr,
    window: tl.constexpr,
    replays: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """B, C and dt of a group: convolution and rings, and the weights of a block of its heads."""
    heads: tl.constexpr = shape.heads
    group_heads: tl.constexpr = shape.group_heads
    d_state: tl.constexpr = shape.d_state
    d_inner: tl.constexpr = shape.d_inner
    bc_dim: tl.constexpr = shape.bc_dim
    xb_dim: tl.constexpr = shape.ring_dim
    conv_dim: tl.constexpr = shape.conv_dim
    blocks: tl.constexpr = (group_heads + heads_tile - 1) // heads_tile
    group, block = part // blocks, part % blocks
    column = tl.arange(0, d_state)
    always = column < d_state
    b_channel = d_inner + group * d_state + column
    c_channel = b_channel + bc_dim
    b_weight_0, b_weight_1, b_weight_2, b_weight_3 = taps(parameters.conv_weight, b_channel, always)
    c_weight_0, c_weight_1, c_weight_2, c_weight_3 = taps(parameters.conv_weight, c_channel, always)
    b_bias = tl.load(parameters.conv_bias + b_channel).to(tl.float32)
    c_bias = tl.load(parameters.conv_bias + c_channel).to(tl.float32)
    local = block * heads_tile + tl.arange(0, heads_tile)
    has_head = local < group_heads
    head = group * group_heads + local
    rate = -tl.exp(tl.load(parameters.a_log + head, mask=has_head, other=0.0).to(tl.float32))
    through = tl.load(parameters.d + head, mask=has_head, other=0.0).to(tl.float32)
    shift = tl.load(parameters.dt_bias + head, mask=has_head, other=0.0).to(tl.float32)
    pool_row = tl.load(row_index + row).to(tl.int64)
    first = tl.load(positions + row * width).to(tl.int32)
    base = tl.load(bases + row)
    kept = pools.conv + pool_row * strides.conv
    b_input_0, b_input_1, b_input_2 = history(kept + b_channel, first, always, conv_dim, conv_ring)
    c_input_0, c_input_1, c_input_2 = history(kept + c_channel, first, always, conv_dim, conv_ring)
    # Inputs since the base, or those of a tile: those of earlier steps from the rings, this step's
    # below.
    place_in = tl.arange(0, window)
    if replays:
        last = first
        for query in tl.static_range(1, width):
            position = first + query
            brought = tl.load(positions + row * width + query).to(tl.int32) == position
            last = tl.where((first > 0) & brought, position, last)
        at = last // window * window + place_in
    else:
        at = base + place_in
    is_old = at < first
    entry = at % ring
    xb_row = pools.ring_xb + pool_row * strides.ring_xb
    gates_row = pools.ring_gates + pool_row * strides.ring_gates
    b_place = xb_row + entry[:, None] * xb_dim + b_channel[None, :]
    b_all = tl.load(b_place, mask=is_old[:, None], other=0.0)
    if replays:
        gate_place = gates_row + entry[:, None] * (2 * heads) + head[None, :]
        has_gate = is_old[:, None] & has_head[None, :]
        decay = tl.load(gate_place, mask=has_gate, other=0.0)
        share = tl.load(gate_place + heads, mask=has_gate, other=0.0)
        number = tl.arange(0, 16)  # the least rows of a product
        c_all = tl.zeros((16, d_state), b_all.dtype)
    else:
        b_all = b_all.to(tl.float32)
        gate_place = gates_row + entry[None, :] * (2 * heads) + head[:, None]
        has_gate = is_old[None, :] & has_head[:, None]
        decay = tl.load(gate_place, mask=has_gate, other=0.0)
        share = tl.load(gate_place + heads, mask=has_gate, other=0.0)
        # What is left now of each input, times its dt, and of the state: a query token's own decay
        # multiplies both.
        left = tl.sum(decay, 1)
        share *= tl.exp(left[:, None] - tl.cumsum(decay, 1))
        left = tl.exp(left)
    wait_for_previous(overlap)
    # All loads before the first store: none may be moved ahead of a store that it could alias, and
    # each query token would wait for memory anew.
    counts: tl.tuple = ()
    b_raws: tl.tuple = ()
    c_raws: tl.tuple = ()
    dts: tl.tuple = ()
    for query in tl.static_range(width):
        token = row * width + query
        source = zxbcdt + token * input_stride + d_inner
        counts += (tl.load(positions + token).to(tl.int32),)
        b_raws += (tl.load(source + b_channel),)
        c_raws += (tl.load(source + c_channel),)
        dt = tl.load(source + conv_dim + head, mask=has_head, other=0.0)
        dts += (dt.to(tl.float32),)
    for query in tl.static_range(width):
        token = row * width + query
        position = first + query
        brought = (first > 0) & (counts[query] == position)
        b_raw, c_raw, dt = b_raws[query], c_raws[query], dts[query]
        dt = softplus(dt + shift)
        g = dt * rate
        b_input_3, c_input_3 = b_raw.to(tl.float32), c_raw.to(tl.float32)
        kept_at = kept + (position % conv_ring) * conv_dim
        written = always & brought & (block == 0)
        tl.store(kept_at + b_channel, b_raw, mask=written)
        tl.store(kept_at + c_channel, c_raw, mask=written)
        b = b_bias + b_weight_0 * b_input_0 + b_weight_1 * b_input_1
        b = silu(b + b_weight_2 * b_input_2 + b_weight_3 * b_input_3).to(b_raw.dtype)
        c = c_bias + c_weight_0 * c_input_0 + c_weight_1 * c_input_1
        c = silu(c + c_weight_2 * c_input_2 + c_weight_3 * c_input_3).to(c_raw.dtype)
        b_input_0, b_input_1, b_input_2 = b_input_1, b_input_2, b_input_3
        c_input_0, c_input_1, c_input_2 = c_input_1, c_input_2, c_input_3
        tl.store(xb_row + (position % ring) * xb_dim + b_channel, b, mask=written)
        gate_place = gates_row + (position % ring) * (2 * heads) + head
        tl.store(gate_place, g, mask=has_head & brought)
        tl.store(gate_place + heads, dt, mask=has_head & brought)
        place = outputs.c + token * bc_dim + group * d_state + column
        tl.store(place, c, mask=always & (block == 0))

        own = (at == position) & brought
        if replays:
            b, c = held(b, overlap), held(c, overlap)
            b_all = tl.where(own[:, None], b[None, :], b_all)
            c_all = tl.where((number == query)[:, None], c[None, :], c_all)
            decay = tl.where(own[:, None], g[None, :], decay)
            share = tl.where(own[:, None], dt[None, :], share)
        else:
            b_all = tl.where(own[:, None], b.to(tl.float32)[None, :], b_all)
            kept_share = tl.exp(g)
            share = tl.where(own[None, :], dt[:, None], share * kept_share[:, None])
            left *= kept_share
            score = tl.sum(b_all * c.to(tl.float32)[None, :], 1)
            weight = score[None, :] * share + tl.where(own[None, :], through[:, None], 0.0)
            target = token * heads + head
            place = outputs.weights + target[:, None] * window + place_in[None, :]
            tl.store(place, weight, mask=has_head[:, None])
            tl.store(outputs.decays + target, left, mask=has_head)
    if replays:
        scores, decay = scores_of(b_all, c_all), decays_of(decay)
        for query in tl.static_range(width):
            # One entry and zeros, twice: exact in any order.
            score = tl.sum(tl.where((number == query)[None, :], scores, 0.0), 1)
            own, seen = at == first + query, at <= first + query
            here = tl.sum(tl.where(own[:, None], decay, 0.0), 0)
            weight = weights_of(score[:, None], share, decay, here[None, :], seen[:, None])
            target = (row * width + query) * heads + head
            place = outputs.weights + target[None, :] * window + place_in[:, None]
            weight = weight.to(outputs.weights.dtype.element_ty)
            tl.store(place, weight, mask=has_head[None, :])
            tl.store(outputs.decays + target, tl.exp(here), mask=has_head)


@triton.jit
def _convolve_into_ring(
    part: tl.tensor,
    row: tl.tensor,
    zxbcdt: tl.tensor,
    input_stride: tl.tensor,
    parameters: tl.tuple,
    pools: tl.tuple,
    strides: tl.tuple,
    row_index: tl.tensor,
    positions: tl.tensor,
    shape: tl.constexpr,
    width: tl.constexpr,
    ring: tl.constexpr,
    conv_ring: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Channels of x: convolution and ring."""
    d_inner: tl.constexpr = shape.d_inner
    conv_dim: tl.constexpr = shape.conv_dim
    channel = part * tile + tl.arange(0, tile)
    inside = channel < d_inner
    weight_0, weight_1, weight_2, weight_3 = taps(parameters.conv_weight, channel, inside)
    bias = tl.load(parameters.conv_bias + channel, mask=inside, other=0.0).to(tl.float32)
    pool_row = tl.load(row_index + row).to(tl.int64)
    first = tl.load(positions + row * width).to(tl.int32)
    kept = pools.conv + pool_row * strides.conv + channel
    xb_row = pools.ring_xb + pool_row * strides.ring_xb
    input_0, input_1, input_2 = history(kept, first, inside, conv_dim, conv_ring)
    wait_for_previous(overlap)
    # All loads before the first store: none may be moved ahead of a store that it could alias.
    counts: tl.tuple = ()
    raws: tl.tuple = ()
    for query in tl.static_range(width):
        token = row * width + query
        counts += (tl.load(positions + token).to(tl.int32),)
        source = zxbcdt + token * input_stride + d_inner
        raws += (tl.load(source + channel, mask=inside, other=0.0),)
    for query in tl.static_range(width):
        position = first + query
        brought = (first > 0) & (counts[query] == position)
        raw = raws[query]
        input_3 = raw.to(tl.float32)
        tl.store(kept + (position % conv_ring) * conv_dim, raw, mask=inside & brought)
        value = bias + weight_0 * input_0 + weight_1 * input_1
        value = silu(value + weight_2 * input_2 + weight_3 * input_3).to(raw.dtype)
        place = xb_row + (position % ring) * shape.ring_dim + channel
        tl.store(place, value, mask=inside & brought)
        input_0, input_1, input_2 = input_1, input_2, input_3


# Before its wait this kernel reads what steps before have left in the pools, and what the step's
# first kernels have written: all done when the product before this kernel starts, because the flush
# behind them lets nobody start before its end.
@triton.jit(do_not_specialize_on_alignment=["row_index", "positions", "bases"])
def _inputs_kernel(
    zxbcdt: tl.tensor,
    input_stride: tl.tensor,
    parameters: tl.tuple,
    pools: tl.tuple,
    strides: tl.tuple,
    row_index: tl.tensor,
    positions: tl.tensor,
    bases: tl.tensor,
    outputs: tl.tuple,
    shape: tl.constexpr,
    width: tl.constexpr,
    heads_tile: tl.constexpr,
    ring: tl.constexpr,
    conv_ring: tl.constexpr,
    window: tl.constexpr,
    tile: tl.constexpr,
    is_gated: tl.constexpr,
    replays: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """The parts of groups, then those of x's channels. `outputs`: `DecodeInputs`."""
    if is_gated:
        # The states that the next kernel reads are there since the flush.
        let_next_start(overlap)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d_inner: tl.constexpr = shape.d_inner
    blocks: tl.constexpr = (shape.group_heads + heads_tile - 1) // heads_tile
    group_parts: tl.constexpr = shape.groups * blocks
    layer = (zxbcdt, input_stride, parameters, pools, strides, row_index, positions)
    if part < group_parts:
        _take_group(
            part,
            row,
            *layer,
            bases,
            outputs,
            shape,
            width,
            heads_tile,
            ring,
            conv_ring,
            window,
            replays,
            overlap,
        )
    else:
        own = part - group_parts
        _convolve_into_ring(own, row, *layer, shape, width, ring, conv_ring, tile, overlap)
        if is_gated:
            channel = own * tile + tl.arange(0, tile)
            inside = channel < d_inner
            z = tl.load(zxbcdt + row * input_stride + channel, mask=inside, other=0.0)
            place = outputs.gates + row * d_inner + channel
            tl.store(place, silu(z.to(tl.float32)), mask=inside)
