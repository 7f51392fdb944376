"""Last work of a step: its samples go to where the next step and the copy to the host find them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous

TILE = 128


def feed_back_tokens(
    sampled: Tensor,
    slots: Tensor,
    last_token: Tensor,
    ring: Tensor,
    entry: Tensor,
    next_entry: Tensor,
) -> None:
    """Store sampled tokens by slot and in the step's row of the sample ring, then move the ring
    on.

    Args:
        sampled: int64 `[rows]`; -1 where there is no token: the ring tells the host so, and the
            next step, which is in flight already, gets token 0.
        slots: int64 `[rows]`.
        last_token: int64 `[slots]`, changed at `slots`.
        ring: int32 `[entries, max rows]`, changed in row `entry`.
        entry: int32 `[1]`: a number on the device, because a graph's addresses are fixed.
        next_entry: int32 `[1]`, written: the entry after it.
    """
    if not sampled.is_cuda:
        rows = sampled.numel()
        last_token.index_copy_(0, slots, sampled.clamp(min=0))
        ring[:, :rows].index_copy_(0, entry.long(), sampled.int()[None])
        next_entry.copy_((entry + 1) % len(ring))
        return
    feed_back_kernel(sampled, slots, last_token, ring, entry, next_entry)


def feed_back_kernel(
    sampled: Tensor,
    slots: Tensor,
    last_token: Tensor,
    ring: Tensor,
    entry: Tensor,
    next_entry: Tensor,
) -> None:
    """`feed_back_tokens` by a Triton kernel."""
    rows = sampled.numel()
    _feed_back_kernel[(triton.cdiv(rows, TILE),)](
        sampled,
        slots,
        last_token,
        ring,
        ring.stride(0),
        len(ring),
        entry,
        next_entry,
        rows,
        TILE,
        **launch_options(sampled),
    )


@triton.jit(do_not_specialize=["stride", "entries", "rows"])
def _feed_back_kernel(
    sampled: tl.tensor,
    slots: tl.tensor,
    last_token: tl.tensor,
    ring: tl.tensor,
    stride: tl.tensor,
    entries: tl.tensor,
    entry: tl.tensor,
    next_entry: tl.tensor,
    rows: tl.tensor,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    offset = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = offset < rows
    token = tl.load(sampled + offset, inside, other=0)
    slot = tl.load(slots + offset, inside, other=0)
    tl.store(last_token + slot, tl.maximum(token, 0), inside)
    current = tl.load(entry)
    tl.store(ring + current.to(tl.int64) * stride + offset, token.to(tl.int32), inside)
    if tl.program_id(0) == 0:
        tl.store(next_entry, (current + 1) % entries)
