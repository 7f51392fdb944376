"""The scan of prefill chunks: one program walks through a chunk with a tile of one value head's
state.

Within a tile of tokens the pseudo values solve a triangular system whose inverse `delta_factors.py`
has made; between tiles the recurrence is a state, which stays in registers. Tiles are cut at
multiples of their size in the request's own positions, so a program's arithmetic depends on its
chunk alone.

With inputs of 16 bits the products inside a tile, and of q and k with the state, take factors
rounded to 16 bits, as attention does. The state itself is kept in float32; pseudo values are
rounded before anything uses them, and with their decay multiplied as two 16-bit parts, which is
exact to 2^-17.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.recurrent.delta_pools import DeltaShape
from megatron_async.ops.recurrent.recurrent_math import add_products
from megatron_async.ops.recurrent.recurrent_pools import PrefillRows, RecurrentPools
from megatron_async.ops.recurrent.scan_history import (
    BORDERS,
    keep_inputs,
    scan_chunks_before,
    scan_cut,
    scan_turns,
)

MANY_PROGRAMS = 128
"""Programs that fill an H200: with fewer, each takes half as much of a value."""


class Tile(NamedTuple):
    """Sizes of a program's tile, and options of its compilation."""

    tokens: int
    """A divisor of 128."""
    lanes: int
    """Elements of a value."""
    warps: int
    stages: int


def scan_tile(dtype: torch.dtype, shape: DeltaShape, chunks: int) -> Tile:
    """The tile for a step.

    Its tokens depend on the layer only: another cut is another order of sums, and a prompt must
    give the same bits whatever the batch. Lanes do not meet in a sum: narrow ones fill the device
    where chunks are few.

    Args:
        dtype: of the inputs.
        shape: sizes of the layer.
        chunks: of the step.
    """
    if dtype == torch.float32:
        return Tile(16, 16, 4, 1)
    # Two stages also where one would do: what Triton 3.6 makes of 64 tokens and one stage reads
    # beyond its shared memory (compute-sanitizer; outputs of wide keys were wrong).
    if shape.key_dim > 128:
        return Tile(64, 16, 4, 2)
    is_wide = shape.value_dim > 16 and chunks * _programs(shape, 32) >= MANY_PROGRAMS
    return Tile(64, 32 if is_wide else 16, 4, 2)


def _programs(shape: DeltaShape, lanes: int) -> int:
    return shape.value_heads * triton.cdiv(shape.value_dim, lanes)


def scan_chunks(
    qkvzba: Tensor,
    qkv: Tensor,
    gates: Tensor,
    factors: Tensor,
    pools: RecurrentPools,
    rows: PrefillRows,
    base_after: Tensor,
    out: Tensor,
    chunk_dest: Tensor | None,
    shape: DeltaShape,
    tile: Tile,
) -> None:
    """Scan chunks after their convolution; see `delta_prefill` for the other arguments.

    Args:
        qkvzba: what the convolution has read: its last inputs go into the pools.
        qkv: `[tokens, conv_dim]`: q and k, normalised, and v.
        gates: float32 `[2, value heads, tokens]`: beta and g.
        factors: `[tokens, value heads, 2, tile.tokens]` of `tile_factors`.
        pools: the layer's pools.
        rows: the step's chunks.
        base_after: int32 `[chunks]`.
        out: `[tokens, value_inner]`, written for the chunks' tokens.
        chunk_dest: int32 `[scan chunks]`, or None.
        shape: sizes of the layer.
        tile: of `scan_tile`.
    """
    chunks = rows.write_rows.numel()
    programs = _programs(shape, tile.lanes)
    share = triton.cdiv(shape.conv_dim, programs)
    _scan_kernel[(programs, chunks)](
        qkvzba,
        qkvzba.stride(0),
        qkv,
        gates,
        factors,
        qkv.size(0),
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
        key_heads=shape.key_heads,
        key_dim=shape.key_dim,
        value_heads=shape.value_heads,
        value_dim=shape.value_dim,
        ring=pools.ring_xb.size(1),
        conv_ring=pools.conv.size(1),
        tile=tile.tokens,
        lanes=tile.lanes,
        share=share,
        share_tile=triton.next_power_of_2(share),
        chunks_tile=max(triton.next_power_of_2(chunks), 16),
        has_dest=chunk_dest is not None,
        is_exact=qkv.dtype == torch.float32,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **launch_options(qkv),
    )


@triton.jit
def _advance(
    state: tl.tensor,
    u: tl.tensor,
    k: tl.tensor,
    g: tl.tensor,
    decay: tl.tensor,
    counts: tl.tensor,
    is_exact: tl.constexpr,
) -> tl.tensor:
    """The state `[key_dim, lanes]` after those tokens of a tile that count."""
    total = tl.sum(tl.where(counts, g, 0.0), 0)
    weight = tl.where(counts, tl.exp(tl.where(counts, total - decay, 0.0)), 0.0)
    added = u.to(tl.float32) * weight[:, None]
    return add_products(state * tl.exp(total), tl.trans(k), added, is_exact)


# Where prefill rows begin among a step's rows varies, and with it what is aligned.
@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=[
        "qkvzba",
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
    qkvzba: tl.tensor,
    input_stride: tl.tensor,
    qkv: tl.tensor,
    gates: tl.tensor,
    factors: tl.tensor,
    tokens: tl.tensor,
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
    key_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_heads: tl.constexpr,
    value_dim: tl.constexpr,
    ring: tl.constexpr,
    conv_ring: tl.constexpr,
    tile: tl.constexpr,
    lanes: tl.constexpr,
    share: tl.constexpr,
    share_tile: tl.constexpr,
    chunks_tile: tl.constexpr,
    has_dest: tl.constexpr,
    is_exact: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    tiles: tl.constexpr = (value_dim + lanes - 1) // lanes
    key_inner: tl.constexpr = key_heads * key_dim
    value_inner: tl.constexpr = value_heads * value_dim
    conv_dim: tl.constexpr = 2 * key_inner + value_inner
    xb_dim: tl.constexpr = value_inner + key_inner
    group: tl.constexpr = value_heads // key_heads
    head, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    key_head = head // group
    row = tl.program_id(1)
    wait_for_previous(overlap)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    if length > 0:
        first, base = tl.load(first_positions + row), tl.load(base_after + row)
        end = first + length
        read_row = tl.load(read_rows + row).to(tl.int64)
        write_row = tl.load(write_rows + row).to(tl.int64)
        lane = part * lanes + tl.arange(0, lanes)
        inside = lane < value_dim
        column = tl.arange(0, key_dim)
        # The state as [key_dim, lanes]; in memory a lane's key_dim numbers are adjacent.
        cell = head * (value_dim * key_dim) + lane[:, None] * key_dim + column[None, :]
        in_state = inside[:, None] & (column >= 0)[None, :]
        # Nothing of the row is read where a request begins: its former owner's numbers lie there.
        loaded = in_state & (first > 0)
        s = tl.load(state + read_row * state_stride + cell, mask=loaded, other=0.0)
        target = state + write_row * state_stride + cell
        if base == first:
            # No token of the chunk is in the state yet.
            tl.store(target, s, mask=in_state)
        s = tl.trans(s.to(tl.float32))
        values = ring_xb + write_row * xb_stride
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
            source = qkv + token[:, None] * conv_dim
            place = source + key_head * key_dim + column[None, :]
            q = tl.load(place, mask=exists[:, None], other=0.0)
            k = tl.load(place + key_inner, mask=exists[:, None], other=0.0)
            channel = head * value_dim + lane[None, :]
            in_tile = exists[:, None] & inside[None, :]
            v = tl.load(source + 2 * key_inner + channel, mask=in_tile, other=0.0)
            place = factors + (token[:, None] * value_heads + head) * (2 * tile) + offset[None, :]
            t = tl.load(place, mask=exists[:, None], other=0.0)
            p = tl.load(place + tile, mask=exists[:, None], other=0.0)
            place = gates + (head + value_heads).to(tl.int64) * tokens + token
            g = tl.load(place, mask=exists, other=0.0)
            decay = tl.cumsum(g, 0)
            since = tl.exp(decay)[:, None]
            held = s.to(k.dtype)
            found = tl.dot(k, held, input_precision="ieee") * since
            u = tl.dot(t, (v.to(tl.float32) - found).to(k.dtype), input_precision="ieee")
            u = u.to(k.dtype)
            o = tl.dot(q, held, input_precision="ieee") * since
            o = tl.dot(p, u, o, input_precision="ieee")
            place = out + token[:, None] * out_stride + channel
            tl.store(place, o.to(out.dtype.element_ty), mask=in_tile)
            if upper > base:
                # What decode steps add to the state themselves.
                is_later = exists & (position >= base)
                entry = position % ring
                slot = values + entry[:, None] * xb_dim
                tl.store(slot + channel, u, mask=is_later[:, None] & inside[None, :])
                if part == 0:
                    if head % group == 0:
                        key_slot = slot + value_inner + key_head * key_dim + column[None, :]
                        tl.store(key_slot, k, mask=is_later[:, None])
                    gate_slot = ring_gates + write_row * gates_stride + entry * value_heads + head
                    tl.store(gate_slot, g, mask=is_later)
            s = _advance(s, u, k, g, decay, exists, is_exact)
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
                            qkvzba,
                            input_stride,
                            conv,
                            conv_stride,
                            start,
                            first,
                            upper,
                            read_row,
                            row_of,
                            0,
                            conv_dim,
                            conv_ring,
                            share,
                            share_tile,
                        )
        keep_inputs(
            qkvzba,
            input_stride,
            conv,
            conv_stride,
            start,
            first,
            end,
            read_row,
            write_row,
            0,
            conv_dim,
            conv_ring,
            share,
            share_tile,
        )
