"""Random numbers on the GPU, and how many layers a case goes through."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.bfloat16
MEMORY = 4e9
"""Bytes of states or caches that the layers of a case may take; there are 2 to 30 of them."""


def random(*size: int, dtype: torch.dtype = DTYPE, scale: float = 1.0) -> Tensor:
    """Normal numbers of this standard deviation on the GPU, drawn in `dtype`."""
    return torch.randn(size, device="cuda", dtype=dtype).mul_(scale)


def layers_that_fit(layer_bytes: int) -> int:
    """Number of layers that fit, so many that none of their states or caches stays in the L2 cache.

    Args:
        layer_bytes: of one layer, all rows.
    """
    return max(2, min(30, int(MEMORY / layer_bytes)))
