"""B, C and dt of a group in Mamba-2 decode: rings, and the weights of past inputs.

Part of the kernel of `mamba_inputs.py`, which says what the weights are. A row of one query token
and a row of several are two functions: what is a vector of the one is a matrix of the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.dependent_launch import wait_for_previous
from megatron_async.ops.recurrent.decode_convolution import history, taps
from megatron_async.ops.recurrent.recurrent_math import silu, softplus


@triton.jit
def take_group(
    part: tl.tensor,
    row: tl.tensor,
    zxbcdt: tl.tensor,
    input_stride: tl.tensor,
    conv_weight: tl.tensor,
    conv_bias: tl.tensor,
    dt_bias: tl.tensor,
    a_log: tl.tensor,
    d: tl.tensor,
    ring_xb: tl.tensor,
    xb_stride: tl.tensor,
    ring_gates: tl.tensor,
    gates_stride: tl.tensor,
    conv: tl.tensor,
    conv_stride: tl.tensor,
    row_index: tl.tensor,
    positions: tl.tensor,
    bases: tl.tensor,
    c_out: tl.tensor,
    weights: tl.tensor,
    decays: tl.tensor,
    heads: tl.constexpr,
    groups: tl.constexpr,
    heads_tile: tl.constexpr,
    d_state: tl.constexpr,
    d_inner: tl.constexpr,
    bc_dim: tl.constexpr,
    xb_dim: tl.constexpr,
    conv_dim: tl.constexpr,
    ring: tl.constexpr,
    conv_ring: tl.constexpr,
    window: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """B, C and dt of a group: convolution and rings, and the weights of a block of its heads; of
    one query token a row."""
    group_heads: tl.constexpr = heads // groups
    blocks: tl.constexpr = (group_heads + heads_tile - 1) // heads_tile
    group, block = part // blocks, part % blocks
    column = tl.arange(0, d_state)
    always = column < d_state
    b_channel = d_inner + group * d_state + column
    c_channel = b_channel + bc_dim
    b_weight_0, b_weight_1, b_weight_2, b_weight_3 = taps(conv_weight, b_channel, always)
    c_weight_0, c_weight_1, c_weight_2, c_weight_3 = taps(conv_weight, c_channel, always)
    b_bias = tl.load(conv_bias + b_channel).to(tl.float32)
    c_bias = tl.load(conv_bias + c_channel).to(tl.float32)
    local = block * heads_tile + tl.arange(0, heads_tile)
    has_head = local < group_heads
    head = group * group_heads + local
    rate = -tl.exp(tl.load(a_log + head, mask=has_head, other=0.0).to(tl.float32))
    through = tl.load(d + head, mask=has_head, other=0.0).to(tl.float32)
    shift = tl.load(dt_bias + head, mask=has_head, other=0.0).to(tl.float32)
    pool_row = tl.load(row_index + row).to(tl.int64)
    first = tl.load(positions + row).to(tl.int32)
    base = tl.load(bases + row)
    kept = conv + pool_row * conv_stride
    b_input_0, b_input_1, b_input_2 = history(kept + b_channel, first, always, conv_dim, conv_ring)
    c_input_0, c_input_1, c_input_2 = history(kept + c_channel, first, always, conv_dim, conv_ring)
    # Of the inputs since the base: those of steps before from the rings, this step's below.
    place_in = tl.arange(0, window)
    at = base + place_in
    is_old = at < first
    entry = at % ring
    xb_row = ring_xb + pool_row * xb_stride
    gates_row = ring_gates + pool_row * gates_stride
    b_place = xb_row + entry[:, None] * xb_dim + b_channel[None, :]
    b_all = tl.load(b_place, mask=is_old[:, None], other=0.0).to(tl.float32)
    gate_place = gates_row + entry[None, :] * (2 * heads) + head[:, None]
    has_gate = is_old[None, :] & has_head[:, None]
    g_all = tl.load(gate_place, mask=has_gate, other=0.0)
    dt_all = tl.load(gate_place + heads, mask=has_gate, other=0.0)
    wait_for_previous(overlap)
    brought = first > 0
    source = zxbcdt + row * input_stride + d_inner
    b_raw = tl.load(source + b_channel)
    c_raw = tl.load(source + c_channel)
    dt = tl.load(source + conv_dim + head, mask=has_head, other=0.0).to(tl.float32)
    dt = softplus(dt + shift)
    g = dt * rate
    b_input_3, c_input_3 = b_raw.to(tl.float32), c_raw.to(tl.float32)
    kept_at = kept + (first % conv_ring) * conv_dim
    written = always & brought & (block == 0)
    tl.store(kept_at + b_channel, b_raw, mask=written)
    tl.store(kept_at + c_channel, c_raw, mask=written)
    b = b_bias + b_weight_0 * b_input_0 + b_weight_1 * b_input_1
    b = silu(b + b_weight_2 * b_input_2 + b_weight_3 * b_input_3).to(b_raw.dtype)
    c = c_bias + c_weight_0 * c_input_0 + c_weight_1 * c_input_1
    c = silu(c + c_weight_2 * c_input_2 + c_weight_3 * c_input_3).to(c_raw.dtype)
    tl.store(xb_row + (first % ring) * xb_dim + b_channel, b, mask=written)
    gate_place = gates_row + (first % ring) * (2 * heads) + head
    tl.store(gate_place, g, mask=has_head & brought)
    tl.store(gate_place + heads, dt, mask=has_head & brought)
    place = c_out + row * bc_dim + group * d_state + column
    tl.store(place, c, mask=always & (block == 0))

    own = (at == first) & brought
    b_all = tl.where(own[:, None], b.to(tl.float32)[None, :], b_all)
    dt_all = tl.where(own[None, :], dt[:, None], dt_all)
    g_all = tl.where(own[None, :], g[:, None], g_all)
    decay = tl.cumsum(g_all, 1)
    here = tl.sum(tl.where(own[None, :], decay, 0.0), 1)
    seen = is_old | own
    score = tl.sum(b_all * c.to(tl.float32)[None, :], 1)
    weight = tl.exp(tl.where(seen[None, :], here[:, None] - decay, 0.0))
    weight = tl.where(seen[None, :], score[None, :] * dt_all * weight, 0.0)
    weight = tl.where(own[None, :], weight + through[:, None], weight)
    target = row * heads + head
    place = weights + target[:, None] * window + place_in[None, :]
    tl.store(place, weight, mask=has_head[:, None])
    tl.store(decays + target, tl.exp(here), mask=has_head)


@triton.jit
def take_group_of_several(
    part: tl.tensor,
    row: tl.tensor,
    zxbcdt: tl.tensor,
    input_stride: tl.tensor,
    conv_weight: tl.tensor,
    conv_bias: tl.tensor,
    dt_bias: tl.tensor,
    a_log: tl.tensor,
    d: tl.tensor,
    ring_xb: tl.tensor,
    xb_stride: tl.tensor,
    ring_gates: tl.tensor,
    gates_stride: tl.tensor,
    conv: tl.tensor,
    conv_stride: tl.tensor,
    row_index: tl.tensor,
    positions: tl.tensor,
    bases: tl.tensor,
    c_out: tl.tensor,
    weights: tl.tensor,
    decays: tl.tensor,
    width: tl.constexpr,
    heads: tl.constexpr,
    groups: tl.constexpr,
    heads_tile: tl.constexpr,
    d_state: tl.constexpr,
    d_inner: tl.constexpr,
    bc_dim: tl.constexpr,
    xb_dim: tl.constexpr,
    conv_dim: tl.constexpr,
    ring: tl.constexpr,
    conv_ring: tl.constexpr,
    window: tl.constexpr,
    is_exact: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """The same of several query tokens a row, all at once: scores are one product of the matrix
    units."""
    group_heads: tl.constexpr = heads // groups
    blocks: tl.constexpr = (group_heads + heads_tile - 1) // heads_tile
    queries: tl.constexpr = 16  # columns of the product, of which `width` count
    group, block = part // blocks, part % blocks
    column = tl.arange(0, d_state)
    always = column < d_state
    b_channel = d_inner + group * d_state + column
    c_channel = b_channel + bc_dim
    local = block * heads_tile + tl.arange(0, heads_tile)
    has_head = local < group_heads
    head = group * group_heads + local
    rate = -tl.exp(tl.load(a_log + head, mask=has_head, other=0.0).to(tl.float32))
    through = tl.load(d + head, mask=has_head, other=0.0).to(tl.float32)
    shift = tl.load(dt_bias + head, mask=has_head, other=0.0).to(tl.float32)
    b_weights = taps(conv_weight, b_channel, always)
    c_weights = taps(conv_weight, c_channel, always)
    b_bias = tl.load(conv_bias + b_channel).to(tl.float32)
    c_bias = tl.load(conv_bias + c_channel).to(tl.float32)
    pool_row = tl.load(row_index + row).to(tl.int64)
    first = tl.load(positions + row * width).to(tl.int32)
    base = tl.load(bases + row)
    kept = conv + pool_row * conv_stride
    place_in = tl.arange(0, window)
    at = base + place_in
    is_old = at < first
    entry = at % ring
    xb_row = ring_xb + pool_row * xb_stride
    gates_row = ring_gates + pool_row * gates_stride
    b_place = xb_row + entry[:, None] * xb_dim + b_channel[None, :]
    b_all = tl.load(b_place, mask=is_old[:, None], other=0.0)
    gate_place = gates_row + entry[None, :] * (2 * heads) + head[:, None]
    has_gate = is_old[None, :] & has_head[:, None]
    g_all = tl.load(gate_place, mask=has_gate, other=0.0)
    dt_all = tl.load(gate_place + heads, mask=has_gate, other=0.0)
    query = tl.arange(0, queries)
    inputs = zxbcdt + row * width * input_stride + d_inner
    wait_for_previous(overlap)
    count = (first > 0).to(tl.int32)
    for token in tl.static_range(1, width):
        follows = tl.load(positions + row * width + token).to(tl.int32) == first + token
        count += ((first > 0) & follows).to(tl.int32)
    is_own = (at >= first) & (at < first + count)
    own_b, b_raw = _convolved(
        kept, inputs, at, is_own, first, b_channel, b_weights, b_bias, input_stride, conv_dim,
        conv_ring,
    )  # fmt: skip
    c, c_raw = _convolved(
        kept, inputs, first + query, query < width, first, c_channel, c_weights, c_bias,
        input_stride, conv_dim, conv_ring,
    )  # fmt: skip
    keeps = block == 0
    brought = keeps & (query < count)
    kept_at = kept + ((first + query) % conv_ring)[:, None] * conv_dim + c_channel[None, :]
    tl.store(kept_at, c_raw, mask=brought[:, None])
    place = c_out + (row * width + query)[:, None] * bc_dim + group * d_state + column[None, :]
    tl.store(place, c, mask=keeps & (query < width)[:, None])
    kept_at = kept + (at % conv_ring)[:, None] * conv_dim + b_channel[None, :]
    tl.store(kept_at, b_raw, mask=keeps & is_own[:, None])
    tl.store(b_place, own_b, mask=keeps & is_own[:, None])
    own_gate = is_own[None, :] & has_head[:, None]
    place = inputs + (at - first)[None, :].to(tl.int64) * input_stride + conv_dim + head[:, None]
    dt = softplus(tl.load(place, mask=own_gate, other=0.0).to(tl.float32) + shift[:, None])
    g = dt * rate[:, None]
    tl.store(gate_place, g, mask=own_gate)
    tl.store(gate_place + heads, dt, mask=own_gate)

    b_all = tl.where(is_own[:, None], own_b, b_all)
    dt_all = tl.where(is_own[None, :], dt, dt_all)
    decay = tl.cumsum(tl.where(is_own[None, :], g, g_all), 1)
    precision: tl.constexpr = "ieee" if is_exact else "tf32"
    scores = tl.dot(b_all, tl.trans(c), input_precision=precision)
    for token in tl.static_range(width):
        own = (at == first + token) & is_own
        here = tl.sum(tl.where(own[None, :], decay, 0.0), 1)
        score = tl.sum(tl.where((query == token)[None, :], scores, 0.0), 1)
        seen = (is_old | (is_own & (at <= first + token))) & (token < count)
        weight = tl.exp(tl.where(seen[None, :], here[:, None] - decay, 0.0))
        weight = tl.where(seen[None, :], score[None, :] * dt_all * weight, 0.0)
        weight = tl.where(own[None, :], weight + through[:, None], weight)
        target = (row * width + token) * heads + head
        place = weights + target[:, None] * window + place_in[None, :]
        tl.store(place, weight, mask=has_head[:, None])
        tl.store(decays + target, tl.exp(here), mask=has_head)


@triton.jit
def _convolved(
    kept: tl.tensor,
    inputs: tl.tensor,
    at: tl.tensor,
    exists: tl.tensor,
    first: tl.tensor,
    channel: tl.tensor,
    conv_weights: tl.tensor,
    bias: tl.tensor,
    input_stride: tl.tensor,
    conv_dim: tl.constexpr,
    conv_ring: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Some channels of the tokens at positions `at` behind the convolution, and their raw inputs,
    which lie in the pool before `first` and in the step's inputs from there on."""
    value = bias[None, :]
    for tap in tl.static_range(4):
        source = at + (tap - 3)
        place = kept + (tl.maximum(source, 0) % conv_ring)[:, None] * conv_dim + channel[None, :]
        is_kept = exists & (source >= 0) & (source < first)
        raw = tl.load(place, mask=is_kept[:, None], other=0.0)
        place = inputs + (source - first)[:, None].to(tl.int64) * input_stride + channel[None, :]
        is_new = exists & (source >= first)
        raw = tl.where(is_new[:, None], tl.load(place, mask=is_new[:, None], other=0.0), raw)
        value += conv_weights[tap][None, :] * raw.to(tl.float32)
    return silu(value).to(raw.dtype), raw
