"""How programs of several ranks meet over symmetric memory, each with its peers on the others.

One program serves a place. It writes its rank's data for the place to its rank's memory, signals
all ranks, waits for the signals of all ranks (`meet`), and reads the data of all ranks.

*When a program may write.* Memory for a place has two halves, used in turn. A place's flags, one
for each rank, count the turns that the rank has begun. A program writes a half again two turns
later. In the turn between, it has seen that every rank had begun that turn; and a rank begins a
turn only after the previous one, reads included. So no barrier is needed after the reads. All ranks
must launch the same places in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

WARP_BYTES = 2048
"""Bytes that a program holds in registers, for each of its warps."""


def meeting_warps(ranks: int, row_bytes: int) -> int:
    """Warps of a program that holds a row of each rank: a power of two, as Triton wants it.

    Args:
        ranks: of the group.
        row_bytes: a power of two.
    """
    return min(max(triton.next_power_of_2(ranks) * row_bytes // WARP_BYTES, 1), 16)


@triton.jit
def meet(
    pointers: tl.tensor,
    turns: tl.tensor,
    place: tl.tensor,
    turn: tl.tensor,
    rank: tl.constexpr,
    ranks: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """Signal to all ranks that this one has begun a turn of a place, and wait until all have."""
    # All threads have read their turn, and made their stores, before those that signal release
    # them.
    tl.debug_barrier()
    tl.store(turns + place, turn)
    # A thread for each peer: one after the other, their ways to and fro would add up.
    peers = tl.arange(0, lanes)
    exists = peers < ranks
    theirs = tl.load(pointers + peers, mask=exists, other=0).to(tl.pointer_type(tl.int32))
    said = tl.full((lanes,), 1, tl.int32)
    tl.atomic_add(theirs + place * ranks + rank, said, mask=exists, sem="release", scope="sys")
    flags = tl.load(pointers + rank).to(tl.pointer_type(tl.int32)) + place * ranks + peers
    nothing = tl.zeros((lanes,), tl.int32)
    missing = 1
    while missing > 0:
        begun = tl.atomic_add(flags, nothing, mask=exists, sem="acquire", scope="sys")
        # The difference, because a count may wrap around.
        missing = tl.sum((exists & (begun - turn < 0)).to(tl.int32))
    tl.debug_barrier()
