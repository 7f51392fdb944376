"""The kernels of `delta_decode`.

`inputs_kernel` takes a row's convolution. One program a key head: it puts the normalised key into
the ring, and finds what the query's and the key's products with all keys of the ring are. Value
heads and their tiles share these, so the ring's keys are read once. Other programs take channels of
v, and the gates.

`outputs_kernel` takes a tile of one value head's state, reads it once, brings it to the step's base
where entries are due (`FlushRule`), and makes the query tokens' pseudo values and outputs of it, of
the ring's pseudo values in its own lanes, and of the products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.dependent_launch import wait_for_previous
from megatron_async.ops.recurrent.delta_pools import NORM_EPS
from megatron_async.ops.recurrent.recurrent_math import silu, softplus

EPS = tl.constexpr(NORM_EPS)


@triton.jit
def _weights(
    conv_weight: tl.tensor, channel: tl.tensor, inside: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The taps of channels, the oldest input's first."""
    place = conv_weight + channel * 4
    return (
        tl.load(place, mask=inside, other=0.0).to(tl.float32),
        tl.load(place + 1, mask=inside, other=0.0).to(tl.float32),
        tl.load(place + 2, mask=inside, other=0.0).to(tl.float32),
        tl.load(place + 3, mask=inside, other=0.0).to(tl.float32),
    )


@triton.jit
def _history(
    kept: tl.tensor,
    first: tl.tensor,
    inside: tl.tensor,
    conv_ring: tl.constexpr,
    conv_dim: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Raw inputs of the three tokens before `first`; none before position 0."""
    place = kept + (tl.maximum(first - 3, 0) % conv_ring) * conv_dim
    input_0 = tl.load(place, mask=inside & (first >= 3), other=0.0).to(tl.float32)
    place = kept + (tl.maximum(first - 2, 0) % conv_ring) * conv_dim
    input_1 = tl.load(place, mask=inside & (first >= 2), other=0.0).to(tl.float32)
    place = kept + (tl.maximum(first - 1, 0) % conv_ring) * conv_dim
    input_2 = tl.load(place, mask=inside & (first >= 1), other=0.0).to(tl.float32)
    return input_0, input_1, input_2


@triton.jit(do_not_specialize_on_alignment=["row_index", "positions", "base_after"])
def inputs_kernel(
    qkvzba: tl.tensor,
    input_stride: tl.tensor,
    conv_weight: tl.tensor,
    dt_bias: tl.tensor,
    a_log: tl.tensor,
    ring_xb: tl.tensor,
    xb_stride: tl.tensor,
    ring_dt: tl.tensor,
    dt_stride: tl.tensor,
    conv: tl.tensor,
    conv_stride: tl.tensor,
    row_index: tl.tensor,
    positions: tl.tensor,
    base_after: tl.tensor,
    q_out: tl.tensor,
    v_out: tl.tensor,
    beta_out: tl.tensor,
    scores: tl.tensor,
    width: tl.constexpr,
    key_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_heads: tl.constexpr,
    value_dim: tl.constexpr,
    ring: tl.constexpr,
    window: tl.constexpr,
    conv_ring: tl.constexpr,
    heads_tile: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Convolution, norms, gates and products of keys; see the module. Grid: key heads and parts of
    v's channels, rows."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_inner: tl.constexpr = key_heads * key_dim
    value_inner: tl.constexpr = value_heads * value_dim
    conv_dim: tl.constexpr = 2 * key_inner + value_inner
    xb_dim: tl.constexpr = value_inner + key_inner
    if part < key_heads:
        column = tl.arange(0, key_dim)
        own = part * key_dim + column
        every = column >= 0
        q_weight_0, q_weight_1, q_weight_2, q_weight_3 = _weights(conv_weight, own, every)
        k_weight_0, k_weight_1, k_weight_2, k_weight_3 = _weights(
            conv_weight, key_inner + own, every
        )
        wait_for_previous(overlap)
        pool_row = tl.load(row_index + row).to(tl.int64)
        first = tl.load(positions + row * width).to(tl.int32)
        position = tl.load(base_after + row) + tl.arange(0, window)
        stored_keys = ring_xb + pool_row * xb_stride + value_inner + own
        place = stored_keys[None, :] + (position % ring)[:, None] * xb_dim
        keys = tl.load(place, mask=(position < first)[:, None], other=0.0).to(tl.float32)
        kept = conv + pool_row * conv_stride + own
        q_0, q_1, q_2 = _history(kept, first, every, conv_ring, conv_dim)
        k_0, k_1, k_2 = _history(kept + key_inner, first, every, conv_ring, conv_dim)
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
            tl.store(q_out + token * key_inner + own, q_kept)
            tl.store(stored_keys + (at % ring) * xb_dim, k_kept, mask=every & brought)
            q, k = q_kept.to(tl.float32), k_kept.to(tl.float32)
            keys = tl.where((position == at)[:, None], k[None, :], keys)
            with_k = tl.sum(keys * k[None, :], 1)
            with_q = tl.sum(keys * q[None, :], 1)
            place = scores + (token * key_heads + part) * (2 * window) + tl.arange(0, window)
            tl.store(place, with_k)
            tl.store(place + window, with_q)
    else:
        local = (part - key_heads) * tile + tl.arange(0, tile)
        inside = local < value_inner
        channel = 2 * key_inner + local
        weight_0, weight_1, weight_2, weight_3 = _weights(conv_weight, channel, inside)
        head = tl.arange(0, heads_tile)
        is_head = (head < value_heads) & (part == key_heads)
        rate = -tl.exp(tl.load(a_log + head, mask=is_head, other=0.0).to(tl.float32))
        bias = tl.load(dt_bias + head, mask=is_head, other=0.0).to(tl.float32)
        wait_for_previous(overlap)
        pool_row = tl.load(row_index + row).to(tl.int64)
        first = tl.load(positions + row * width).to(tl.int32)
        v_kept = conv + pool_row * conv_stride + channel
        input_0, input_1, input_2 = _history(v_kept, first, inside, conv_ring, conv_dim)
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
            tl.store(v_out + token * value_inner + local, value, mask=inside)
            input_0, input_1, input_2 = input_1, input_2, input_3
            gates = given + conv_dim + value_inner + head
            beta = tl.load(gates, mask=is_head, other=0.0).to(tl.float32)
            alpha = tl.load(gates + value_heads, mask=is_head, other=0.0).to(tl.float32)
            tl.store(beta_out + token * value_heads + head, tl.sigmoid(beta), mask=is_head)
            g_place = ring_dt + pool_row * dt_stride + (at % ring) * value_heads + head
            tl.store(g_place, rate * softplus(alpha + bias), mask=is_head & brought)


@triton.jit(
    do_not_specialize_on_alignment=["row_index", "positions", "base_before", "base_after", "out"]
)
def outputs_kernel(
    q_in: tl.tensor,
    v_in: tl.tensor,
    beta_in: tl.tensor,
    scores: tl.tensor,
    ring_xb: tl.tensor,
    xb_stride: tl.tensor,
    ring_dt: tl.tensor,
    dt_stride: tl.tensor,
    state: tl.tensor,
    state_stride: tl.tensor,
    row_index: tl.tensor,
    positions: tl.tensor,
    base_before: tl.tensor,
    base_after: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    width: tl.constexpr,
    key_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_heads: tl.constexpr,
    value_dim: tl.constexpr,
    ring: tl.constexpr,
    window: tl.constexpr,
    tile: tl.constexpr,
    together: tl.constexpr,
    precision: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Pseudo values and outputs of a tile of a value head; see the module. Grid: value heads times
    tiles, rows."""
    tiles: tl.constexpr = (value_dim + tile - 1) // tile
    key_inner: tl.constexpr = key_heads * key_dim
    value_inner: tl.constexpr = value_heads * value_dim
    xb_dim: tl.constexpr = value_inner + key_inner
    head, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tl.program_id(1).to(tl.int64)
    key_head = head // (value_heads // key_heads)
    lane = part * tile + tl.arange(0, tile)
    inside = lane < value_dim
    channel = head * value_dim + lane
    column = key_head * key_dim + tl.arange(0, key_dim)
    # Nothing that is read before the wait is written in this step by the kernel before: it writes
    # the ring's keys and gates of this step's tokens only, and no pseudo value. The kernels before
    # that one are done.
    pool_row = tl.load(row_index + row).to(tl.int64)
    first = tl.load(positions + row * width).to(tl.int32)
    before, after = tl.load(base_before + row), tl.load(base_after + row)
    place = state + pool_row * state_stride + head * (value_dim * key_dim)
    cell = lane[:, None] * key_dim + tl.arange(0, key_dim)[None, :]
    loaded = inside[:, None] & (first > 0)
    stored = tl.load(place + cell, mask=loaded, other=0.0, cache_modifier=".cg")
    values = ring_xb + pool_row * xb_stride
    keys = values + value_inner
    gates = ring_dt + pool_row * dt_stride + head
    position = after + tl.arange(0, window)
    entry = position % ring
    is_earlier = inside[:, None] & (position < first)[None, :]
    source = values + (channel[:, None] + entry[None, :] * xb_dim)
    u = tl.load(source, mask=is_earlier, other=0.0).to(tl.float32)
    s = stored.to(tl.float32)
    if (first > 0) & (after > before):
        for begin in range(before, after, together):
            moved = begin + tl.arange(0, together)
            due = moved < after
            from_slot = (moved % ring) * xb_dim
            g = tl.load(gates + (moved % ring) * value_heads, mask=due, other=0.0)
            is_due = inside[:, None] & due[None, :]
            value_source = values + (channel[:, None] + from_slot[None, :])
            key_source = keys + (from_slot[:, None] + column[None, :])
            added = tl.load(value_source, mask=is_due, other=0.0)
            key = tl.load(key_source, mask=due[:, None], other=0.0).to(tl.float32)
            total = tl.sum(g, 0)
            added = added.to(tl.float32) * tl.exp(total - tl.cumsum(g, 0))[None, :]
            s = s * tl.exp(total) + tl.dot(added, key, input_precision=precision)
        # As a later step will read it.
        s = s.to(stored.dtype).to(tl.float32)
        tl.store(place + cell, s.to(stored.dtype), mask=loaded)
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
        with_k = scores + (token * key_heads + key_head) * (2 * window) + tl.arange(0, window)
        with_q = tl.load(with_k + window) * share
        with_k = tl.load(with_k) * share
        slot = (at % ring) * xb_dim
        k = tl.load(keys + (slot + column), mask=query < count, other=0.0).to(tl.float32)
        q = tl.load(q_in + token * key_inner + column).to(tl.float32)
        v = tl.load(v_in + token * value_inner + channel, mask=inside, other=0.0).to(tl.float32)
        beta = tl.load(beta_in + token * value_heads + head)
        # The token's own column of u is still 0 here.
        found = tl.sum(s * k[None, :], 1) * tl.exp(here) + tl.sum(u * with_k[None, :], 1)
        kept = (beta * (v - found)).to(ring_xb.dtype.element_ty)
        tl.store(values + (slot + channel), kept, mask=inside & (query < count))
        u = tl.where((position == at)[None, :], kept.to(tl.float32)[:, None], u)
        o = tl.sum(s * q[None, :], 1) * tl.exp(here) + tl.sum(u * with_q[None, :], 1)
        o = tl.where(query < count, o, 0.0)
        target = out + token * out_stride + channel
        tl.store(target, o.to(out.dtype.element_ty), mask=inside)
