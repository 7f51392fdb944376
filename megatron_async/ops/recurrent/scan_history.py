"""Device functions that the scans of recurrent layers share: where snapshots go, and the inputs
that the next chunk's convolution needs."""

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
    """How many tiles of `size` positions the chunks before `chunk` reach into, each counted in its
    own request."""
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
