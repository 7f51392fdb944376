"""Parallel linear layers for inference: Megatron's parameters, a forward without training's
detours.

On a CPU in float32 the weight is also kept in oneDNN's blocked layout, which reads a small batch's
weights near memory speed: on a 2-core EPYC the matrix products of a SmolLM2-135M step take 25 to
32 ms at batch 8 that way, and 55 to 63 with torch's linear (docs/performance.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import get_pg_size
from torch import Tensor, nn

PACKING_BATCH_HINT = 256
"""oneDNN picks a layout for this many rows. Measured: 256 serves 1 to 256 rows well, 1 does not."""
PACKING_MEMORY_SHARE = 0.5
"""Weights are packed only if the copy takes at most this share of the free memory."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        bias: `[out]` or None.
        packed: the weight from `pack_weights`, or None.

    Returns:
        `[..., out]`.
    """
    if packed is None:
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class InferenceColumnParallelLinear(ColumnParallelLinear):
    """Megatron's `ColumnParallelLinear`; alone in its group it is a plain linear layer."""

    packed_weight: Tensor | None = None

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron's: `[..., in]` -> `[..., out]`, and the bias if it is to be added later."""
        if get_pg_size(self.tp_group) > 1:
            return super().forward(input_, weight, runtime_gather_output)
        bias = None if self.skip_bias_add else self.bias
        weight = self.weight if weight is None else weight
        output = linear(input_, weight, bias, self.packed_weight)
        return output, self.bias if self.skip_bias_add else None


class InferenceRowParallelLinear(RowParallelLinear):
    """Megatron's `RowParallelLinear`; alone in its group it is a plain linear layer."""

    packed_weight: Tensor | None = None

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """As Megatron's: `[..., in]` -> `[..., out]`, and the bias if it is to be added later."""
        if get_pg_size(self.tp_group) > 1:
            return super().forward(input_)
        bias = None if self.skip_bias_add else self.bias
        output = linear(input_, self.weight, bias, self.packed_weight)
        return output, self.bias if self.skip_bias_add else None


def pack_weights(model: nn.Module, free_memory: int) -> int:
    """Keep a blocked copy of every linear weight, where that is possible and pays.

    Call it again when the weights have changed. Layers on a GPU, in another dtype than float32 or
    in a tensor-parallel group keep to their plain weights, and so do all layers when the copies
    would take more than `PACKING_MEMORY_SHARE` of `free_memory` bytes.

    Returns:
        bytes of the copies, 0 if nothing was packed.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    jobs: list[tuple[Any, Tensor]] = []
    for module in model.modules():
        if isinstance(module, InferenceColumnParallelLinear | InferenceRowParallelLinear):
            weight = module.weight
            if weight is None and tied:
                weight = model.shared_embedding_or_output_weight()  # type: ignore[operator]
            plain = weight.device.type == "cpu" and weight.dtype == torch.float32
            if plain and get_pg_size(module.tp_group) == 1:
                jobs.append((module, weight))
    total = sum(weight.numel() * weight.itemsize for _, weight in jobs)
    if total > PACKING_MEMORY_SHARE * free_memory:
        return 0
    with torch.no_grad():
        for module, weight in jobs:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKING_BATCH_HINT)
            module.packed_weight = packed
    return total
