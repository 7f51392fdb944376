"""The second kernel of Mamba-2 decode with a rule that replays: a query token's output as the scan
of a prompt gives it, to the bit.

The first kernel (`mamba_inputs.py`) puts the step's inputs into the rings, and makes what all lanes
of a head share: the weights of the open tile's x. Here a program takes some lanes of one head of a
row: the state at its base, which is a border of the scan's tiles, and the ring's x since. It
multiplies the query tokens' rows of the scan's tile (`mamba_tile.py`), and stores nothing else.
Where the row's tokens stand in later tiles than the base (tokens may still be taken back, or drafts
cross a border) it first brings the state there, in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.recurrent.kernel_parts import decays_of, held, rounded
from megatron_async.ops.recurrent.mamba_inputs import take_inputs
from megatron_async.ops.recurrent.mamba_pools import MambaParams, MambaShape
from megatron_async.ops.recurrent.mamba_tile import advanced, outputs_of, scores_of, weights_of
from megatron_async.ops.recurrent.recurrent_pools import (
    TILE,
    DecodeRows,
    FlushRule,
    RecurrentPools,
)

QUERIES = tl.constexpr(16)
"""Rows of a product of the matrix units; a step's query tokens are 8 or fewer."""
WARPS = 4
LANES = 64
"""Most elements of a head that a program takes."""
MAX_STATE = 128
"""Longest state of a lane with so many; with a longer one, half of them."""


def replay(
    zxbcdt: Tensor,
    params: MambaParams,
    pools: RecurrentPools,
    step: DecodeRows,
    rule: FlushRule,
    shape: MambaShape,
    out: Tensor,
) -> None:
    """`mamba_decode`; the arguments are checked there."""
    inputs = take_inputs(zxbcdt, params, pools, pools.strides, step, rule, shape)
    lanes = min(triton.next_power_of_2(max(shape.head_dim, 16)), LANES)
    if shape.d_state > MAX_STATE:
        lanes = min(lanes, LANES // 2)
    _replay_kernel[(shape.heads * triton.cdiv(shape.head_dim, lanes), step.row_index.numel())](
        inputs,
        params,
        pools,
        pools.strides,
        *step[:3],
        out,
        out.stride(0),
        shape=shape,
        width=step.width,
        crosses=step.width > 1 or rule.lag > 0,
        ring=pools.ring_xb.size(1),
        tile=TILE,
        lanes=lanes,
        num_warps=WARPS,
        num_stages=2,
        **launch_options(zxbcdt),
    )


@triton.jit
def _entries(
    row: tl.tuple,
    position: tl.tensor,
    end: tl.tensor,
    head: tl.tensor,
    lane: tl.tensor,
    shape: tl.constexpr,
    ring: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The ring's x and dt of a tile's tokens; zeros from `end` on."""
    exists = position < end
    source = row[0] + (position % ring)[:, None] * shape.ring_dim
    in_tile = exists[:, None] & (lane < shape.head_dim)[None, :]
    x = tl.load(source + (head * shape.head_dim + lane)[None, :], mask=in_tile, other=0.0)
    place = row[1] + (position % ring) * (2 * shape.heads) + shape.heads + head
    return x, tl.load(place, mask=exists, other=0.0)


@triton.jit(do_not_specialize_on_alignment=["row_index", "positions", "bases", "out"])
def _replay_kernel(
    inputs: tl.tuple,
    parameters: tl.tuple,
    pools: tl.tuple,
    strides: tl.tuple,
    row_index: tl.tensor,
    positions: tl.tensor,
    bases: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    shape: tl.constexpr,
    width: tl.constexpr,
    crosses: tl.constexpr,
    ring: tl.constexpr,
    tile: tl.constexpr,
    lanes: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """`inputs`: `DecodeInputs`. `crosses`: whether a row's tokens may stand in other
    tiles than its base; registers that only this takes would halve the programs at a time."""
    head_dim: tl.constexpr = shape.head_dim
    d_state: tl.constexpr = shape.d_state
    bc_dim: tl.constexpr = shape.bc_dim
    tiles: tl.constexpr = (head_dim + lanes - 1) // lanes
    head, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tl.program_id(1).to(tl.int64)
    group = head // shape.group_heads
    lane = part * lanes + tl.arange(0, lanes)
    inside = lane < head_dim
    column = tl.arange(0, d_state)
    query = tl.arange(0, QUERIES)
    rate = -tl.exp(tl.load(parameters.a_log + head).to(tl.float32))
    through = tl.load(parameters.d + head).to(tl.float32)
    # No kernel of this step's layers writes what is read before the wait: rows, positions and bases
    # are there before the first layer, states since the flush, and x of earlier steps' tokens.
    pool_row = tl.load(row_index + row).to(tl.int64)
    first = tl.load(positions + row * width).to(tl.int32)
    base = tl.load(bases + row)
    place = pools.state + pool_row * strides.state + head * (head_dim * d_state)
    place = place + lane[:, None] * d_state + column[None, :]
    s = tl.load(place, mask=inside[:, None] & (first > 0), other=0.0, cache_modifier=".cg")
    xb = pools.ring_xb + pool_row * strides.ring_xb
    channel = head * head_dim + lane
    begin = base
    position = begin + tl.arange(0, tile)
    if not crosses:
        place = xb + (position % ring)[:, None] * shape.ring_dim + channel[None, :]
        x = tl.load(place, mask=(position < first)[:, None] & inside[None, :], other=0.0)
    wait_for_previous(overlap)

    # Query tokens that count: the first ones.
    count = (first > 0).to(tl.int32)
    for number in tl.static_range(1, width):
        follows = tl.load(positions + row * width + number).to(tl.int32) == first + number
        count += ((first > 0) & follows).to(tl.int32)
    token, is_query = row * width + query, query < width
    place = inputs.c + token[:, None] * bc_dim + group * d_state + column[None, :]
    c = tl.load(place, mask=is_query[:, None], other=0.0)
    made = token * shape.heads + head
    place = inputs.weights + made[:, None] * tile + tl.arange(0, tile)[None, :]
    weight = tl.load(place, mask=is_query[:, None], other=0.0)
    left = tl.load(inputs.decays + made, mask=is_query, other=0.0)
    end = first + count
    at, counts = first + query, query < count
    target = out + token[:, None] * out_stride + channel[None, :]
    if not crosses:
        own = tl.load(xb + (first % ring) * shape.ring_dim + channel, mask=inside, other=0.0)
        own = own[None, :]
        x = tl.where((position == first)[:, None], own, x)
        s = tl.trans(held(s.to(c.dtype), overlap))
    else:
        kept = (xb, pools.ring_gates + pool_row * strides.ring_gates)
        place = xb + (at % ring)[:, None] * shape.ring_dim + channel[None, :]
        own = tl.load(place, mask=counts[:, None] & inside[None, :], other=0.0)
        s = tl.trans(s)
        for _ in range(tl.maximum((end - 1) // tile - base // tile, 0)):
            position = begin + tl.arange(0, tile)
            x, dt = _entries(kept, position, end, head, lane, shape, ring)
            source = xb + (position % ring)[:, None] * shape.ring_dim
            b = tl.load(source + (shape.d_inner + group * d_state + column)[None, :])
            decay = decays_of(rounded(dt, rate))
            # One entry and zeros: exact in any order.
            is_own = at[:, None] == position[None, :]
            here = tl.sum(tl.where(is_own, decay[None, :], 0.0), 1)
            seen = at[:, None] >= position[None, :]
            score = scores_of(c, b)
            passed = weights_of(score, dt[None, :], decay[None, :], here[:, None], seen)
            y = outputs_of(passed, c, x, s, tl.exp(here), own, through)
            stored = counts & (at >= begin) & (at < begin + tile)
            tl.store(target, y.to(out.dtype.element_ty), mask=stored[:, None] & inside[None, :])
            s = advanced(s, x, b, dt, decay, tile, False)
            begin += tile
        x, dt = _entries(kept, begin + tl.arange(0, tile), end, head, lane, shape, ring)
    y = outputs_of(weight, c, x, s, left, own, through)
    # Tokens that do not count give 0.
    y = tl.where(counts[:, None], y, 0.0)
    stored = is_query & ((at >= begin) | (query >= count))
    tl.store(target, y.to(out.dtype.element_ty), mask=stored[:, None] & inside[None, :])
