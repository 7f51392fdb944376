"""Memory that GPUs of one host read and write directly, and how programs of several ranks meet
over it, each with its peers on the others.

One program serves a place. It writes its rank's data for the place to its rank's memory, signals
all ranks, waits for the signals of all ranks (`meet`), and reads the data of all ranks.

*When a program may write.* Memory for a place has two halves, used in turn. A place's flags, one
for each rank, count the turns that the rank has begun. A program writes a half again two turns
later. In the turn between, it has seen that every rank had begun that turn; and a rank begins a
turn only after the previous one, reads included. So no barrier is needed after the reads. All ranks
must launch the same places in the same order, as with collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.communication.bootstrap import join_job

logger = logging.getLogger(__name__)

ALIGNMENT = 256
"""Bytes; workspaces begin at multiples of it."""
WARP_BYTES = 2048
"""Bytes that a program holds in registers, for each of its warps."""


class Meeting(NamedTuple):
    """A workspace of a group, made once, in which programs meet.

    Attributes:
        pointers: int64 `[ranks]`: addresses of the ranks' symmetric memory: int32 flags `[places,
            ranks]`, zero at first, then, at `first`, the data of all places, twice.
        turns: int32 `[places]`, this rank's own memory, zero at first.
        rank: of this process.
        first: elements of the data's dtype before the data.
        memory: this rank's, which must live as long.
    """

    pointers: Tensor
    turns: Tensor
    rank: int
    first: int
    memory: Tensor | None = None

    @property
    def places(self) -> int:
        """Most programs of a launch."""
        return len(self.turns)

    @property
    def constants(self) -> dict[str, int]:
        """What kernels that meet have as constants."""
        ranks = len(self.pointers)
        return {
            "rank": self.rank,
            "ranks": ranks,
            "lanes": triton.next_power_of_2(ranks),
            "places": self.places,
            "first": self.first,
        }

    def warps(self, row_bytes: int) -> int:
        """Warps of a program that holds a row of so many bytes, a power of two, of each rank."""
        ranks = triton.next_power_of_2(len(self.pointers))
        return min(max(ranks * row_bytes // WARP_BYTES, 1), 16)


def make_meeting(
    group: dist.ProcessGroup, places: int, size: int, dtype: torch.dtype, device: torch.device
) -> Meeting:
    """Zeroed memory for places of `size` elements each; all ranks of the group call it."""
    flags = -(-places * group.size() * torch.int32.itemsize // ALIGNMENT) * ALIGNMENT
    first = flags // dtype.itemsize
    memory, pointers = share(first + 2 * places * size, dtype, device, group)
    turns = torch.zeros(places, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)  # sync-ok: at the start
    return Meeting(pointers, turns, group.rank(), first, memory)


def share(
    elements: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Zeroed memory that all ranks of the group can reach; all of them call it.

    Returns:
        this rank's, `[elements]`, and int64 `[ranks]`, the addresses of all, both on the device.
    """
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed import _symmetric_memory

    # Not `_symmetric_memory.empty`: that takes it from a pool, where it may begin inside an
    # allocation, and torch's kernels count from the allocation's begin.
    tensor = _SymmetricMemory.empty_strided_p2p((elements,), (1,), dtype, device)
    tensor.zero_()
    handle: Any = _symmetric_memory.rendezvous(tensor, group)
    addresses = [address + handle.offset for address in handle.buffer_ptrs]
    return tensor, torch.tensor(  # sync-ok: at the start
        addresses, dtype=torch.int64, device=device
    )


def make_on_all[Workspace](
    group: dist.ProcessGroup, make: Callable[[], Workspace]
) -> tuple[Workspace | None, str]:
    """Make a workspace on symmetric memory, if all ranks of a group, which all call this, can.

    Returns:
        it and "", or None and why there is none; the same on all ranks.
    """
    made, reason = None, ""
    if len(set(tell_group(group, "hosts", _host()))) > 1:
        return None, "the ranks are on several hosts"
    try:
        made = make()
    except (RuntimeError, AttributeError, ImportError) as error:
        logger.warning("symmetric memory is not available: %s", error)
        reason = f"symmetric memory is not available: {str(error).splitlines()[0]}"
    # This is a barrier, too: nobody writes flags before all have cleared theirs.
    reasons = tell_group(group, "symmetric memory", reason)
    failed = next((found for found in reasons if found), "")
    return (None, failed) if failed else (made, "")


def tell_group(group: dist.ProcessGroup, name: str, value: str) -> list[str]:
    """What each rank of a group says, in their order; all of them call this, at the start.

    Torch's own exchange of objects unpickles what the other ranks' connections bring.
    """
    members = dist.get_process_group_ranks(group)
    return [*join_job().exchange(name, value, members).values()]


def _host() -> str:
    """Names this machine: its boot, which containers share, and not its name, which they do not."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


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
