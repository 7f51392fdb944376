"""Numbers for benchmarks of recurrent layers' ops."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.bfloat16
MEMORY = 4e9
"""Bytes of states that the layers of a case may take; there are 2 to 30 of them."""


def random(*size: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Standard normal numbers on the GPU."""
    return torch.randn(size, device="cuda").to(dtype)


def layers_that_fit(state_bytes: int) -> int:
    """Number of layers that fit, so many that no layer's state stays in a cache.

    Args:
        state_bytes: of one layer, all rows.
    """
    return max(2, min(30, int(MEMORY / state_bytes)))
