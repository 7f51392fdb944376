"""`BlockedWeight`: a float32 weight in oneDNN's blocked layout."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.ops.linear.weight_format import FLOAT32

PACKING_BATCH_HINT = 256
"""oneDNN picks a layout for this many rows. Measured: 256 serves 1 to 256 rows well, 1 does not."""


class BlockedWeight:
    """A float32 weight `[outputs, k]` on a CPU as a `KeptWeight` with which a small batch reads at
    nearly memory speed."""

    format, looped = FLOAT32, None

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_BATCH_HINT)
        self.nbytes = weight.numel() * weight.itemsize

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`: float32 `[..., k]` -> `[..., outputs]`."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return out
