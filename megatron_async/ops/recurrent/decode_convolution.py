"""The convolution of decode rows: what its kernels share.

Four inputs make an output, the token's own and the three before, whose raw values the pools keep by
position. Kernels load the history before they wait for the layer's first product: it is of earlier
steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.dependent_launch import wait_for_previous
from megatron_async.ops.recurrent.recurrent_math import silu


@triton.jit
def taps(
    conv_weight: tl.tensor, channel: tl.tensor, inside: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The convolution's four weights of some channels, the oldest input's first."""
    place = conv_weight + channel * 4
    weight_0 = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    weight_1 = tl.load(place + 1, mask=inside, other=0.0).to(tl.float32)
    weight_2 = tl.load(place + 2, mask=inside, other=0.0).to(tl.float32)
    weight_3 = tl.load(place + 3, mask=inside, other=0.0).to(tl.float32)
    return weight_0, weight_1, weight_2, weight_3


@triton.jit
def history(
    kept: tl.tensor,
    first: tl.tensor,
    inside: tl.tensor,
    conv_dim: tl.constexpr,
    conv_ring: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Raw inputs of the three tokens before; zeros before position 0."""
    place = kept + (tl.maximum(first - 3, 0) % conv_ring) * conv_dim
    input_0 = tl.load(place, mask=inside & (first >= 3), other=0.0).to(tl.float32)
    place = kept + (tl.maximum(first - 2, 0) % conv_ring) * conv_dim
    input_1 = tl.load(place, mask=inside & (first >= 2), other=0.0).to(tl.float32)
    place = kept + (tl.maximum(first - 1, 0) % conv_ring) * conv_dim
    input_2 = tl.load(place, mask=inside & (first >= 1), other=0.0).to(tl.float32)
    return input_0, input_1, input_2


@triton.jit
def convolve_into_ring(
    part: tl.tensor,
    row: tl.tensor,
    zxbcdt: tl.tensor,
    input_stride: tl.tensor,
    conv_weight: tl.tensor,
    conv_bias: tl.tensor,
    ring_xb: tl.tensor,
    xb_stride: tl.tensor,
    conv: tl.tensor,
    conv_stride: tl.tensor,
    row_index: tl.tensor,
    positions: tl.tensor,
    width: tl.constexpr,
    d_inner: tl.constexpr,
    xb_dim: tl.constexpr,
    conv_dim: tl.constexpr,
    ring: tl.constexpr,
    conv_ring: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Channels of x: convolution and ring."""
    channel = part * tile + tl.arange(0, tile)
    inside = channel < d_inner
    weight_0, weight_1, weight_2, weight_3 = taps(conv_weight, channel, inside)
    bias = tl.load(conv_bias + channel, mask=inside, other=0.0).to(tl.float32)
    pool_row = tl.load(row_index + row).to(tl.int64)
    first = tl.load(positions + row * width).to(tl.int32)
    kept = conv + pool_row * conv_stride + channel
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
        place = ring_xb + pool_row * xb_stride + (position % ring) * xb_dim + channel
        tl.store(place, value, mask=inside & brought)
        input_0, input_1, input_2 = input_1, input_2, input_3
