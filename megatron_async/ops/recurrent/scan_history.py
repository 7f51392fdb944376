"""Device functions that the scans of recurrent layers share: their turns, where snapshots go, and
the inputs that the next chunk's convolution needs."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.recurrent.recurrent_pools import GRID

BORDERS = tl.constexpr(GRID)


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
    conv: tl.tensor,
    conv_stride: tl.tensor,
    start: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    read_row: tl.tensor,
    target_row: tl.tensor,
    offset: tl.constexpr,
    conv_dim: tl.constexpr,
    conv_ring: tl.constexpr,
    share: tl.constexpr,
    share_tile: tl.constexpr,
) -> None:
    """The convolution's inputs of the three tokens before `end`, this program's share of their
    channels: from the batch (behind `offset` columns), or from the read row where the chunk is
    shorter."""
    local = tl.arange(0, share_tile)
    channel = tl.program_id(0) * share + local
    inside = (local < share) & (channel < conv_dim)
    for back in tl.static_range(1, 4):
        position = end - back
        in_batch = position >= first
        is_kept = (position < first) & (position >= 0) & (read_row != target_row)
        place = inputs + (start + position - first).to(tl.int64) * input_stride + offset
        raw = tl.load(place + channel, mask=inside & in_batch, other=0.0)
        entry = (tl.maximum(position, 0) % conv_ring) * conv_dim + channel
        old = tl.load(conv + read_row * conv_stride + entry, mask=inside & is_kept, other=0.0)
        value = tl.where(in_batch, raw, old)
        stored = inside & (in_batch | is_kept)
        tl.store(conv + target_row * conv_stride + entry, value, mask=stored)


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
