"""What the prefills of all recurrent layers share: the convolution of chunks, and parts of a scan.

A program of the convolution takes a tile of tokens, each of which finds its chunk by the chunks'
starts. A scan turns for each tile of tokens, leaves snapshots where they are asked for, and the
inputs that the next chunk's convolution needs. All read lengths and places on the device, so that a
captured step serves any chunks that fit its shape.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.recurrent.delta_pools import NORM_EPS
from megatron_async.ops.recurrent.kernel_parts import held, rounded, silu, softplus
from megatron_async.ops.recurrent.recurrent_pools import (
    GRID,
    FlushRule,
    PrefillRows,
    RecurrentPools,
)

TOKENS = 16
"""Tokens that a program of the convolution processes."""
MANY_PROGRAMS = 128
"""Programs of a scan that fill an H200: with fewer, each takes half as much of a head."""
BORDERS = tl.constexpr(GRID)
EPS = tl.constexpr(NORM_EPS)
ENTRY_CHANNELS = tl.constexpr(256)
"""Channels that a program moves at once from a chunk to the ring."""
SCAN: dict[str, Any] = {
    "do_not_specialize": ["tokens"],
    "do_not_specialize_on_alignment": [
        "inputs",
        "out",
        "starts",
        "first_positions",
        "read_rows",
        "write_rows",
        "base_after",
        "chunk_dest",
    ],
}
"""Options of a scan's kernel: where prefill rows begin among a step's rows varies, and with it what
is aligned."""


class ConvolutionSizes(NamedTuple):
    """Constants of the convolution's kernel."""

    offset: int
    """Columns of in_proj's output before the convolution's."""
    channels: int
    outputs: int
    """Channels of the layer's output."""
    gates_at: int
    """Columns from `offset` to the gates' columns."""
    heads: int
    """Heads that have gates."""
    tile: int
    """Channels of a program."""
    key_heads: int
    """Programs whose channels are a query's, and as many a key's, normalised; 0: Mamba-2, whose
    convolution has a bias, and whose only gate is dt."""
    width: int = 0
    """Query tokens of a decode row, if rows are not chunks: then `first_positions` has a position
    for each token, and a row's first one counts."""


class Tile(NamedTuple):
    """Sizes of a scan program's tile, and options of its compilation."""

    tokens: int
    """A divisor of 128."""
    lanes: int
    """Elements of a head's dimension."""
    warps: int
    stages: int


class EntrySizes(NamedTuple):
    """Constants of the kernel that fills rings: entries, channels, gates and heads of one."""

    ring: int
    channels: int
    gates: int
    heads: int


class KeptInputs(NamedTuple):
    """A program's share of the inputs of the convolution that a scan leaves in the pools."""

    offset: int
    """Columns of in_proj's output before them."""
    channels: int
    ring: int
    """Entries of the convolution's ring."""
    share: int
    """Channels of a program."""
    share_tile: int
    """The power of two that holds them."""


def convolve_chunks(
    inputs: Tensor,
    params: tuple[Tensor, ...],
    pools: RecurrentPools,
    rows: PrefillRows,
    out: Tensor,
    sizes: ConvolutionSizes,
) -> tuple[Tensor, Tensor]:
    """Convolution and gates of a step's prefill tokens: `[tokens, sizes.channels]`, queries and
    keys normalised; and gates, float32 `[heads, tokens]` (dt) or `[2, heads, tokens]` (beta and g).
    `out` gets zeros for padding."""
    tokens, chunks = inputs.size(0), rows.write_rows.numel()
    convolved = torch.empty((tokens, sizes.channels), dtype=inputs.dtype, device=inputs.device)
    shape = (2, sizes.heads, tokens) if sizes.key_heads else (sizes.heads, tokens)
    gates = torch.empty(shape, dtype=torch.float32, device=inputs.device)
    parts = triton.cdiv(sizes.channels, sizes.tile)
    _conv_kernel[(parts + 1, triton.cdiv(tokens, TOKENS))](
        inputs,
        inputs.stride(0),
        params,
        pools.conv,
        pools.conv.stride(0),
        rows.starts,
        rows.first_positions,
        rows.read_rows,
        chunks,
        tokens,
        convolved,
        gates,
        out,
        out.stride(0),
        sizes=sizes,
        heads_tile=triton.next_power_of_2(sizes.heads),
        conv_ring=pools.conv.size(1),
        chunks_tile=16 if sizes.width else max(triton.next_power_of_2(chunks), 16),
        token_tile=TOKENS,
        num_warps=4,
        **launch_options(inputs),
    )
    return convolved, gates


def launch_scan(
    kernel: Any,
    programs: int,
    inputs: Tensor,
    convolved: Tensor,
    gates: Tensor,
    others: Tensor | tuple[Tensor, ...],
    pools: RecurrentPools,
    rows: PrefillRows,
    base_after: Tensor,
    out: Tensor,
    chunk_dest: Tensor | None,
    offset: int,
    tile: Tile,
    **constants: Any,
) -> None:
    """Launch the scan of a step's chunks: a kernel that takes `others` besides, in so many programs
    a chunk. `offset`: columns of `inputs` before those of the convolution."""
    chunks, (conv_ring, channels) = rows.write_rows.numel(), pools.conv.shape[1:]
    share = triton.cdiv(channels, programs)
    kernel[(programs, chunks)](
        inputs,
        inputs.stride(0),
        convolved,
        gates,
        others,
        convolved.size(0),
        pools,
        pools.strides,
        rows.starts,
        rows.first_positions,
        rows.read_rows,
        rows.write_rows,
        base_after,
        base_after if chunk_dest is None else chunk_dest,
        out,
        out.stride(0),
        ring=pools.ring_xb.size(1),
        kept=KeptInputs(offset, channels, conv_ring, share, triton.next_power_of_2(share)),
        tile=tile.tokens,
        lanes=tile.lanes,
        chunks_tile=max(triton.next_power_of_2(chunks), 16),
        has_dest=chunk_dest is not None,
        is_exact=convolved.dtype == torch.float32,
        **constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **launch_options(convolved),
    )


def keep_entries(
    convolved: Tensor,
    gates: Tensor,
    params: Any,
    pools: RecurrentPools,
    rows: PrefillRows,
    base_after: Tensor,
    rule: FlushRule,
    offset: int,
) -> None:
    """Fill the rings with a step's chunks, from each chunk's base on, with a rule that replays:
    channels of `convolved` from `offset` on, and gates as `convolve_chunks` made them; of Mamba-2
    dt, and before it what dt makes of the decay."""
    window = rule.window(1)
    _entries_kernel[(triton.cdiv(window, TOKENS), rows.write_rows.numel())](
        convolved,
        gates,
        params.a_log,
        convolved.size(0),
        pools,
        pools.strides,
        rows.starts,
        rows.first_positions,
        rows.write_rows,
        base_after,
        conv_dim=convolved.size(1),
        offset=offset,
        sizes=EntrySizes(*pools.ring_xb.shape[1:], *pools.ring_gates.shape[2:]),
        is_mamba=gates.dim() == 2,
        heads_tile=triton.next_power_of_2(pools.ring_gates.size(3)),
        token_tile=TOKENS,
        num_warps=4,
        **launch_options(convolved),
    )


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["starts", "first_positions", "write_rows", "base_after"],
)
def _entries_kernel(
    convolved: tl.tensor,
    gates: tl.tensor,
    a_log: tl.tensor,
    tokens: tl.tensor,
    pools: tl.tuple,
    strides: tl.tuple,
    starts: tl.tensor,
    first_positions: tl.tensor,
    write_rows: tl.tensor,
    base_after: tl.tensor,
    conv_dim: tl.constexpr,
    offset: tl.constexpr,
    sizes: tl.constexpr,
    is_mamba: tl.constexpr,
    heads_tile: tl.constexpr,
    token_tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """A tile of a chunk's tokens from its base on."""
    wait_for_previous(overlap)
    chunk = tl.program_id(1)
    start, first = tl.load(starts + chunk), tl.load(first_positions + chunk)
    end = first + tl.load(starts + chunk + 1) - start
    position = tl.load(base_after + chunk) + tl.program_id(0) * token_tile
    position = position + tl.arange(0, token_tile)
    # Those before the chunk are there: a row that is read is another one at borders alone.
    is_new = (position >= first) & (position < end)
    token = (start - first + position).to(tl.int64)
    row, entry = tl.load(write_rows + chunk).to(tl.int64), position % sizes.ring
    source = convolved + token[:, None] * conv_dim + offset
    target = pools.ring_xb + row * strides.ring_xb + entry[:, None] * sizes.channels
    for begin in range(0, sizes.channels, ENTRY_CHANNELS):
        channel = begin + tl.arange(0, ENTRY_CHANNELS)[None, :]
        moved = is_new[:, None] & (channel < sizes.channels)
        tl.store(target + channel, tl.load(source + channel, mask=moved), mask=moved)
    head = tl.arange(0, heads_tile)[None, :]
    moved = is_new[:, None] & (head < sizes.heads)
    source = gates + head.to(tl.int64) * tokens + token[:, None]
    target = pools.ring_gates + row * strides.ring_gates
    target = target + entry[:, None] * (sizes.gates * sizes.heads) + head
    gate = tl.load(source, mask=moved, other=0.0)
    if is_mamba:
        rate = -tl.exp(tl.load(a_log + head, mask=head < sizes.heads, other=0.0).to(tl.float32))
        tl.store(target, rounded(gate, rate), mask=moved)
        tl.store(target + sizes.heads, gate, mask=moved)
    else:
        tl.store(target, gate, mask=moved)
        gate = tl.load(source + tokens.to(tl.int64) * sizes.heads, mask=moved)
        tl.store(target + sizes.heads, gate, mask=moved)


# Where prefill rows begin among a step's rows varies, and with it what is aligned.
@triton.jit(
    do_not_specialize=["chunks", "tokens"],
    do_not_specialize_on_alignment=["starts", "first_positions", "read_rows"],
)
def _conv_kernel(
    inputs: tl.tensor,
    input_stride: tl.tensor,
    parameters: tl.tuple,
    conv: tl.tensor,
    conv_stride: tl.tensor,
    starts: tl.tensor,
    first_positions: tl.tensor,
    read_rows: tl.tensor,
    chunks: tl.tensor,
    tokens: tl.tensor,
    convolved: tl.tensor,
    gates: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    sizes: tl.constexpr,
    heads_tile: tl.constexpr,
    conv_ring: tl.constexpr,
    chunks_tile: tl.constexpr,
    token_tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Programs of channels, then one of gates, for each tile of tokens."""
    conv_dim: tl.constexpr = sizes.channels
    tile: tl.constexpr = sizes.tile
    is_mamba: tl.constexpr = sizes.key_heads == 0
    if not sizes.width:
        wait_for_previous(overlap)
    part = tl.program_id(0)
    token = tl.program_id(1) * token_tile + tl.arange(0, token_tile)
    row = token.to(tl.int64)
    source = inputs + row[:, None] * input_stride + sizes.offset
    if part < (conv_dim + tile - 1) // tile:
        each = tl.arange(0, chunks_tile)
        if sizes.width:
            chunk = token // sizes.width
            exists = (chunk < chunks) & (token < tokens)
            local = token % sizes.width
            position = tl.load(first_positions + token - local, mask=exists, other=0)
            position = local + position.to(tl.int32)
        else:
            ends = tl.load(starts + 1 + each, mask=each < chunks, other=2**31 - 1)
            chunk = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
            exists = (chunk < chunks) & (token < tokens)
            local = token - tl.load(starts + chunk, mask=exists, other=0)
            position = local + tl.load(first_positions + chunk, mask=exists, other=0)
        pool_row = tl.load(read_rows + chunk, mask=exists, other=0).to(tl.int64)
        kept = conv + pool_row * conv_stride
        channel = part * tile + tl.arange(0, tile)
        inside = channel < conv_dim
        value = tl.zeros((token_tile, tile), tl.float32)
        if is_mamba:
            bias = tl.load(parameters.conv_bias + channel, mask=inside, other=0.0).to(tl.float32)
            value += bias[None, :]
        if sizes.width:
            # Decode rows ask before the wait for all that is there.
            weights: tl.tuple = ()
            olds: tl.tuple = ()
            for tap in tl.static_range(4):
                weight = tl.load(parameters.conv_weight + channel * 4 + tap, mask=inside, other=0.0)
                weights += (held(weight, overlap),)
                seen = (kept, exists, local, position, channel, inside, 3 - tap)
                olds += (_kept_inputs(*seen, conv_dim, conv_ring),)
            wait_for_previous(overlap)
        for tap in tl.static_range(4):
            back = 3 - tap
            if sizes.width:
                weight = weights[tap]
            else:
                weight = tl.load(parameters.conv_weight + channel * 4 + tap, mask=inside, other=0.0)
            in_batch = exists & (local >= back)
            place = source - back * input_stride + channel[None, :]
            raw = tl.load(place, mask=in_batch[:, None] & inside[None, :], other=0.0)
            raw = raw.to(tl.float32)
            if back > 0:
                if sizes.width:
                    old = olds[tap]
                else:
                    seen = (kept, exists, local, position, channel, inside, back)
                    old = _kept_inputs(*seen, conv_dim, conv_ring)
                raw += old.to(tl.float32)
            value = tl.fma(raw, weight.to(tl.float32)[None, :], value)
        # The convolution's output has the dtype of the activations.
        value = silu(value).to(convolved.dtype.element_ty)
        if not is_mamba:
            value = value.to(tl.float32)
            if part < 2 * sizes.key_heads:
                scale = tl.where(part < sizes.key_heads, tile**-0.5, 1.0)
                value = value * (tl.rsqrt(tl.sum(value * value, 1) + EPS) * scale)[:, None]
            value = value.to(convolved.dtype.element_ty)
        place = convolved + row[:, None] * conv_dim + channel[None, :]
        tl.store(place, value, mask=exists[:, None] & inside[None, :])
        place = out + row[:, None] * out_stride + channel[None, :]
        padding = (token < tokens) & (chunk >= chunks)
        zeros = tl.zeros((token_tile, tile), out.dtype.element_ty)
        tl.store(place, zeros, mask=padding[:, None] & (channel < sizes.outputs)[None, :])
    else:
        if sizes.width:
            wait_for_previous(overlap)
        head = tl.arange(0, heads_tile)
        is_head = head < sizes.heads
        loaded = (token < tokens)[:, None] & is_head[None, :]
        strip = source + sizes.gates_at + head[None, :]
        first = tl.load(strip, mask=loaded, other=0.0).to(tl.float32)
        shift = tl.load(parameters.dt_bias + head, mask=is_head, other=0.0).to(tl.float32)
        target = gates + head[None, :].to(tl.int64) * tokens + token[:, None]
        if is_mamba:
            tl.store(target, softplus(first + shift[None, :]), mask=loaded)
        else:
            alpha = tl.load(strip + sizes.heads, mask=loaded, other=0.0).to(tl.float32)
            rate = -tl.exp(tl.load(parameters.a_log + head, mask=is_head, other=0.0).to(tl.float32))
            g = rate[None, :] * softplus(alpha + shift[None, :])
            tl.store(target, tl.sigmoid(first), mask=loaded)
            tl.store(target + tokens.to(tl.int64) * sizes.heads, g, mask=loaded)


@triton.jit
def _kept_inputs(
    kept: tl.tensor,
    exists: tl.tensor,
    local: tl.tensor,
    position: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    back: tl.constexpr,
    conv_dim: tl.constexpr,
    conv_ring: tl.constexpr,
) -> tl.tensor:
    """Inputs so many tokens back, if from steps before; nothing is before position 0."""
    is_kept = exists & (local < back) & (position >= back)
    entry = tl.maximum(position - back, 0) % conv_ring
    place = (kept + entry * conv_dim)[:, None] + channel[None, :]
    return tl.load(place, mask=is_kept[:, None] & inside[None, :], other=0.0)


@triton.jit
def scan_chunks_before(
    starts: tl.tensor,
    first_positions: tl.tensor,
    chunk: tl.tensor,
    size: tl.constexpr,
    chunks_tile: tl.constexpr,
) -> tl.tensor:
    """Number of tiles of `size` positions that the chunks before `chunk` reach into, each counted
    in its own request."""
    each = tl.arange(0, chunks_tile)
    earlier = each < chunk
    begin = tl.load(first_positions + each, mask=earlier, other=0)
    length = tl.load(starts + each + 1, mask=earlier, other=0)
    length = length - tl.load(starts + each, mask=earlier, other=0)
    number = (begin + length + size - 1) // size - begin // size
    return tl.sum(tl.where(earlier & (length > 0), number, 0), 0)


@triton.jit
def keep_inputs(
    inputs: tl.tensor,
    input_stride: tl.tensor,
    pools: tl.tuple,
    strides: tl.tuple,
    start: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    read_row: tl.tensor,
    target_row: tl.tensor,
    kept: tl.constexpr,
) -> None:
    """The convolution's inputs of the three tokens before `end`, this program's share of their
    channels (`KeptInputs`): from the batch, or from the read row where the chunk is shorter."""
    local = tl.arange(0, kept.share_tile)
    channel = tl.program_id(0) * kept.share + local
    inside = (local < kept.share) & (channel < kept.channels)
    for back in tl.static_range(1, 4):
        position = end - back
        in_batch = position >= first
        is_kept = (position < first) & (position >= 0) & (read_row != target_row)
        place = inputs + (start + position - first).to(tl.int64) * input_stride + kept.offset
        raw = tl.load(place + channel, mask=inside & in_batch, other=0.0)
        entry = (tl.maximum(position, 0) % kept.ring) * kept.channels + channel
        place = pools.conv + read_row * strides.conv + entry
        old = tl.load(place, mask=inside & is_kept, other=0.0)
        value = tl.where(in_batch, raw, old)
        stored = inside & (in_batch | is_kept)
        tl.store(pools.conv + target_row * strides.conv + entry, value, mask=stored)


@triton.jit
def keep_snapshot(
    s: tl.tensor,
    dest: tl.tensor,
    cell: tl.tensor,
    in_state: tl.tensor,
    inputs: tl.tensor,
    input_stride: tl.tensor,
    pools: tl.tuple,
    strides: tl.tuple,
    start: tl.tensor,
    first: tl.tensor,
    upper: tl.tensor,
    read_row: tl.tensor,
    kept: tl.constexpr,
) -> None:
    """The state behind a turn, and the inputs before its end, in the row that `dest` (of the first
    border) names for it, if the turn ends at a border."""
    border = upper // BORDERS
    if upper == border * BORDERS:
        row_of = tl.load(dest + border - 1).to(tl.int64)
        if row_of >= 0:
            snapshot = pools.state + row_of * strides.state + cell
            tl.store(snapshot, tl.trans(s).to(pools.state.dtype.element_ty), mask=in_state)
            keep_inputs(
                inputs, input_stride, pools, strides, start, first, upper, read_row, row_of, kept
            )


@triton.jit
def scan_turns(first: tl.tensor, end: tl.tensor, base: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """How often a scan of tokens `first` to `end` - 1 turns: once for each tile, and once more if
    `base` lies inside one (see `scan_cut`)."""
    tiles = (end + tile - 1) // tile - first // tile
    return tiles + ((base > first) & (base < end) & (base % tile > 0)).to(tl.int32)


@triton.jit
def scan_cut(
    turn: tl.tensor, first: tl.tensor, end: tl.tensor, base: tl.tensor, tile: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Where the tile of a turn begins, and its tokens: from the second to before the third.

    The tile that `base` lies inside is taken in two turns, so that the state at `base` is that
    behind a turn. A product in a branch of the loop would find it too, but Triton 3.6 lets the next
    turn's loads overwrite what such a branch reads (seen on an H200: states of zeros).
    """
    at_base = base // tile - first // tile
    is_cut = (base > first) & (base < end) & (base % tile > 0)
    number = turn - (is_cut & (turn > at_base)).to(tl.int32)
    begin = (first // tile + number) * tile
    start = tl.where(is_cut & (turn == at_base + 1), base, tl.maximum(begin, first))
    stop = tl.where(is_cut & (turn == at_base), base, tl.minimum(begin + tile, end))
    return begin, start, stop
