"""Attention of a row in parts, which the product behind it may add up."""

# Kernels know no `*` in a tuple; mypy does not know that a loop over constants is unrolled.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE: tl.constexpr = tl.constexpr(4)
"""Parts that a program asks for at once: as many as a row of 256 tokens has."""


@dataclass(frozen=True)
class Unjoined:
    """Attention of one decode row, as `paged_decode_attention` leaves it with `leaves_parts`.

    Attributes:
        x: `[1, heads * dim]`, the attention where the row has one part; else undefined.
        output: float32 `[slots, heads, dim]`, contiguous: of each part the sum of values by their
            weights.
        maximum, total: float32 `[slots, heads]`, contiguous: of each part the largest score, times
            the logarithm of e to base 2, and the sum of the weights.
        splits: int32 `[rows, 2]`, contiguous: the row's first slot and its number of parts; written
            before the kernel before the product.
    """

    x: Tensor
    output: Tensor
    maximum: Tensor
    total: Tensor
    splits: Tensor

    def joined(self) -> Tensor:
        """x, in plain torch; it waits for the device."""
        slot, parts = self.splits[0].tolist()  # sync-ok: a reference
        if parts == 1:
            return self.x
        mine = slice(slot, slot + parts)
        weights = torch.exp2(self.maximum[mine] - self.maximum[mine].amax(0))
        total = (self.total[mine] * weights).sum(0)
        found = (self.output[mine] * weights[..., None]).sum(0) / total[:, None]
        return found.view(1, -1).to(self.x.dtype)


def part_arguments(unjoined: Unjoined | None, x: Tensor) -> tuple[Any, ...]:
    """A kernel's arguments from `splits` to `part_total`; x where nothing is to be joined.

    Raises:
        ValueError: parts that are not those of x.
    """
    if unjoined is None:
        return (x,) * 4
    output, maximum, total = unjoined.output, unjoined.maximum, unjoined.total
    tensors = (output, maximum, total, unjoined.splits)
    alike = output.shape[:2] == maximum.shape == total.shape and all(
        tensor.is_contiguous() for tensor in tensors
    )
    if not alike or output[0].numel() != x.size(1) or unjoined.splits.dtype != torch.int32:
        raise ValueError(
            f"skinny_linear: parts of {tuple(output.shape)}, {tuple(maximum.shape)} and "
            f"{tuple(total.shape)} by {unjoined.splits.dtype} are not those of a row of "
            f"{x.size(1)} elements, or not contiguous."
        )
    return unjoined.splits, output, maximum, total


@triton.jit
def join_parts(
    part_output: tl.tensor,
    part_maximum: tl.tensor,
    part_total: tl.tensor,
    slot: tl.tensor,
    parts: tl.tensor,
    heads: tl.constexpr,
    dim: tl.constexpr,
    size: tl.constexpr,
) -> tl.tensor:
    """All heads of a row, `[size // dim, dim]`: the sum of `parts` parts from `slot` on, by their
    maxima and totals."""
    tile: tl.constexpr = size // dim
    head = tl.arange(0, tile)
    place = head[:, None] * dim + tl.arange(0, dim)[None, :]
    maximum = tl.full((tile,), -float("inf"), tl.float32)
    total = tl.zeros((tile,), tl.float32)
    gathered = tl.zeros((tile, dim), tl.float32)
    for first in range(0, parts, AT_ONCE):
        # A row beyond the heads, or a part beyond the last, is a maximum of -inf: of no weight.
        chunk_maximum = maximum
        maxima = ()
        totals = ()
        outputs = ()
        for i in tl.static_range(AT_ONCE):
            exists = (head < heads) & (first + i < parts)
            at = (slot + first + i) * heads
            its = tl.load(part_maximum + at + head, mask=exists, other=-float("inf"))
            maxima = maxima + (its,)
            totals = totals + (tl.load(part_total + at + head, mask=exists, other=0.0),)
            outputs = outputs + (
                tl.load(part_output + at * dim + place, mask=exists[:, None], other=0.0),
            )
            chunk_maximum = tl.maximum(chunk_maximum, its)
        base = tl.where(chunk_maximum == -float("inf"), 0.0, chunk_maximum)
        shrink = tl.exp2(maximum - base)
        total = total * shrink
        gathered = gathered * shrink[:, None]
        for i in tl.static_range(AT_ONCE):
            weight = tl.exp2(maxima[i] - base)
            total += totals[i] * weight
            gathered += outputs[i] * weight[:, None]
        maximum = chunk_maximum
    return gathered / tl.maximum(total, 1e-30)[:, None]
