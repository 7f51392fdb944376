"""KV pools whose pages are zeroed when something first touches them.

The default pool of a CPU is 1 GiB. Tests write to a few pages of it, and zeroing all of them takes
half a second of each test that makes an engine.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from megatron_async.device_state import kv_cache

ALIGNMENT = 64
"""Bytes, as torch aligns its tensors."""


class LazyTorch:
    """The module `torch`, whose `zeros` leaves the zeroing of host memory to the system."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, size: tuple[int, ...], *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        if torch.device(device).type != "cpu":
            return torch.zeros(size, dtype=dtype, device=device)
        count = math.prod(size) * dtype.itemsize
        words = np.zeros(count + ALIGNMENT, np.uint8)  # calloc: pages that are not there yet
        first = -words.ctypes.data % ALIGNMENT
        return torch.from_numpy(words[first : first + count]).view(dtype).view(size)


def zero_pools_lazily() -> None:
    """For all engines of this process, and of those that are forked from it."""
    kv_cache.torch = LazyTorch()  # type: ignore[assignment]
