"""Rows before the norm that a product may compute too."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Unnormed:
    """The input of a product before its residual add and RMSNorm: `add_rms_norm`'s arguments; or
    before its gate and RMSNorm, as in Mamba-2 (Dao and Gu 2024).

    Attributes:
        x: `[rows, k]`, elements of a row adjacent; of a layer with experts
            (`ops/experts/few_tokens.py`) contiguous, or partial sums of that, float32 `[parts,
            tokens, k]`, contiguous.
        residual: like `x`, without parts, or None.
        weight: `[k]`, the norm's.
        eps: added to the mean square.
        gate: like `x`, without parts: x is multiplied by its SiLU; None, or there is no residual.
        total: the new residual, once the product has been launched.
    """

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    eps: float
    gate: Tensor | None = None
    total: Tensor | None = None
