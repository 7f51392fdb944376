"""Stored tensors to a GPU, through pinned memory.

A copy from a file's pages to the device waits in the driver, which stages it itself, one thread at
a time. Here each reader has two pinned pieces: while the device takes one, the reader fills the
other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_async.checkpoints.safetensors_file import StoredTensor
from megatron_async.checkpoints.weight import Region

PIECE_BYTES = 16 << 20


class _Staging(threading.local):
    """Pinned pieces of the calling thread, and the ends of the copies out of them."""

    def __init__(self) -> None:
        self.pieces = torch.empty(2, PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        self.copied = [torch.cuda.Event(), torch.cuda.Event()]


@cache
def _staging() -> _Staging:
    return _Staging()


def upload(target: Tensor, read: Callable[[Tensor, int], Any]) -> None:
    """Fill a contiguous tensor of a GPU, in the order of its current stream; `read` fills a piece
    of bytes in host memory from a place among the tensor's."""
    staging, stream = _staging(), torch.cuda.current_stream(target.device)
    for number, written in enumerate(target.view(-1).view(torch.uint8).split(PIECE_BYTES)):
        piece, copied = staging.pieces[number % 2][: len(written)], staging.copied[number % 2]
        copied.synchronize()  # sync-ok: no engine runs yet, or this is a thread of its own
        read(piece, number * PIECE_BYTES)
        written.copy_(piece, non_blocking=True)
        copied.record(stream)


def read_to(stored: StoredTensor, region: Region, device: torch.device) -> Tensor:
    """A region of a stored tensor on a device, in its dtype."""
    if device.type != "cuda":
        return stored.read(region).to(device)
    shape, place = [part.stop - part.start for part in region], stored.place_of(region)
    found = torch.empty(shape, dtype=stored.torch_dtype, device=device)
    if place is not None:
        upload(found, lambda piece, at: stored.file.fill(stored.name, place + at, piece))
    else:
        values = stored.read(region).view(-1).view(torch.uint8)
        upload(found, lambda piece, at: piece.copy_(values[at : at + len(piece)]))
    return found
