"""Gated DeltaNet decode: one to eight query tokens a row against the row's state and the ring.

Gated DeltaNet: Yang, Kautz and Hatamizadeh 2024. To write the state only every few tokens
(`flush.py`) is ReplaySSM's idea (Dao AI Lab and NVIDIA 2026). The ring keeps pseudo values, so the
recurrence need not be repeated for later tokens (`delta_pools.py`). A step reads only data at or
before its own positions, so running a step again gives the same bits.

`_inputs_kernel` takes a row's convolution. One program a key head: it puts the normalised key into
the ring, and finds what the query's and the key's products with all keys of the ring are. Value
heads and their tiles share these, so the ring's keys are read once. Other programs take channels of
v, and the gates.

`_outputs_kernel` takes a tile of one value head's state, and makes the query tokens' pseudo values
and outputs of it, of the ring's pseudo values in its own lanes, and of the products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.op import promising
from megatron_async.ops.recurrent.delta_pools import NORM_EPS, DeltaParams, shape_of
from megatron_async.ops.recurrent.delta_reference import delta_decode
from megatron_async.ops.recurrent.delta_replay import replay
from megatron_async.ops.recurrent.kernel_parts import history, silu, softplus, taps
from megatron_async.ops.recurrent.recurrent_pools import (
    DecodeRows,
    FlushRule,
    RecurrentPools,
    begin_decode,
)

CHANNELS = 256
"""Channels of v in a program of the convolution."""
LANES = 8
"""Elements of a value that a program processes: with more, fewer bytes are in flight at a time."""
WARPS = 1
EPS = tl.constexpr(NORM_EPS)


class DeltaInputs(NamedTuple):
    """Inputs of the second kernel for a step's query tokens; written for all tokens."""

    q: Tensor
    """`[tokens, key_inner]`, dtype of the activations: normalised."""
    v: Tensor
    """`[tokens, value_inner]`, dtype of the activations."""
    beta: Tensor
    """float32 `[tokens, value heads]`."""
    scores: Tensor
    """float32 `[tokens, key heads, 2, window]`: products of the token's key, and of its query, with
    the ring's keys from the base on."""


@delta_decode.gpu
@promising("invariant")
def delta_decode_gpu(
    qkvzba: Tensor,
    params: DeltaParams,
    pools: RecurrentPools,
    step: DecodeRows,
    rule: FlushRule,
    out: Tensor | None = None,
) -> Tensor:
    shape, out = begin_decode("delta_decode", shape_of, qkvzba, params, pools, step, rule, out)
    rows, width = step.row_index.numel(), step.width
    window = triton.next_power_of_2(rule.window(width))
    tokens, inner, device = rows * width, shape.value_inner, qkvzba.device
    if not rows:
        return out
    if rule.replays:
        replay(qkvzba, params, pools, step, rule, shape, out)
        return out
    inputs = DeltaInputs(
        torch.empty((tokens, shape.key_inner), dtype=qkvzba.dtype, device=device),
        torch.empty((tokens, inner), dtype=qkvzba.dtype, device=device),
        torch.empty((tokens, shape.value_heads), device=device),
        torch.empty((tokens, shape.key_heads, 2, window), device=device),
    )
    layer, at = (inputs, pools, pools.strides), step[:3]
    constants = {"shape": shape, "width": width, "ring": pools.ring_xb.size(1), "window": window}
    options = launch_options(qkvzba)
    parts = shape.key_heads + triton.cdiv(inner, CHANNELS)
    _inputs_kernel[(parts, rows)](
        qkvzba,
        qkvzba.stride(0),
        params,
        *layer,
        *at,
        conv_ring=pools.conv.size(1),
        heads_tile=triton.next_power_of_2(shape.value_heads),
        tile=CHANNELS,
        **constants,
        num_warps=4,
        **options,
    )
    _outputs_kernel[(shape.value_heads * triton.cdiv(shape.value_dim, LANES), rows)](
        *layer, *at, out, out.stride(0), tile=LANES, **constants, num_warps=WARPS, **options
    )
    return out


# Before its wait this kernel reads what steps before have left in the pools, and what the step's
# first kernels have written, as Mamba-2's `_inputs_kernel` does, and for its reasons.
@triton.jit(do_not_specialize_on_alignment=["row_index", "positions", "bases"])
def _inputs_kernel(
    qkvzba: tl.tensor,
    input_stride: tl.tensor,
    parameters: tl.tuple,
    outputs: tl.tuple,
    pools: tl.tuple,
    strides: tl.tuple,
    row_index: tl.tensor,
    positions: tl.tensor,
    bases: tl.tensor,
    shape: tl.constexpr,
    width: tl.constexpr,
    ring: tl.constexpr,
    window: tl.constexpr,
    conv_ring: tl.constexpr,
    heads_tile: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Convolution, norms, gates and products of keys, into `outputs` (`DeltaInputs`); see the
    module. Grid: key heads and parts of v's channels, rows."""
    key_heads: tl.constexpr = shape.key_heads
    key_dim: tl.constexpr = shape.key_dim
    value_heads: tl.constexpr = shape.value_heads
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_inner: tl.constexpr = shape.key_inner
    value_inner: tl.constexpr = shape.value_inner
    conv_dim: tl.constexpr = shape.conv_dim
    xb_dim: tl.constexpr = shape.ring_dim
    if part < key_heads:
        column = tl.arange(0, key_dim)
        own = part * key_dim + column
        every = column >= 0
        weight = parameters.conv_weight
        q_weight_0, q_weight_1, q_weight_2, q_weight_3 = taps(weight, own, every)
        k_weight_0, k_weight_1, k_weight_2, k_weight_3 = taps(weight, key_inner + own, every)
        pool_row = tl.load(row_index + row).to(tl.int64)
        first = tl.load(positions + row * width).to(tl.int32)
        position = tl.load(bases + row) + tl.arange(0, window)
        stored_keys = pools.ring_xb + pool_row * strides.ring_xb + value_inner + own
        place = stored_keys[None, :] + (position % ring)[:, None] * xb_dim
        keys = tl.load(place, mask=(position < first)[:, None], other=0.0).to(tl.float32)
        kept = pools.conv + pool_row * strides.conv + own
        q_0, q_1, q_2 = history(kept, first, every, conv_dim, conv_ring)
        k_0, k_1, k_2 = history(kept + key_inner, first, every, conv_dim, conv_ring)
        wait_for_previous(overlap)
        for query in tl.static_range(width):
            token = row * width + query
            at = first + query
            brought = (first > 0) & (tl.load(positions + token).to(tl.int32) == at)
            source = qkvzba + token * input_stride + own
            q_raw, k_raw = tl.load(source), tl.load(source + key_inner)
            place = kept + (at % conv_ring) * conv_dim
            tl.store(place, q_raw, mask=every & brought)
            tl.store(place + key_inner, k_raw, mask=every & brought)
            q_3, k_3 = q_raw.to(tl.float32), k_raw.to(tl.float32)
            q = silu(q_weight_0 * q_0 + q_weight_1 * q_1 + q_weight_2 * q_2 + q_weight_3 * q_3)
            k = silu(k_weight_0 * k_0 + k_weight_1 * k_1 + k_weight_2 * k_2 + k_weight_3 * k_3)
            q_0, q_1, q_2, k_0, k_1, k_2 = q_1, q_2, q_3, k_1, k_2, k_3
            # The convolution's output has the dtype of the activations, and so have q and k.
            q, k = q.to(q_raw.dtype).to(tl.float32), k.to(q_raw.dtype).to(tl.float32)
            q = q * (tl.rsqrt(tl.sum(q * q) + EPS) * key_dim**-0.5)
            k = k * tl.rsqrt(tl.sum(k * k) + EPS)
            q_kept, k_kept = q.to(q_raw.dtype), k.to(q_raw.dtype)
            tl.store(outputs.q + token * key_inner + own, q_kept)
            tl.store(stored_keys + (at % ring) * xb_dim, k_kept, mask=every & brought)
            q, k = q_kept.to(tl.float32), k_kept.to(tl.float32)
            keys = tl.where((position == at)[:, None], k[None, :], keys)
            with_k = tl.sum(keys * k[None, :], 1)
            with_q = tl.sum(keys * q[None, :], 1)
            place = outputs.scores + (token * key_heads + part) * (2 * window)
            place = place + tl.arange(0, window)
            tl.store(place, with_k)
            tl.store(place + window, with_q)
    else:
        local = (part - key_heads) * tile + tl.arange(0, tile)
        inside = local < value_inner
        channel = 2 * key_inner + local
        weight_0, weight_1, weight_2, weight_3 = taps(parameters.conv_weight, channel, inside)
        head = tl.arange(0, heads_tile)
        is_head = (head < value_heads) & (part == key_heads)
        rate = -tl.exp(tl.load(parameters.a_log + head, mask=is_head, other=0.0).to(tl.float32))
        bias = tl.load(parameters.dt_bias + head, mask=is_head, other=0.0).to(tl.float32)
        pool_row = tl.load(row_index + row).to(tl.int64)
        first = tl.load(positions + row * width).to(tl.int32)
        v_kept = pools.conv + pool_row * strides.conv + channel
        g_row = pools.ring_gates + pool_row * strides.ring_gates
        input_0, input_1, input_2 = history(v_kept, first, inside, conv_dim, conv_ring)
        wait_for_previous(overlap)
        for query in tl.static_range(width):
            token = row * width + query
            at = first + query
            brought = (first > 0) & (tl.load(positions + token).to(tl.int32) == at)
            given = qkvzba + token * input_stride
            raw = tl.load(given + channel, mask=inside, other=0.0)
            tl.store(v_kept + (at % conv_ring) * conv_dim, raw, mask=inside & brought)
            input_3 = raw.to(tl.float32)
            value = weight_0 * input_0 + weight_1 * input_1
            value = silu(value + weight_2 * input_2 + weight_3 * input_3).to(raw.dtype)
            tl.store(outputs.v + token * value_inner + local, value, mask=inside)
            input_0, input_1, input_2 = input_1, input_2, input_3
            gates = given + conv_dim + value_inner + head
            beta = tl.load(gates, mask=is_head, other=0.0).to(tl.float32)
            alpha = tl.load(gates + value_heads, mask=is_head, other=0.0).to(tl.float32)
            beta_place = outputs.beta + token * value_heads + head
            tl.store(beta_place, tl.sigmoid(beta), mask=is_head)
            g_place = g_row + (at % ring) * value_heads + head
            tl.store(g_place, rate * softplus(alpha + bias), mask=is_head & brought)


@triton.jit(do_not_specialize_on_alignment=["row_index", "positions", "bases", "out"])
def _outputs_kernel(
    inputs: tl.tuple,
    pools: tl.tuple,
    strides: tl.tuple,
    row_index: tl.tensor,
    positions: tl.tensor,
    bases: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    shape: tl.constexpr,
    width: tl.constexpr,
    ring: tl.constexpr,
    window: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Pseudo values and outputs of a tile of a value head; see the module. Grid: value heads times
    tiles, rows."""
    key_heads: tl.constexpr = shape.key_heads
    key_dim: tl.constexpr = shape.key_dim
    value_heads: tl.constexpr = shape.value_heads
    value_dim: tl.constexpr = shape.value_dim
    key_inner: tl.constexpr = shape.key_inner
    value_inner: tl.constexpr = shape.value_inner
    xb_dim: tl.constexpr = shape.ring_dim
    tiles: tl.constexpr = (value_dim + tile - 1) // tile
    head, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tl.program_id(1).to(tl.int64)
    key_head = head // shape.group
    lane = part * tile + tl.arange(0, tile)
    inside = lane < value_dim
    channel = head * value_dim + lane
    column = key_head * key_dim + tl.arange(0, key_dim)
    # Nothing that is read before the wait is written in this step by the kernel before: it writes
    # the ring's keys and gates of this step's tokens only, and no pseudo value. The kernels before
    # that one are done.
    pool_row = tl.load(row_index + row).to(tl.int64)
    first = tl.load(positions + row * width).to(tl.int32)
    base = tl.load(bases + row)
    place = pools.state + pool_row * strides.state + head * (value_dim * key_dim)
    cell = lane[:, None] * key_dim + tl.arange(0, key_dim)[None, :]
    loaded = inside[:, None] & (first > 0)
    s = tl.load(place + cell, mask=loaded, other=0.0, cache_modifier=".cg").to(tl.float32)
    values = pools.ring_xb + pool_row * strides.ring_xb
    keys = values + value_inner
    gates = pools.ring_gates + pool_row * strides.ring_gates + head
    position = base + tl.arange(0, window)
    entry = position % ring
    is_earlier = inside[:, None] & (position < first)[None, :]
    source = values + (channel[:, None] + entry[None, :] * xb_dim)
    u = tl.load(source, mask=is_earlier, other=0.0).to(tl.float32)
    wait_for_previous(overlap)

    # Query tokens that count: the first ones.
    count = (first > 0).to(tl.int32)
    for query in tl.static_range(1, width):
        follows = tl.load(positions + row * width + query).to(tl.int32) == first + query
        count += ((first > 0) & follows).to(tl.int32)
    g = tl.load(gates + entry * value_heads, mask=position < first + count, other=0.0)
    decay = tl.cumsum(g, 0)
    for query in tl.static_range(width):
        token = row * width + query
        at = first + query
        here = tl.sum(tl.where(position == at, decay, 0.0), 0)
        share = tl.exp(tl.where(position <= at, here - decay, 0.0))
        with_k = inputs.scores + (token * key_heads + key_head) * (2 * window)
        with_k = with_k + tl.arange(0, window)
        with_q = tl.load(with_k + window) * share
        with_k = tl.load(with_k) * share
        slot = (at % ring) * xb_dim
        k = tl.load(keys + (slot + column), mask=query < count, other=0.0).to(tl.float32)
        q = tl.load(inputs.q + token * key_inner + column).to(tl.float32)
        v = tl.load(inputs.v + token * value_inner + channel, mask=inside, other=0.0)
        v = v.to(tl.float32)
        beta = tl.load(inputs.beta + token * value_heads + head)
        # The token's own column of u is still 0 here.
        found = tl.sum(s * k[None, :], 1) * tl.exp(here) + tl.sum(u * with_k[None, :], 1)
        kept = (beta * (v - found)).to(pools.ring_xb.dtype.element_ty)
        tl.store(values + (slot + channel), kept, mask=inside & (query < count))
        u = tl.where((position == at)[None, :], kept.to(tl.float32)[:, None], u)
        o = tl.sum(s * q[None, :], 1) * tl.exp(here) + tl.sum(u * with_q[None, :], 1)
        o = tl.where(query < count, o, 0.0)
        target = out + token * out_stride + channel
        tl.store(target, o.to(out.dtype.element_ty), mask=inside)
