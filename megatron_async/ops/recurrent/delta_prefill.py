"""Gated DeltaNet prefill: packed chunks of prompts, their history carried from rows of the pools.

Gated DeltaNet: Yang, Kautz and Hatamizadeh 2024. Three kernels: the convolution, norms and gates
(`prefill_parts.py`); what depends on no state, prepared in parallel (`delta_factors.py`); and the
scan, one program of which walks through a chunk with a tile of one value head's state and leaves
what later steps need.

Within a tile of tokens the pseudo values solve a triangular system whose inverse `delta_factors.py`
has made; between tiles the recurrence is a state, which stays in registers. Tiles are cut at
multiples of their size in the request's own positions, so a program's arithmetic depends on its
chunk alone.

With inputs of 16 bits the products inside a tile, and of q and k with the state, take factors
rounded to 16 bits, as attention does. The state itself is kept in float32; pseudo values are
rounded before anything uses them, and with their decay multiplied as two 16-bit parts, which is
exact to 2^-17.

With a rule that replays (`replaying_rule`), the scan walks through the tiles of `delta_replay.py`,
from the border before the chunk on. Then a kernel of its own fills the ring, since programs of the
scan may still read there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import wait_for_previous
from megatron_async.ops.op import promising
from megatron_async.ops.recurrent.delta_factors import tile_factors
from megatron_async.ops.recurrent.delta_pools import DeltaParams, DeltaShape, shape_of
from megatron_async.ops.recurrent.delta_reference import delta_prefill
from megatron_async.ops.recurrent.delta_replay import answer, sizes_of_inputs, whole_tile_factors
from megatron_async.ops.recurrent.delta_tile import advanced
from megatron_async.ops.recurrent.kernel_parts import add_products
from megatron_async.ops.recurrent.prefill_parts import (
    BORDERS,
    MANY_PROGRAMS,
    SCAN,
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


@delta_prefill.gpu
@promising("invariant")
def delta_prefill_gpu(
    qkvzba: Tensor,
    params: DeltaParams,
    pools: RecurrentPools,
    rows: PrefillRows,
    base_after: Tensor,
    rule: FlushRule,
    out: Tensor | None = None,
    chunk_dest: Tensor | None = None,
) -> Tensor:
    op = "delta_prefill"
    shape, out = begin_prefill(op, shape_of, qkvzba, params, pools, rows, base_after, rule, out)
    tokens, chunks, replays = qkvzba.size(0), rows.write_rows.numel(), rule.replays
    if tokens and chunks:
        qkv, gates = convolve_chunks(qkvzba, params, pools, rows, out, sizes_of_inputs(shape))
        if replays:
            tile = Tile(rule.period, _lanes(shape, chunks), 4, 2)
            # A chunk of n tokens reaches into (n - 2) / tile + 2 tiles at the most, and into n.
            tiles = min(tokens, tokens // tile.tokens + 2 * chunks)
            factors = whole_tile_factors(qkv, gates, pools, rows, rows.starts, tiles, shape, 0)
        else:
            tile = scan_tile(qkvzba.dtype, shape, chunks)
            factors = tile_factors(qkv, gates, rows, shape, tile.tokens)
        given = (qkvzba, qkv, gates, factors, pools, rows, base_after, out, chunk_dest, 0, tile)
        programs = _programs(shape, tile.lanes)
        launch_scan(_scan_kernel, programs, *given, shape=shape, replays=replays)
        if replays:
            keep_entries(qkv, gates, params, pools, rows, base_after, rule, shape.key_inner)
    return out


def scan_tile(dtype: torch.dtype, shape: DeltaShape, chunks: int) -> Tile:
    """The tile for a step; its tokens depend on the layer only, as Mamba-2's do. Lanes do not meet
    in a sum: narrow ones fill the device where chunks are few."""
    if dtype == torch.float32:
        return Tile(16, 16, 4, 1)
    # Two stages also where one would do: what Triton 3.6 makes of 64 tokens and one stage reads
    # beyond its shared memory (compute-sanitizer; outputs of wide keys were wrong).
    return Tile(64, _lanes(shape, chunks), 4, 2)


def _lanes(shape: DeltaShape, chunks: int) -> int:
    """Lanes of a program of a scan of 16-bit inputs."""
    is_wide = shape.value_dim > 16 and chunks * _programs(shape, 32) >= MANY_PROGRAMS
    return 32 if is_wide and shape.key_dim <= 128 else 16


def _programs(shape: DeltaShape, lanes: int) -> int:
    return shape.value_heads * triton.cdiv(shape.value_dim, lanes)


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


@triton.jit(**SCAN)
def _scan_kernel(
    inputs: tl.tensor,
    input_stride: tl.tensor,
    convolved: tl.tensor,
    gates: tl.tensor,
    factors: tl.tensor,
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
    chunks_tile: tl.constexpr,
    has_dest: tl.constexpr,
    is_exact: tl.constexpr,
    replays: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """A chunk of one value head's lanes: `convolved` is q, k and v, `gates` beta and g. With a rule
    that replays, from the border before it on."""
    key_dim: tl.constexpr = shape.key_dim
    value_heads: tl.constexpr = shape.value_heads
    value_dim: tl.constexpr = shape.value_dim
    key_inner: tl.constexpr = shape.key_inner
    value_inner: tl.constexpr = shape.value_inner
    conv_dim: tl.constexpr = shape.conv_dim
    xb_dim: tl.constexpr = shape.ring_dim
    tiles: tl.constexpr = (value_dim + lanes - 1) // lanes
    head, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    key_head = head // shape.group
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
        values = pools.ring_xb + write_row * strides.ring_xb
        offset = tl.arange(0, tile)
        dest = chunk_dest
        if has_dest:
            number = scan_chunks_before(starts, first_positions, row, BORDERS, chunks_tile)
            dest = chunk_dest + number - first // BORDERS
        chunk = (inputs, input_stride, pools, strides, start, first)
        if replays:
            batch = (convolved, gates, tokens, start, first)
            xb = pools.ring_xb + read_row * strides.ring_xb
            kept_row = (xb, pools.ring_gates + read_row * strides.ring_gates)
            given = (batch, kept_row, end, head, head * value_dim + lane, inside)
            before = scan_chunks_before(starts, first_positions, row, tile, chunks_tile)
        for turn in range(scan_turns(stands, end, base, tile)):
            begin, lower, upper = scan_cut(turn, stands, end, base, tile)
            position = begin + offset
            if replays:
                place = ((before + turn) * value_heads + head).to(tl.int64) * (2 * tile * tile)
                turned = (position, s, factors + place)
                k, u, decay = answer(*given, *turned, out, out_stride, shape, ring, tile)
                s = advanced(s, k, u, decay, tile)
            else:
                exists = (position >= lower) & (position < upper)
                token = (start - first + position).to(tl.int64)
                source = convolved + token[:, None] * conv_dim
                place = source + key_head * key_dim + column[None, :]
                q = tl.load(place, mask=exists[:, None], other=0.0)
                k = tl.load(place + key_inner, mask=exists[:, None], other=0.0)
                channel = head * value_dim + lane[None, :]
                in_tile = exists[:, None] & inside[None, :]
                v = tl.load(source + 2 * key_inner + channel, mask=in_tile, other=0.0)
                place = factors + (token[:, None] * value_heads + head) * (2 * tile)
                place = place + offset[None, :]
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
                        if head % shape.group == 0:
                            key_slot = slot + value_inner + key_head * key_dim + column[None, :]
                            tl.store(key_slot, k, mask=is_later[:, None])
                        gate_slot = pools.ring_gates + write_row * strides.ring_gates
                        gate_slot += entry * value_heads + head
                        tl.store(gate_slot, g, mask=is_later)
                s = _advance(s, u, k, g, decay, exists, is_exact)
            if upper == base:
                tl.store(target, tl.trans(s).to(pools.state.dtype.element_ty), mask=in_state)
            if has_dest:
                keep_snapshot(s, dest, cell, in_state, *chunk, upper, read_row, kept)
        keep_inputs(*chunk, end, read_row, write_row, kept)
