"""Where a round's tensors wait, told before a byte moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from megatron_async.devices import Device
from megatron_async.errors import UpdateError

STAGINGS = ("auto", "direct", "device", "host", "none")
FREE_SHARE = 0.9
"""Spare tensors take at most this share of what is free."""


@dataclass(frozen=True)
class RoundPlan:
    """What a round will take, before a byte moves. Plain values, so that `asdict` is JSON."""

    staging: str
    """One of `STAGINGS`, never "auto": "device" and "host" are where spare tensors are."""
    num_bytes: int
    """Bytes of this rank's weights in the round."""
    spare_bytes: int
    """Bytes of spare tensors; at most, where the round is partial."""
    free_bytes: int
    """What was free there."""
    weights: int
    """Count on this rank."""
    why: str


def make_plan(device: Device, staging: str, sizes: Sequence[int], is_partial: bool) -> RoundPlan:
    """The plan of a round of weights of so many bytes each, for one of `STAGINGS`.

    Raises:
        UpdateError: there is no memory for it; has the bytes.
    """
    num_bytes, weights = sum(sizes), len(sizes)
    is_cpu = device.torch_device.type == "cpu"
    # torch's pinned memory comes in powers of two.
    pinned = num_bytes if is_cpu else sum(1 << (size - 1).bit_length() for size in sizes)
    needed = {"device": num_bytes, "host": pinned}
    free = {"device": device.free_memory(), "host": psutil.virtual_memory().available}
    if staging in ("direct", "none"):
        why = "asked for: no second memory"
        return RoundPlan(staging, num_bytes, 0, free["device"], weights, why)
    places: tuple[str, ...] = (staging,)
    if staging == "auto":  # on a CPU both are the same memory
        places = ("device",) if is_cpu else ("device", "host")
    for place in places:
        if needed[place] <= FREE_SHARE * free[place] or (is_partial and place == places[-1]):
            why = "asked for" if staging == place else "the first memory with room"
            return RoundPlan(place, num_bytes, needed[place], free[place], weights, why)
    each = " and ".join(
        f"the {place} has {free[place]:,} of {needed[place]:,} free" for place in places
    )
    raise UpdateError(
        f"a round of {num_bytes:,} bytes of weights does not fit: {each}, of which it may take "
        f"{FREE_SHARE:.0%}. Use staging='direct' (tensors of this process or by CUDA IPC) or "
        "staging='none' (no step runs meanwhile), or give the KV cache less memory."
    )
