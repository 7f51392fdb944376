"""Rows before the norm that a product may compute too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Unnormed:
    """The input of a product before its residual add and RMSNorm: `add_rms_norm`'s arguments; or
    Mamba-2's (Dao and Gu 2024), gated and multiplied by the norm's weight, before it is divided by
    its root mean square.

    Attributes:
        x: `[rows, k]`, elements of a row adjacent; of a layer with experts
            (`ops/experts/few_tokens.py`) contiguous, or partial sums of that, float32 `[parts,
            tokens, k]`, contiguous.
        residual: like `x`, without parts, or None.
        weight: `[k]`, the norm's.
        eps: added to the mean square.
        squares: float32 `[rows, groups, parts]`, contiguous: of each group of k / groups adjacent
            elements, the sum of the squares before they were multiplied by the weight, in parts.
            None: x is as the layer before has left it.
        total: the new residual, once the product has been launched.
    """

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    eps: float
    squares: Tensor | None = None
    total: Tensor | None = None

    def divided(self) -> Tensor:
        """x, which has `squares`, divided by its root mean square, in plain torch."""
        assert self.squares is not None, "nothing to divide by"
        rows, groups, _parts = self.squares.shape
        elements = self.x.size(1) // groups
        factors = torch.rsqrt(self.squares.sum(2) / elements + self.eps)
        grouped = self.x.view(rows, groups, elements).float() * factors[..., None]
        return grouped.view(self.x.shape).to(self.x.dtype)
