"""The second kernel of Mamba-2 decode with a rule that replays: a query token's output as the scan
of a prompt gives it, to the bit.

The first kernel (`mamba_inputs.py`) puts the step's inputs into the rings, and multiplies C by B,
which the heads of a group share. Here a program takes some lanes of one head of a row: the state at
its base, which is a border of the scan's tiles, and the ring's tokens since. It computes the query
tokens' rows of the scan's tile (`mamba_tile.py`), and stores nothing else. Where the row's tokens
stand in later tiles than the base (tokens may still be taken back, or drafts cross a border) it
first brings the state there, in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.recurrent.mamba_inputs import take_inputs
from megatron_async.ops.recurrent.mamba_pools import MambaParams, MambaShape
from megatron_async.ops.recurrent.mamba_tile import advanced, decays_of, outputs_of, scores_of
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


@triton.jit
def _outputs(
    at: tl.tensor,
    position: tl.tensor,
    score: tl.tensor,
    c: tl.tensor,
    x: tl.tensor,
    dt: tl.tensor,
    s: tl.tensor,
    decay: tl.tensor,
    own: tl.tensor,
    through: tl.tensor,
) -> tl.tensor:
    """Outputs of the query tokens that stand in this tile; what others get is of no use."""
    is_own = at[:, None] == position[None, :]
    # One entry and zeros: exact in any order.
    here = tl.sum(tl.where(is_own, decay[None, :], 0.0), 1)
    seen = at[:, None] >= position[None, :]
    return outputs_of(score, c, x, dt, s, decay, here, seen, own, through)


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
    # are there before the first layer, and states since the flush.
    pool_row = tl.load(row_index + row).to(tl.int64)
    first = tl.load(positions + row * width).to(tl.int32)
    base = tl.load(bases + row)
    place = pools.state + pool_row * strides.state + head * (head_dim * d_state)
    place = place + lane[:, None] * d_state + column[None, :]
    s = tl.load(place, mask=inside[:, None] & (first > 0), other=0.0, cache_modifier=".cg")
    wait_for_previous(overlap)

    # Query tokens that count: the first ones.
    count = (first > 0).to(tl.int32)
    for number in tl.static_range(1, width):
        follows = tl.load(positions + row * width + number).to(tl.int32) == first + number
        count += ((first > 0) & follows).to(tl.int32)
    end = first + count
    token = row * width + query
    place = inputs.c + token[:, None] * bc_dim + group * d_state + column[None, :]
    c = tl.load(place, mask=(query < width)[:, None], other=0.0)
    xb = pools.ring_xb + pool_row * strides.ring_xb
    kept = (xb, pools.ring_gates + pool_row * strides.ring_gates)
    at, counts = first + query, query < count
    place = xb + (at % ring)[:, None] * shape.ring_dim + (head * head_dim + lane)[None, :]
    own = tl.load(place, mask=counts[:, None] & inside[None, :], other=0.0)
    target = out + token[:, None] * out_stride + (head * head_dim + lane)[None, :]
    begin = base
    if not crosses:
        s = tl.trans(s.to(c.dtype))  # as outputs take it: half as much changes threads
    else:
        s = tl.trans(s)
        for _ in range(tl.maximum((end - 1) // tile - base // tile, 0)):
            position = begin + tl.arange(0, tile)
            x, dt = _entries(kept, position, end, head, lane, shape, ring)
            source = xb + (position % ring)[:, None] * shape.ring_dim
            b = tl.load(source + (shape.d_inner + group * d_state + column)[None, :])
            decay = decays_of(dt, rate)
            y = _outputs(at, position, scores_of(c, b), c, x, dt, s, decay, own, through)
            stored = counts & (at >= begin) & (at < begin + tile)
            tl.store(target, y.to(out.dtype.element_ty), mask=stored[:, None] & inside[None, :])
            s = advanced(s, x, b, dt, decay, tile, False)
            begin += tile
    position = begin + tl.arange(0, tile)
    x, dt = _entries(kept, position, end, head, lane, shape, ring)
    place = inputs.weights + (token * shape.groups + group)[:, None] * tile
    place = place + tl.arange(0, tile)[None, :]
    score = tl.load(place, mask=(query < width)[:, None], other=0.0)
    y = _outputs(at, position, score, c, x, dt, s, decays_of(dt, rate), own, through)
    # Tokens that do not count give 0.
    y = tl.where(counts[:, None], y, 0.0)
    stored = (query < width) & ((at >= begin) | (query >= count))
    tl.store(target, y.to(out.dtype.element_ty), mask=stored[:, None] & inside[None, :])
