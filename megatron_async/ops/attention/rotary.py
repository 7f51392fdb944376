"""Apply rotary embedding to query and key heads."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary_reference(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate element i with element i + rotated / 2 of every head.

    Args:
        query: `[tokens, heads, dim]`.
        key: `[tokens, kv_heads, dim]`.
        cos, sin: `[tokens, 1, rotated]` in the dtype of query and key. The first `rotated` elements
            of a head are rotated, the others left as they are.

    Returns:
        rotated query and key, same shapes and dtype.
    """
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated = cos.size(-1)
    if rotated == x.size(-1):
        return x * cos + rotate_half(x) * sin
    turned, kept = x[..., :rotated], x[..., rotated:]
    return torch.cat((turned * cos + rotate_half(turned) * sin, kept), dim=-1)


def rotate_half(x: Tensor) -> Tensor:
    """`[-second half, first half]` of the last dimension."""
    half = x.size(-1) // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((-second, first), dim=-1)
