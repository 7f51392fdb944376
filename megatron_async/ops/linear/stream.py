"""`Stream`: the residual stream between two blocks of a decoder, and the norm that reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_async.ops.linear.rounded_rows import RoundedRows

AddNorm = Callable[..., tuple[Tensor, Tensor]]
"""A call with (value, residual, weight, eps): `Stream.parts_of_ranks`."""


@dataclass
class Stream:
    """What a block leaves for the next one: its output and the stream that the output belongs to,
    not added yet, so that a product can do both sums and the norm (`add_rms_norm`'s arguments). Or
    Mamba-2's rows (Dao and Gu 2024), gated and multiplied by the norm's weight, before they are
    divided by their root mean square.

    Attributes:
        value: `[rows, k]`, elements of a row adjacent; of a layer with experts
            (`ops/experts/few_tokens.py`) contiguous. Or partial sums of that, float32 `[parts,
            rows, k]`, contiguous.
        residual: like `value`, without parts; None: `value` is the whole stream.
        weight: `[k]`, of the norm before the next product; None: no norm is left to be done.
        eps: added to the mean square.
        squares: float32 `[rows, groups, parts]`, contiguous: of each group of k / groups adjacent
            elements, the sum of the squares before they were multiplied by the weight, in parts.
            None: `value` is as the layer before has left it.
        parts_of_ranks: `value` is one rank's part of a sum over ranks. This adds the parts and the
            residual up and normalises the sum, as `TensorCollectives.all_reduce_add_rms_norm`.
        rounded: `value`, which is its codes, with their scales, as products in FP8 take rows, and
            perhaps a few rows more; None: `value` is of the model's dtype.
        is_apart: the next block's output is not to be added to the stream by the block itself: a
            norm follows it.
        total: `value + residual`, once the next product, or its norm, has been launched.
    """

    value: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    eps: float = 0.0
    squares: Tensor | None = None
    parts_of_ranks: AddNorm | None = None
    rounded: RoundedRows | None = None
    is_apart: bool = False
    total: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """A tensor of the stream's rows, `[..., rows, k]`."""
        if self.parts_of_ranks is None:
            return self.value
        assert self.residual is not None, "the embedding is reduced"
        return self.residual

    @property
    def early_total(self) -> Tensor | None:
        """The whole stream, `[rows, k]`, where it is there before the next product is launched."""
        if self.residual is not None or self.is_apart:
            return None
        return self.total if self.weight is None else self.value

    @property
    def norm_arguments(self) -> tuple[Tensor, Tensor | None, Tensor, float]:
        """Arguments of `add_rms_norm`, of a stream whose norm is left to be done."""
        assert self.weight is not None, "the norm is done"
        return self.value, self.residual, self.weight, self.eps

    @property
    def is_whole(self) -> bool:
        """Whether `value` is neither partial sums nor a rank's part of a sum."""
        return self.value.dim() == 2 and self.parts_of_ranks is None

    def divided(self) -> Tensor:
        """The value, which has `squares`, divided by its root mean square, in plain torch."""
        assert self.squares is not None, "nothing to divide by"
        rows, groups, _parts = self.squares.shape
        elements = self.value.size(1) // groups
        factors = torch.rsqrt(self.squares.sum(2) / elements + self.eps)
        grouped = self.value.view(rows, groups, elements).float() * factors[..., None]
        return grouped.view(self.value.shape).to(self.value.dtype)
