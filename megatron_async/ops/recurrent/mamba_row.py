"""Mamba-2 decode of a step of one row, in one kernel.

For more rows a first kernel (`mamba_inputs.py`) makes what all heads of a group share, and a second
one (`mamba_decode.py`) reads it. In a step of one row each kernel waits longer for the one before
than it works. Here every program makes the inputs of its group again, from what it has loaded
before the wait: only the token's own raw inputs come behind it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.recurrent.kernel_parts import history, silu, softplus, taps
from megatron_async.ops.recurrent.mamba_inputs import window_of
from megatron_async.ops.recurrent.mamba_pools import LANES, MambaParams, MambaShape
from megatron_async.ops.recurrent.recurrent_pools import DecodeRows, FlushRule, RecurrentPools

MOST_ROWS = 1
"""Rows of such a step. Each head's program makes B and C again, in 32 programs of a group of
Nemotron-3-Nano: with more rows, that is the work."""
WARP_INPUTS = 2048
"""Elements of B since the base that a warp can hold beside its share of the state: as few warps as
that take. Nemotron-3-Nano, 16 of 128, has one; with two its step takes 5 us longer, with four 12.
"""


def warps_of(d_state: int, window: int) -> int:
    """Warps of a program: a power of two, as `d_state` and `window` are."""
    return max(d_state * window // WARP_INPUTS, 1)


def decode_row(
    zxbcdt: Tensor,
    params: MambaParams,
    pools: RecurrentPools,
    step: DecodeRows,
    rule: FlushRule,
    shape: MambaShape,
    out: Tensor,
) -> None:
    """`mamba_decode` of rows of one query token; the arguments are checked there."""
    window = window_of(rule, 1)
    _row_kernel[(shape.heads * triton.cdiv(shape.head_dim, LANES), step.row_index.numel())](
        zxbcdt,
        zxbcdt.stride(0),
        params,
        pools,
        pools.strides,
        *step[:3],
        out,
        out.stride(0),
        shape=shape,
        ring=pools.ring_xb.size(1),
        conv_ring=pools.conv.size(1),
        window=window,
        tile=LANES,
        num_warps=warps_of(shape.d_state, window),
        **launch_options(zxbcdt),
    )


@triton.jit
def _convolved(
    parameters: tl.tuple,
    channel: tl.tensor,
    inside: tl.tensor,
    input_0: tl.tensor,
    input_1: tl.tensor,
    input_2: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """What the three tokens before add to a channel's convolution, its bias included, and the
    weight of the token's own input."""
    weight_0, weight_1, weight_2, weight_3 = taps(parameters.conv_weight, channel, inside)
    bias = tl.load(parameters.conv_bias + channel, mask=inside, other=0.0).to(tl.float32)
    return bias + weight_0 * input_0 + weight_1 * input_1 + weight_2 * input_2, weight_3


# What is read before the wait is of steps before and of this step's flush, which has ended when the
# product before this kernel starts (`ops/dependent_launch.py`). A program writes entries
# of this token's position alone, which no other program reads: their own are in registers.
@triton.jit(do_not_specialize_on_alignment=["row_index", "positions", "bases", "out"])
def _row_kernel(
    zxbcdt: tl.tensor,
    input_stride: tl.tensor,
    parameters: tl.tuple,
    pools: tl.tuple,
    strides: tl.tuple,
    row_index: tl.tensor,
    positions: tl.tensor,
    bases: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    shape: tl.constexpr,
    ring: tl.constexpr,
    conv_ring: tl.constexpr,
    window: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """A tile of one head's output, `tile` of its elements."""
    heads: tl.constexpr = shape.heads
    head_dim: tl.constexpr = shape.head_dim
    d_state: tl.constexpr = shape.d_state
    d_inner: tl.constexpr = shape.d_inner
    bc_dim: tl.constexpr = shape.bc_dim
    xb_dim: tl.constexpr = shape.ring_dim
    conv_dim: tl.constexpr = shape.conv_dim
    tiles: tl.constexpr = (head_dim + tile - 1) // tile
    group_heads: tl.constexpr = shape.group_heads
    head, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tl.program_id(1).to(tl.int64)
    group = head // group_heads
    lane = part * tile + tl.arange(0, tile)
    inside = lane < head_dim
    column = tl.arange(0, d_state)
    always = column < d_state
    x_channel = head * head_dim + lane
    b_channel = d_inner + group * d_state + column
    c_channel = b_channel + bc_dim
    pool_row = tl.load(row_index + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int32)
    base = tl.load(bases + row)
    brought = position > 0
    place = pools.state + pool_row * strides.state + head * (head_dim * d_state)
    place = place + lane[:, None] * d_state + column[None, :]
    s = tl.load(place, mask=inside[:, None] & brought, other=0.0, cache_modifier=".cg")
    s = s.to(tl.float32)
    at = base + tl.arange(0, window)
    is_old = at < position
    entry = at % ring
    xb_row = pools.ring_xb + pool_row * strides.ring_xb
    gates_row = pools.ring_gates + pool_row * strides.ring_gates + head
    b_place = xb_row + entry[:, None] * xb_dim + b_channel[None, :]
    b_all = tl.load(b_place, mask=is_old[:, None], other=0.0)
    x_place = xb_row + entry[:, None] * xb_dim + x_channel[None, :]
    x_all = tl.load(x_place, mask=is_old[:, None] & inside[None, :], other=0.0)
    decay = tl.load(gates_row + entry * (2 * heads), mask=is_old, other=0.0)
    share = tl.load(gates_row + entry * (2 * heads) + heads, mask=is_old, other=0.0)
    rate = -tl.exp(tl.load(parameters.a_log + head).to(tl.float32))
    through = tl.load(parameters.d + head).to(tl.float32)
    shift = tl.load(parameters.dt_bias + head).to(tl.float32)
    kept = pools.conv + pool_row * strides.conv
    x_0, x_1, x_2 = history(kept + x_channel, position, inside, conv_dim, conv_ring)
    b_0, b_1, b_2 = history(kept + b_channel, position, always, conv_dim, conv_ring)
    c_0, c_1, c_2 = history(kept + c_channel, position, always, conv_dim, conv_ring)
    x_sum, x_tap = _convolved(parameters, x_channel, inside, x_0, x_1, x_2)
    b_sum, b_tap = _convolved(parameters, b_channel, always, b_0, b_1, b_2)
    c_sum, c_tap = _convolved(parameters, c_channel, always, c_0, c_1, c_2)
    # What is left now of each input, times its dt, and of the state: the token's own decay
    # multiplies both.
    left = tl.sum(decay, 0)
    share *= tl.exp(left - tl.cumsum(decay, 0))
    left = tl.exp(left)
    wait_for_previous(overlap)

    source = zxbcdt + row * input_stride + d_inner
    x_raw = tl.load(source + x_channel, mask=inside, other=0.0)
    b_raw = tl.load(source + b_channel)
    c_raw = tl.load(source + c_channel)
    dt = softplus(tl.load(source + conv_dim + head).to(tl.float32) + shift)
    g = dt * rate
    x = silu(x_sum + x_tap * x_raw.to(tl.float32)).to(x_raw.dtype)
    b = silu(b_sum + b_tap * b_raw.to(tl.float32)).to(b_raw.dtype)
    c = silu(c_sum + c_tap * c_raw.to(tl.float32)).to(c_raw.dtype).to(tl.float32)
    own = (at == position) & brought
    b_all = tl.where(own[:, None], b[None, :], b_all).to(tl.float32)
    x_all = tl.where(own[:, None], x[None, :], x_all).to(tl.float32)
    kept_share = tl.exp(g)
    share = tl.where(own, dt, share * kept_share)
    weight = tl.sum(b_all * c[None, :], 1) * share + tl.where(own, through, 0.0)
    y = tl.sum(s * c[None, :], 1) * (left * kept_share) + tl.sum(x_all * weight[:, None], 0)
    y = tl.where(brought & inside, y, 0.0)
    tl.store(out + row * out_stride + x_channel, y.to(out.dtype.element_ty), mask=inside)

    kept += (position % conv_ring) * conv_dim
    new = xb_row + (position % ring) * xb_dim
    tl.store(kept + x_channel, x_raw, mask=inside & brought)
    tl.store(new + x_channel, x, mask=inside & brought)
    if part == 0:
        gate_place = gates_row + (position % ring) * (2 * heads)
        tl.store(gate_place, g, mask=brought)
        tl.store(gate_place + heads, dt, mask=brought)
        first = always & brought & (head % group_heads == 0)
        tl.store(kept + b_channel, b_raw, mask=first)
        tl.store(kept + c_channel, c_raw, mask=first)
        tl.store(new + b_channel, b, mask=first)
