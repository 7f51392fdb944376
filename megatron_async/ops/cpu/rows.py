"""What rows the loops of a CPU take; others are the references'."""

from __future__ import annotations

import torch
from torch import Tensor


def serves(*tensors: Tensor | None) -> bool:
    """Whether the loops take these tensors."""
    return all(
        tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous())
        for tensor in tensors
    )


def serves_gated(y: Tensor, z: Tensor, weight: Tensor) -> bool:
    """Whether the loops of gated norms take rows y, gates z and a weight."""
    return (
        y.shape == z.shape
        and y.dtype == z.dtype == torch.float32
        and y.stride(1) == z.stride(1) == 1
        and serves(weight)
    )
