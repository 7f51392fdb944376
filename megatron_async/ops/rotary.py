"""Apply rotary embedding to query and key heads."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary_reference(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate element i with element i + dim / 2 of every head.

    Args:
        query: `[tokens, heads, dim]`.
        key: `[tokens, kv_heads, dim]`.
        cos, sin: `[tokens, 1, dim]` in the dtype of query and key.

    Returns:
        rotated query and key, same shapes and dtype.
    """
    return query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin


def rotate_half(x: Tensor) -> Tensor:
    """`[-second half, first half]` of the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
