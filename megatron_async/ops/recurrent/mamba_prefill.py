"""Mamba-2 prefill: packed chunks of prompts, their history carried from rows of the pools.

Two kernels: the convolution (`prefill_parts.py`), and the scan, one program of which walks through
a chunk with a tile of one head's state and leaves what later steps need.

State-space duality (Dao and Gu 2024): within a tile of tokens the recurrence is a masked product
like attention's, between tiles it is a state. Tiles are cut at multiples of their size in the
request's own positions. The state stays in registers: no states of tiles go through memory, and a
program's arithmetic depends on its chunk alone.

With inputs of 16 bits the products inside a tile, and of C with the state, take factors rounded to
16 bits, as attention does. The state itself is kept in float32, and what a token adds to it is
multiplied as two 16-bit parts, which is exact to 2^-17.

With a rule that replays (`replaying_rule`), a chunk that begins inside a tile takes the tile's
earlier tokens from the ring, and computes all of it again. Then a kernel of its own fills the ring,
since programs of the scan may still read there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import wait_for_previous
from megatron_async.ops.op import promising
from megatron_async.ops.recurrent.kernel_parts import add_products, decays_of, rounded
from megatron_async.ops.recurrent.mamba_pools import MambaParams, MambaShape, shape_of
from megatron_async.ops.recurrent.mamba_reference import mamba_prefill
from megatron_async.ops.recurrent.mamba_tile import (
    advanced,
    outputs_of,
    scores_of,
    weights_of,
)
from megatron_async.ops.recurrent.prefill_parts import (
    BORDERS,
    MANY_PROGRAMS,
    SCAN,
    ConvolutionSizes,
    Tile,
    convolve_chunks,
    keep_entries,
    keep_inputs,
    keep_snapshot,
    launch_scan,
    scan_chunks_before,
    scan_cut,
    scan_turns,
)
from megatron_async.ops.recurrent.recurrent_pools import (
    FlushRule,
    PrefillRows,
    RecurrentPools,
    begin_prefill,
)

CHANNELS = 128
"""Channels that a program of the convolution processes."""


@mamba_prefill.gpu
@promising("invariant")
def mamba_prefill_gpu(
    zxbcdt: Tensor,
    params: MambaParams,
    pools: RecurrentPools,
    rows: PrefillRows,
    base_after: Tensor,
    rule: FlushRule,
    out: Tensor | None = None,
    chunk_dest: Tensor | None = None,
) -> Tensor:
    op = "mamba_prefill"
    shape, out = begin_prefill(op, shape_of, zxbcdt, params, pools, rows, base_after, rule, out)
    tokens, chunks = zxbcdt.size(0), rows.write_rows.numel()
    if tokens and chunks:
        sizes = ConvolutionSizes(
            shape.d_inner, shape.conv_dim, shape.d_inner, shape.conv_dim, shape.heads, CHANNELS, 0
        )
        xbc, dt = convolve_chunks(zxbcdt, params, pools, rows, out, sizes)
        tile = scan_tile(zxbcdt.dtype, shape, chunks)
        window = 1 if rule.replays else triton.next_power_of_2(rule.window(1))
        given = (zxbcdt, xbc, dt, params, pools, rows, base_after, out, chunk_dest, shape.d_inner)
        launch_scan(
            _scan_kernel,
            _programs(shape, tile.lanes),
            *given,
            tile,
            shape=shape,
            window=window,
            replays=rule.replays,
        )
        if rule.replays:
            keep_entries(xbc, dt, params, pools, rows, base_after, rule, 0)
    return out


def scan_tile(dtype: torch.dtype, shape: MambaShape, chunks: int) -> Tile:
    """The tile for a step.

    Its tokens depend on the layer only: another cut is another order of sums, and a prompt must
    give the same bits whatever the batch. Wide tiles make C by B less often, narrow ones fill the
    device where chunks are few; lanes do not meet in a sum. Tried on an H200 with heads of 64 and
    80 (docs/records/hybrid.md).
    """
    if dtype == torch.float32:
        return Tile(16, 16, 8, 1)
    lanes = 64
    while lanes > 16 and lanes >= 2 * shape.head_dim:
        lanes //= 2
    if shape.d_state > 128:
        return Tile(64, min(lanes, 32), 8, 2)
    if chunks * _programs(shape, lanes) >= MANY_PROGRAMS:
        return Tile(64, lanes, 4, 2)
    return Tile(64, max(lanes // 2, 16), 4, 3)


def _programs(shape: MambaShape, lanes: int) -> int:
    return shape.heads * triton.cdiv(shape.head_dim, lanes)


@triton.jit
def _advance(
    state: tl.tensor,
    x: tl.tensor,
    b: tl.tensor,
    dt: tl.tensor,
    decay: tl.tensor,
    rate: tl.tensor,
    counts: tl.tensor,
    is_exact: tl.constexpr,
) -> tl.tensor:
    """The state `[d_state, lanes]` after those tokens of a tile that count."""
    gain = tl.where(counts, dt, 0.0)
    total = tl.sum(gain * rate, 0)
    weight = tl.exp(tl.where(counts, total - decay, 0.0)) * gain
    added = x.to(tl.float32) * weight[:, None]
    return add_products(state * tl.exp(total), tl.trans(b), added, is_exact)


@triton.jit(**SCAN)
def _scan_kernel(
    inputs: tl.tensor,
    input_stride: tl.tensor,
    convolved: tl.tensor,
    gates: tl.tensor,
    parameters: tl.tuple,
    tokens: tl.tensor,
    pools: tl.tuple,
    strides: tl.tuple,
    starts: tl.tensor,
    first_positions: tl.tensor,
    read_rows: tl.tensor,
    write_rows: tl.tensor,
    base_after: tl.tensor,
    chunk_dest: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    shape: tl.constexpr,
    ring: tl.constexpr,
    kept: tl.constexpr,
    tile: tl.constexpr,
    lanes: tl.constexpr,
    window: tl.constexpr,
    replays: tl.constexpr,
    chunks_tile: tl.constexpr,
    has_dest: tl.constexpr,
    is_exact: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """A chunk of one head's lanes: `convolved` is x, B and C, `gates` dt."""
    heads: tl.constexpr = shape.heads
    head_dim: tl.constexpr = shape.head_dim
    d_state: tl.constexpr = shape.d_state
    d_inner: tl.constexpr = shape.d_inner
    bc_dim: tl.constexpr = shape.bc_dim
    conv_dim: tl.constexpr = shape.conv_dim
    xb_dim: tl.constexpr = shape.ring_dim
    group_heads: tl.constexpr = shape.group_heads
    tiles: tl.constexpr = (head_dim + lanes - 1) // lanes
    head, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    group = head // group_heads
    row = tl.program_id(1)
    rate = -tl.exp(tl.load(parameters.a_log + head).to(tl.float32))
    through = tl.load(parameters.d + head).to(tl.float32)
    wait_for_previous(overlap)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    if length > 0:
        first, base = tl.load(first_positions + row), tl.load(base_after + row)
        end = first + length
        read_row = tl.load(read_rows + row).to(tl.int64)
        write_row = tl.load(write_rows + row).to(tl.int64)
        lane = part * lanes + tl.arange(0, lanes)
        inside = lane < head_dim
        column = tl.arange(0, d_state)
        cell = head * (head_dim * d_state) + lane[:, None] * d_state + column[None, :]
        in_state = inside[:, None] & (column >= 0)[None, :]
        # Where the read row's state stands.
        stands = first
        if replays:
            stands = first // tile * tile
        # Nothing of the row is read where a request begins: its former owner's numbers lie there.
        loaded = in_state & (stands > 0)
        s = tl.load(pools.state + read_row * strides.state + cell, mask=loaded, other=0.0)
        target = pools.state + write_row * strides.state + cell
        if base == stands:
            # No token of the chunk is in the state yet.
            tl.store(target, s, mask=in_state)
        s = tl.trans(s.to(tl.float32))
        offset = tl.arange(0, tile)
        dest = chunk_dest
        if has_dest:
            number = scan_chunks_before(starts, first_positions, row, BORDERS, chunks_tile)
            dest = chunk_dest + number - first // BORDERS
        chunk = (inputs, input_stride, pools, strides, start, first)
        for turn in range(scan_turns(stands, end, base, tile)):
            begin, lower, upper = scan_cut(turn, stands, end, base, tile)
            position = begin + offset
            exists = (position >= lower) & (position < upper)
            token = (start - first + position).to(tl.int64)
            source = convolved + token[:, None] * conv_dim
            asks = exists
            if replays:
                # The tile's tokens before the chunk: the ring has x and B in the same order.
                asks = exists & (position >= first)
                old = pools.ring_xb + read_row * strides.ring_xb
                old = old + (position % ring)[:, None] * xb_dim
                source = tl.where((position < first)[:, None], old, source)
            place = source + d_inner + group * d_state + column[None, :]
            b = tl.load(place, mask=exists[:, None], other=0.0)
            c = tl.load(place + bc_dim, mask=asks[:, None], other=0.0)
            place = source + head * head_dim + lane[None, :]
            in_tile = exists[:, None] & inside[None, :]
            x = tl.load(place, mask=in_tile, other=0.0)
            place = gates + head.to(tl.int64) * tokens + token
            if replays:
                old = pools.ring_gates + read_row * strides.ring_gates
                old = old + ((position % ring) * (2 * heads) + heads + head)
                place = tl.where(position < first, old, place)
            dt = tl.load(place, mask=exists, other=0.0)
            if replays:
                seen = offset[:, None] >= offset[None, :]
                decay = decays_of(rounded(dt, rate))
                here = decay[:, None]
                weight = weights_of(scores_of(c, b), dt[None, :], decay[None, :], here, seen)
                y = outputs_of(weight, c, x, s, tl.exp(decay), x, through)
                in_tile = asks[:, None] & inside[None, :]
            else:
                decay = tl.cumsum(dt * rate, 0)
                weight = tl.dot(c, tl.trans(b), input_precision="ieee")
                seen = offset[:, None] >= offset[None, :]
                share_of = tl.where(seen, decay[:, None] - decay[None, :], -float("inf"))
                weight = weight * tl.exp(share_of) * dt[None, :]
                y = tl.dot(c, s.to(c.dtype), input_precision="ieee")
                y = y * tl.exp(decay)[:, None] + x.to(tl.float32) * through
                y = tl.dot(weight.to(x.dtype), x, y, input_precision="ieee")
            place = out + token[:, None] * out_stride + head * head_dim + lane[None, :]
            tl.store(place, y.to(out.dtype.element_ty), mask=in_tile)
            if replays:
                s = advanced(s, x, b, dt, decay, tile, is_exact)
            else:
                s = _advance(s, x, b, dt, decay, rate, exists, is_exact)
            if upper == base:
                tl.store(target, tl.trans(s).to(pools.state.dtype.element_ty), mask=in_state)
            if has_dest:
                keep_snapshot(s, dest, cell, in_state, *chunk, upper, read_row, kept)
        if not replays:
            # What decode steps add to the state themselves.
            later = base + tl.arange(0, window)
            is_later = later < end
            given = (start - first + later).to(tl.int64)
            xb_source = convolved + given[:, None] * conv_dim
            xb_target = (
                pools.ring_xb + write_row * strides.ring_xb + (later % ring)[:, None] * xb_dim
            )
            x_channel = head * head_dim + lane[None, :]
            in_ring = is_later[:, None] & inside[None, :]
            kept_x = tl.load(xb_source + x_channel, mask=in_ring, other=0.0)
            tl.store(xb_target + x_channel, kept_x, mask=in_ring)
            if part == 0:
                if head % group_heads == 0:
                    b_channel = d_inner + group * d_state + column[None, :]
                    kept_b = tl.load(xb_source + b_channel, mask=is_later[:, None], other=0.0)
                    tl.store(xb_target + b_channel, kept_b, mask=is_later[:, None])
                dt_source = gates + head.to(tl.int64) * tokens + given
                kept_dt = tl.load(dt_source, mask=is_later, other=0.0)
                gates_target = pools.ring_gates + write_row * strides.ring_gates + head
                gates_target = gates_target + (later % ring) * (2 * heads)
                tl.store(gates_target, kept_dt * rate, mask=is_later)
                tl.store(gates_target + heads, kept_dt, mask=is_later)
        keep_inputs(*chunk, end, read_row, write_row, kept)
