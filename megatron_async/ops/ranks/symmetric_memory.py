"""Memory that GPUs of one host read and write directly, where all ranks of a group have it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from megatron_async.communication.bootstrap import join_job

logger = logging.getLogger(__name__)

ALIGNMENT = 256
"""Bytes; workspaces begin at multiples of it."""


def flag_bytes(places: int, ranks: int) -> int:
    """Bytes of the int32 flags `[places, ranks]` that a workspace begins with, padding included."""
    return -(-places * ranks * torch.int32.itemsize // ALIGNMENT) * ALIGNMENT


def share(
    elements: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Zeroed memory that all ranks of the group can reach; all of them call it.

    Returns:
        this rank's, `[elements]`, and int64 `[ranks]`, the addresses of all, both on the device.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

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
    """Make a workspace on symmetric memory, if all ranks of a group can have it.

    Args:
        group: the ranks; all of them call this.
        make: makes it, together with the others, and raises what torch does where it cannot.

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
