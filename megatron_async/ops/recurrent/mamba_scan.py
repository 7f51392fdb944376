"""The scan of prefill chunks: one program walks through a chunk with a tile of one head's state.

State-space duality (Dao and Gu 2024): within a tile of tokens the recurrence is a masked product
like attention's, between tiles it is a state. Tiles are cut at multiples of their size in the
request's own positions. The state stays in registers: no states of tiles go through memory, and a
program's arithmetic depends on its chunk alone.

With inputs of 16 bits the products inside a tile, and of C with the state, take factors rounded to
16 bits, as attention does. The state itself is kept in float32, and what a token adds to it is
multiplied as two 16-bit parts, which is exact to 2^-17.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.recurrent.mamba_pools import MambaParams, MambaShape
from megatron_async.ops.recurrent.recurrent_math import add_products
from megatron_async.ops.recurrent.recurrent_pools import FlushRule, PrefillRows, RecurrentPools
from megatron_async.ops.recurrent.scan_history import (
    BORDERS,
    keep_inputs,
    scan_chunks_before,
    scan_cut,
    scan_turns,
)

MANY_PROGRAMS = 128
"""Programs that fill an H200: with fewer, each takes half as much of a head."""


def scan_chunks(
    zxbcdt: Tensor,
    xbc: Tensor,
    dt: Tensor,
    params: MambaParams,
    pools: RecurrentPools,
    rows: PrefillRows,
    base_after: Tensor,
    rule: FlushRule,
    out: Tensor,
    chunk_dest: Tensor | None,
    shape: MambaShape,
) -> None:
    """Scan chunks after their convolution; see `mamba_prefill` for the other arguments.

    Args:
        zxbcdt: what the convolution has read: its last inputs go into the pools.
        xbc: `[tokens, conv_dim]`: x, B and C after the convolution.
        dt: float32 `[heads, tokens]`, after bias and softplus.
        params: the layer's parameters.
        pools: the layer's pools.
        rows: the step's chunks.
        base_after: int32 `[chunks]`.
        rule: when inputs move into the state.
        out: `[tokens, d_inner]`, written for the chunks' tokens.
        chunk_dest: int32 `[scan chunks]`, or None.
        shape: sizes of the layer.
    """
    chunks = rows.write_rows.numel()
    tile = scan_tile(xbc.dtype, shape, chunks)
    programs = _programs(shape, tile.lanes)
    share = triton.cdiv(shape.conv_dim, programs)
    _scan_kernel[(programs, chunks)](
        zxbcdt,
        zxbcdt.stride(0),
        xbc,
        dt,
        xbc.size(0),
        params.a_log,
        params.d,
        pools.state,
        pools.state.stride(0),
        pools.ring_xb,
        pools.ring_xb.stride(0),
        pools.ring_gates,
        pools.ring_gates.stride(0),
        pools.conv,
        pools.conv.stride(0),
        rows.starts,
        rows.first_positions,
        rows.read_rows,
        rows.write_rows,
        base_after,
        base_after if chunk_dest is None else chunk_dest,
        out,
        out.stride(0),
        heads=shape.heads,
        head_dim=shape.head_dim,
        d_state=shape.d_state,
        d_inner=shape.d_inner,
        bc_dim=shape.bc_dim,
        ring=pools.ring_xb.size(1),
        conv_ring=pools.conv.size(1),
        tile=tile.tokens,
        lanes=tile.lanes,
        window=triton.next_power_of_2(rule.window(1)),
        share=share,
        share_tile=triton.next_power_of_2(share),
        chunks_tile=max(triton.next_power_of_2(chunks), 16),
        has_dest=chunk_dest is not None,
        is_exact=xbc.dtype == torch.float32,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **launch_options(xbc),
    )


class Tile(NamedTuple):
    """Sizes of a program's tile, and options of its compilation."""

    tokens: int
    """A divisor of 128."""
    lanes: int
    """Elements of a head's dimension."""
    warps: int
    stages: int


def scan_tile(dtype: torch.dtype, shape: MambaShape, chunks: int) -> Tile:
    """The tile for a step.

    Its tokens depend on the layer only: another cut is another order of sums, and a prompt must
    give the same bits whatever the batch. Wide tiles make C by B less often, narrow ones fill the
    device where chunks are few; lanes do not meet in a sum. Tried on an H200 with heads of 64 and
    80 (docs/records/hybrid.md).

    Args:
        dtype: of the inputs.
        shape: sizes of the layer.
        chunks: of the step.
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


# Where prefill rows begin among a step's rows varies, and with it what is aligned.
@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=[
        "zxbcdt",
        "out",
        "starts",
        "first_positions",
        "read_rows",
        "write_rows",
        "base_after",
        "chunk_dest",
    ],
)
def _scan_kernel(
    zxbcdt: tl.tensor,
    input_stride: tl.tensor,
    xbc: tl.tensor,
    dt_in: tl.tensor,
    tokens: tl.tensor,
    a_log: tl.tensor,
    d: tl.tensor,
    state: tl.tensor,
    state_stride: tl.tensor,
    ring_xb: tl.tensor,
    xb_stride: tl.tensor,
    ring_gates: tl.tensor,
    gates_stride: tl.tensor,
    conv: tl.tensor,
    conv_stride: tl.tensor,
    starts: tl.tensor,
    first_positions: tl.tensor,
    read_rows: tl.tensor,
    write_rows: tl.tensor,
    base_after: tl.tensor,
    chunk_dest: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    d_state: tl.constexpr,
    d_inner: tl.constexpr,
    bc_dim: tl.constexpr,
    ring: tl.constexpr,
    conv_ring: tl.constexpr,
    tile: tl.constexpr,
    lanes: tl.constexpr,
    window: tl.constexpr,
    share: tl.constexpr,
    share_tile: tl.constexpr,
    chunks_tile: tl.constexpr,
    has_dest: tl.constexpr,
    is_exact: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    tiles: tl.constexpr = (head_dim + lanes - 1) // lanes
    conv_dim: tl.constexpr = d_inner + 2 * bc_dim
    xb_dim: tl.constexpr = d_inner + bc_dim
    group_heads: tl.constexpr = heads * d_state // bc_dim
    head, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    group = head // group_heads
    row = tl.program_id(1)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    through = tl.load(d + head).to(tl.float32)
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
        # Nothing of the row is read where a request begins: its former owner's numbers lie there.
        loaded = in_state & (first > 0)
        s = tl.load(state + read_row * state_stride + cell, mask=loaded, other=0.0)
        target = state + write_row * state_stride + cell
        if base == first:
            # No token of the chunk is in the state yet.
            tl.store(target, s, mask=in_state)
        s = tl.trans(s.to(tl.float32))
        offset = tl.arange(0, tile)
        dest = chunk_dest
        if has_dest:
            number = scan_chunks_before(starts, first_positions, row, BORDERS, chunks_tile)
            dest = chunk_dest + number - first // BORDERS
        for turn in range(scan_turns(first, end, base, tile)):
            begin, lower, upper = scan_cut(turn, first, end, base, tile)
            position = begin + offset
            exists = (position >= lower) & (position < upper)
            token = (start - first + position).to(tl.int64)
            source = xbc + token[:, None] * conv_dim
            place = source + d_inner + group * d_state + column[None, :]
            b = tl.load(place, mask=exists[:, None], other=0.0)
            c = tl.load(place + bc_dim, mask=exists[:, None], other=0.0)
            place = source + head * head_dim + lane[None, :]
            in_tile = exists[:, None] & inside[None, :]
            x = tl.load(place, mask=in_tile, other=0.0)
            dt = tl.load(dt_in + head.to(tl.int64) * tokens + token, mask=exists, other=0.0)
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
            s = _advance(s, x, b, dt, decay, rate, exists, is_exact)
            if upper == base:
                tl.store(target, tl.trans(s).to(state.dtype.element_ty), mask=in_state)
            if has_dest:
                border = upper // BORDERS
                if upper == border * BORDERS:
                    row_of = tl.load(dest + border - 1).to(tl.int64)
                    if row_of >= 0:
                        snapshot = state + row_of * state_stride + cell
                        tl.store(snapshot, tl.trans(s).to(state.dtype.element_ty), mask=in_state)
                        keep_inputs(
                            zxbcdt,
                            input_stride,
                            conv,
                            conv_stride,
                            start,
                            first,
                            upper,
                            read_row,
                            row_of,
                            d_inner,
                            conv_dim,
                            conv_ring,
                            share,
                            share_tile,
                        )
        # What decode steps add to the state themselves.
        later = base + tl.arange(0, window)
        is_later = later < end
        given = (start - first + later).to(tl.int64)
        xb_source = xbc + given[:, None] * conv_dim
        xb_target = ring_xb + write_row * xb_stride + (later % ring)[:, None] * xb_dim
        x_channel = head * head_dim + lane[None, :]
        in_ring = is_later[:, None] & inside[None, :]
        kept_x = tl.load(xb_source + x_channel, mask=in_ring, other=0.0)
        tl.store(xb_target + x_channel, kept_x, mask=in_ring)
        if part == 0:
            if head % group_heads == 0:
                b_channel = d_inner + group * d_state + column[None, :]
                kept_b = tl.load(xb_source + b_channel, mask=is_later[:, None], other=0.0)
                tl.store(xb_target + b_channel, kept_b, mask=is_later[:, None])
            dt_source = dt_in + head.to(tl.int64) * tokens + given
            kept_dt = tl.load(dt_source, mask=is_later, other=0.0)
            gates_target = ring_gates + write_row * gates_stride + head
            gates_target = gates_target + (later % ring) * (2 * heads)
            tl.store(gates_target, kept_dt * rate, mask=is_later)
            tl.store(gates_target + heads, kept_dt, mask=is_later)
        keep_inputs(
            zxbcdt,
            input_stride,
            conv,
            conv_stride,
            start,
            first,
            end,
            read_row,
            write_row,
            d_inner,
            conv_dim,
            conv_ring,
            share,
            share_tile,
        )
