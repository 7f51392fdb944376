"""Stored tensors to a GPU, through pinned memory.

A copy from a file's pages to the device waits in the driver, which stages it itself, one thread at
a time. Here each reader has two pinned pieces: while the device takes one, the reader fills the
other.
"""

from __future__ import annotations

import threading
from functools import cache

import torch
from torch import Tensor

PIECE_BYTES = 16 << 20


class _Staging(threading.local):
    """Pinned pieces of the calling thread, and the ends of the copies out of them."""

    def __init__(self) -> None:
        self.pieces = torch.empty(2, PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        self.copied = [torch.cuda.Event(), torch.cuda.Event()]


@cache
def _staging() -> _Staging:
    return _Staging()


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A contiguous tensor of the host on a device, in the order of its current stream."""
    if device.type != "cuda":
        return tensor.to(device)
    staging, stream = _staging(), torch.cuda.current_stream(device)
    found = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    source, target = (each.reshape(-1).view(torch.uint8) for each in (tensor, found))
    parts = zip(source.split(PIECE_BYTES), target.split(PIECE_BYTES), strict=True)
    for number, (read, written) in enumerate(parts):
        piece, copied = staging.pieces[number % 2], staging.copied[number % 2]
        copied.synchronize()  # sync-ok: no engine runs yet
        piece[: len(read)].copy_(read)
        written.copy_(piece[: len(read)], non_blocking=True)
        copied.record(stream)
    return found
