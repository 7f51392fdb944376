"""Gated DeltaNet with a rule that replays: a token's bits are those of its sequence alone.

Prompts (`delta_prefill.py`) and decode steps have the same convolution, and compute a tile of 16
tokens with the same functions (`delta_tile.py`), whole, from the state at its border. The ring has
the open tile's keys, values, beta and g: pseudo values need the state, and are computed again.

A kernel makes T and P of all tiles in parallel. Then a program of a decode step takes some lanes of
one value head of a row, stores the query tokens' outputs, and puts their inputs into the ring,
whose entries for them no program reads. Where query tokens stand in later tiles than the base
(tokens may still be taken back, or drafts cross a border) the state is first brought there, in
registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.recurrent.delta_pools import DeltaParams, DeltaShape
from megatron_async.ops.recurrent.delta_tile import (
    advanced,
    factors_of,
    outputs_of,
    pseudo_values_of,
)
from megatron_async.ops.recurrent.kernel_parts import decays_of, held
from megatron_async.ops.recurrent.prefill_parts import (
    ConvolutionSizes,
    KeptInputs,
    convolve_chunks,
    scan_chunks_before,
)
from megatron_async.ops.recurrent.recurrent_pools import (
    DELTA_TILE,
    DecodeRows,
    FlushRule,
    PrefillRows,
    RecurrentPools,
)

WARPS = 4
STATE = 8192
"""Elements of a state that a program of a decode step takes."""
FEW_ROWS = 1
"""With so many rows of one tile, each program makes T and P itself, in one warp: a kernel waits
longer for the one before than it works (Qwen3-Next's layer 7.6 -> 6.8 us; with two rows it is the
same, with four 10.2 -> 10.8; an H200, 2026-11-29)."""
FEW_STATE = 2048


def sizes_of_inputs(shape: DeltaShape, width: int = 0) -> ConvolutionSizes:
    """Sizes of the convolution of chunks, or of decode rows of so many query tokens."""
    return ConvolutionSizes(
        0, shape.conv_dim, shape.value_inner, shape.conv_dim + shape.value_inner,
        shape.value_heads, shape.key_dim, shape.key_heads, width,
    )  # fmt: skip


def replay(
    qkvzba: Tensor,
    params: DeltaParams,
    pools: RecurrentPools,
    step: DecodeRows,
    rule: FlushRule,
    shape: DeltaShape,
    out: Tensor,
) -> None:
    """`delta_decode`; the arguments are checked there."""
    rows, width = step.row_index.numel(), step.width
    tokens = rows * width
    as_chunks = PrefillRows(step.positions, step.positions, *[step.row_index] * 3)
    sizes = sizes_of_inputs(shape, width)
    qkv, gates = convolve_chunks(qkvzba[:tokens], params, pools, as_chunks, out, sizes)
    tiles = triton.cdiv(rule.window(width), DELTA_TILE)
    makes = rows <= FEW_ROWS and tiles == 1
    most = (FEW_STATE if makes else STATE) // shape.key_dim
    lanes = max(min(most, triton.next_power_of_2(shape.value_dim)), 16)
    factors = qkv
    if not makes:
        given = (qkv, gates, pools, as_chunks, step.bases)
        factors = whole_tile_factors(*given, tiles * rows, shape, width)
    programs = _programs(shape, lanes)
    share = triton.cdiv(shape.conv_dim, programs)
    _replay_kernel[(programs, rows)](
        qkvzba,
        qkvzba.stride(0),
        qkv,
        gates,
        factors,
        tokens,
        pools,
        pools.strides,
        *step[:3],
        out,
        out.stride(0),
        shape=shape,
        width=width,
        ring=pools.ring_xb.size(1),
        kept=KeptInputs(
            0, shape.conv_dim, pools.conv.size(1), share, triton.next_power_of_2(share)
        ),
        tile=DELTA_TILE,
        lanes=lanes,
        row_tiles=tiles,
        makes=makes,
        num_warps=1 if makes else WARPS,
        num_stages=2,
        **launch_options(qkvzba),
    )


def whole_tile_factors(
    qkv: Tensor,
    gates: Tensor,
    pools: RecurrentPools,
    rows: PrefillRows,
    places: Tensor,
    tiles: int,
    shape: DeltaShape,
    width: int,
) -> Tensor:
    """T and P of so many tiles of all chunks, or of decode rows of `width` query tokens, `[tiles,
    value heads, 2, tile, tile]`; `places` are the chunks' starts, or the rows' bases."""
    chunks, size = rows.write_rows.numel(), (tiles, shape.value_heads, 2, DELTA_TILE, DELTA_TILE)
    factors = torch.empty(size, dtype=qkv.dtype, device=qkv.device)
    _factors_kernel[(tiles, shape.value_heads)](
        qkv,
        gates,
        qkv.size(0),
        pools,
        pools.strides,
        places,
        rows.first_positions,
        rows.read_rows,
        chunks,
        factors,
        shape=shape,
        ring=pools.ring_xb.size(1),
        tile=DELTA_TILE,
        chunks_tile=16 if width else max(triton.next_power_of_2(chunks), 16),
        width=width,
        tiles=tiles // chunks if width else 0,
        num_warps=1,
        **launch_options(qkv),
    )
    return factors


def _programs(shape: DeltaShape, lanes: int) -> int:
    return shape.value_heads * triton.cdiv(shape.value_dim, lanes)


@triton.jit
def _keys(
    batch: tl.tuple,
    row: tl.tuple,
    position: tl.tensor,
    end: tl.tensor,
    head: tl.tensor,
    shape: tl.constexpr,
    ring: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Queries, keys, beta and g of a tile's tokens: those before the chunk, which ask nothing, are
    in the ring of the row."""
    convolved, gates, tokens, start, first = batch
    xb, kept_gates = row
    token = (start - first + position).to(tl.int64)
    entry = position % ring
    is_old, exists = position < first, position < end
    stride = tl.where(is_old, shape.value_heads, tokens * shape.value_heads).to(tl.int64)
    place = gates + head.to(tl.int64) * tokens + token
    place = tl.where(is_old, kept_gates + entry * (2 * shape.value_heads) + head, place)
    beta = tl.load(place, mask=exists, other=0.0)
    g = tl.load(place + stride, mask=exists, other=0.0)
    strip = head // shape.group * shape.key_dim + tl.arange(0, shape.key_dim)[None, :]
    source = convolved + token[:, None] * shape.conv_dim
    q = tl.load(source + strip, mask=(exists & (position >= first))[:, None], other=0.0)
    old = xb + entry[:, None] * shape.ring_dim
    k = tl.load(
        tl.where(is_old[:, None], old, source + shape.key_inner) + strip,
        mask=exists[:, None],
        other=0.0,
    )
    return q, k, beta, g


@triton.jit
def _values(
    batch: tl.tuple,
    row: tl.tuple,
    position: tl.tensor,
    end: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    shape: tl.constexpr,
    ring: tl.constexpr,
) -> tl.tensor:
    """Values `[tile, lanes]` of the same tokens."""
    convolved, _gates, _tokens, start, first = batch
    xb, _kept_gates = row
    token = (start - first + position).to(tl.int64)
    old = xb + (position % ring)[:, None] * shape.ring_dim + shape.key_inner
    source = convolved + token[:, None] * shape.conv_dim + 2 * shape.key_inner
    place = tl.where((position < first)[:, None], old, source) + channel[None, :]
    return tl.load(place, mask=(position < end)[:, None] & inside[None, :], other=0.0)


@triton.jit
def answer(
    batch: tl.tuple,
    row: tl.tuple,
    end: tl.tensor,
    head: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    position: tl.tensor,
    s: tl.tensor,
    factors: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    shape: tl.constexpr,
    ring: tl.constexpr,
    tile: tl.constexpr,
    makes: tl.constexpr = False,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Store the outputs of a tile's query tokens; its keys, pseudo values and decays. `makes` its T
    and P too, which are in `factors` else."""
    _convolved, _gates, _tokens, start, first = batch
    q, k, beta, g = _keys(batch, row, position, end, head, shape, ring)
    v = _values(batch, row, position, end, channel, inside, shape, ring)
    decay, narrow = decays_of(g), s.to(k.dtype)
    if makes:
        t, p = factors_of(q, k, beta, decay, tile)
    else:
        at = tl.arange(0, tile)
        place = factors + (at[:, None] * tile + at[None, :])
        t, p = tl.load(place), tl.load(place + tile * tile)
    u = pseudo_values_of(k, v, t, decay, narrow)
    o = outputs_of(q, u, p, decay, narrow)
    asks = (position >= first) & (position < end)
    token = (start - first + position).to(tl.int64)
    target = out + token[:, None] * out_stride + channel[None, :]
    tl.store(target, o.to(out.dtype.element_ty), mask=asks[:, None] & inside[None, :])
    return k, u, decay


@triton.jit
def _queries(
    positions: tl.tensor, row: tl.tensor, width: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Position of a row's first query token, and behind the last one that counts: those that follow
    the first; none where that is 0."""
    first = tl.load(positions + row * width).to(tl.int32)
    count = (first > 0).to(tl.int32)
    for number in tl.static_range(1, width):
        follows = tl.load(positions + row * width + number).to(tl.int32) == first + number
        count += ((count == number) & follows).to(tl.int32)
    return first, first + count


# Where prefill rows begin among a step's rows varies, and with it what is aligned.
@triton.jit(
    do_not_specialize=["chunks", "tokens"],
    do_not_specialize_on_alignment=["starts", "first_positions", "read_rows"],
)
def _factors_kernel(
    convolved: tl.tensor,
    gates: tl.tensor,
    tokens: tl.tensor,
    pools: tl.tuple,
    strides: tl.tuple,
    starts: tl.tensor,
    first_positions: tl.tensor,
    read_rows: tl.tensor,
    chunks: tl.tensor,
    factors: tl.tensor,
    shape: tl.constexpr,
    ring: tl.constexpr,
    tile: tl.constexpr,
    chunks_tile: tl.constexpr,
    width: tl.constexpr,
    tiles: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """A tile of a value head: of a chunk, or the one of so many of a decode row."""
    number, head = tl.program_id(0), tl.program_id(1)
    place = factors + (number * shape.value_heads + head).to(tl.int64) * (2 * tile * tile)
    if width:
        # What is read here stands before the step's first layer.
        chunk = number // tiles
        first, end = _queries(first_positions, chunk, width)
        begin = tl.load(starts + chunk) + number % tiles * tile
        start = chunk * width
        exists = begin < end
        read_row = tl.load(read_rows + chunk).to(tl.int64)
        wait_for_previous(overlap)
    else:
        wait_for_previous(overlap)
        # The chunk whose tile this is, by how many tiles the chunks up to each have.
        each = tl.arange(0, chunks_tile)
        begins = tl.load(first_positions + each, mask=each < chunks, other=0)
        lengths = tl.load(starts + 1 + each, mask=each < chunks, other=0)
        lengths = lengths - tl.load(starts + each, mask=each < chunks, other=0)
        counts = (begins + lengths + tile - 1) // tile - begins // tile
        ends = tl.cumsum(tl.where(lengths > 0, counts, 0), 0)
        chunk = tl.sum((ends <= number).to(tl.int32), 0)
        exists = chunk < chunks
        start = tl.load(starts + chunk, mask=exists, other=0)
        first = tl.load(first_positions + chunk, mask=exists, other=0)
        end = first + tl.load(starts + chunk + 1, mask=exists, other=0) - start
        number -= scan_chunks_before(starts, first_positions, chunk, tile, chunks_tile)
        begin = (first // tile + number) * tile
        read_row = tl.load(read_rows + chunk, mask=exists, other=0).to(tl.int64)
    if exists:
        position = begin + tl.arange(0, tile)
        batch = (convolved, gates, tokens, start, first)
        xb = pools.ring_xb + read_row * strides.ring_xb
        row = (xb, pools.ring_gates + read_row * strides.ring_gates)
        q, k, beta, g = _keys(batch, row, position, end, head, shape, ring)
        t, p = factors_of(q, k, beta, decays_of(g), tile)
        at = tl.arange(0, tile)
        target = place + at[:, None] * tile + at[None, :]
        tl.store(target, t)
        tl.store(target + tile * tile, p)


# Before its wait this kernel reads rows, positions and bases, which stand before the step's first
# layer, and states, which no kernel of the layers writes in this step.
@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["inputs", "row_index", "positions", "bases", "out"],
)
def _replay_kernel(
    inputs: tl.tensor,
    input_stride: tl.tensor,
    convolved: tl.tensor,
    gates: tl.tensor,
    factors: tl.tensor,
    tokens: tl.tensor,
    pools: tl.tuple,
    strides: tl.tuple,
    row_index: tl.tensor,
    positions: tl.tensor,
    bases: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    shape: tl.constexpr,
    width: tl.constexpr,
    ring: tl.constexpr,
    kept: tl.constexpr,
    tile: tl.constexpr,
    lanes: tl.constexpr,
    row_tiles: tl.constexpr,
    makes: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Lanes of a value head of a decode row."""
    key_dim: tl.constexpr = shape.key_dim
    value_dim: tl.constexpr = shape.value_dim
    tiles: tl.constexpr = (value_dim + lanes - 1) // lanes
    head, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tl.program_id(1)
    lane = part * lanes + tl.arange(0, lanes)
    inside = lane < value_dim
    channel = head * value_dim + lane
    column, at = tl.arange(0, key_dim), tl.arange(0, tile)
    pool_row = tl.load(row_index + row).to(tl.int64)
    first = tl.load(positions + row * width).to(tl.int32)
    base = tl.load(bases + row)
    cell = pools.state + pool_row * strides.state + head * (value_dim * key_dim)
    cell = cell + lane[:, None] * key_dim + column[None, :]
    # Nothing of a new owner is in the state.
    loaded = inside[:, None] & (base > 0) & (first > 0)
    s = tl.trans(tl.load(cell, mask=loaded, other=0.0, cache_modifier=".cg"))
    wait_for_previous(overlap)

    _first, end = _queries(positions, row, width)
    count = tl.maximum(end - first, 0)
    start = row * width
    batch = (convolved, gates, tokens, start, first)
    xb = pools.ring_xb + pool_row * strides.ring_xb
    kept_gates = pools.ring_gates + pool_row * strides.ring_gates
    kept_row = (xb, kept_gates)
    # What the step's tokens leave, every program its share. All loads before the first store: none
    # may be moved ahead of a store that it could alias.
    heads, local = tl.arange(0, 2), tl.arange(0, kept.share_tile)
    share = tl.program_id(0) * kept.share + local
    shared = (local < kept.share) & (share < kept.channels)
    key = head // shape.group * key_dim + column
    has_key = (column >= 0) & (part == 0) & (head % shape.group == 0)
    has_gates = (heads >= 0) & (part == 0)
    left: tl.tuple = ()
    for number in tl.static_range(width):
        token = (start + number).to(tl.int64)
        source = convolved + token * shape.conv_dim + shape.key_inner
        gate = gates + (heads * shape.value_heads + head).to(tl.int64) * tokens + token
        left += (
            (
                tl.load(source + key, mask=has_key, other=0.0),
                tl.load(gate, mask=has_gates, other=0.0),
                tl.load(source + shape.key_inner + channel, mask=inside, other=0.0),
                tl.load(inputs + token * input_stride + share, mask=shared, other=0.0),
            ),
        )
    begin = base
    given = (batch, kept_row, end, head, channel, inside)
    place = factors + (row * row_tiles * shape.value_heads + head).to(tl.int64) * (2 * tile * tile)
    if row_tiles > 1:
        for _ in range(tl.maximum((end - 1) // tile - base // tile, 0)):
            k, u, decay = answer(*given, begin + at, s, place, out, out_stride, shape, ring, tile)
            s = advanced(s, k, u, decay, tile)
            begin += tile
            place += shape.value_heads * (2 * tile * tile)
    else:
        s = held(s.to(convolved.dtype.element_ty), overlap)
    answer(*given, begin + at, s, place, out, out_stride, shape, ring, tile, makes)

    for number in tl.static_range(width):
        counts, entry = number < count, (first + number) % ring
        kept_key, gate, value, raw = left[number]
        slot, slot_gates = xb + entry * shape.ring_dim, kept_gates + entry * (2 * shape.value_heads)
        tl.store(slot + key, kept_key, mask=has_key & counts)
        tl.store(slot_gates + heads * shape.value_heads + head, gate, mask=has_gates & counts)
        tl.store(slot + shape.key_inner + channel, value, mask=inside & counts)
        slot_conv = pools.conv + pool_row * strides.conv
        slot_conv += (first + number) % kept.ring * kept.channels
        tl.store(slot_conv + share, raw, mask=shared & counts)
        zeros = tl.zeros((lanes,), out.dtype.element_ty)
        target = out + (start + number).to(tl.int64) * out_stride + channel
        tl.store(target, zeros, mask=inside & (number >= count))
