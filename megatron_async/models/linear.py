"""Parallel linear layers for inference: Megatron's parameters, a forward without training's
detours.

On a CPU in float32 the weight is also kept in oneDNN's blocked layout, which reads a small batch's
weights near memory speed: on a 2-core EPYC the matrix products of a SmolLM2-135M step take 25 to
32 ms at batch 8 that way, and 55 to 63 with torch's linear (docs/performance.md). On a GPU decode
steps have kernels of their own (`ops/skinny_linear.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import get_pg_size
from torch import Tensor, nn

from megatron_async.ops.kernels import kernels_for
from megatron_async.ops.skinny_linear import Unnormed, takes_unnormed

PACKING_BATCH_HINT = 256
"""oneDNN picks a layout for this many rows. Measured: 256 serves 1 to 256 rows well, 1 does not."""
PACKING_MEMORY_SHARE = 0.5
"""Weights are packed only if the copy takes at most this share of the free memory."""


def linear(
    x: Tensor | Unnormed,
    weight: Tensor,
    bias: Tensor | None,
    packed: Tensor | None,
    may_split: bool = False,
) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: `[tokens, 1, in]`, or `[..., in]` on a CPU; or, on a GPU, a row whose norm is to be taken
            first.
        weight: `[out, in]`.
        bias: `[out]` or None.
        packed: the weight from `pack_weights`, or None.
        may_split: partial sums may be returned.

    Returns:
        `[tokens, 1, out]`; or partial sums `[splits, tokens, 1, out]`.
    """
    if packed is not None:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    if isinstance(x, Unnormed):
        return kernels_for(x.x).linear(x, weight, bias)[:, None]
    if x.is_cuda:
        rows = x.flatten(0, -2)
        output = kernels_for(x).linear(rows, weight, bias, may_split)
        shape = (*output.shape[:-2], *x.shape[:-1], output.size(-1))
        return output.view(shape)
    return kernels_for(x).linear(x, weight, bias)


class InferenceColumnParallelLinear(ColumnParallelLinear):
    """Megatron's `ColumnParallelLinear`; alone in its group it is a plain linear layer."""

    packed_weight: Tensor | None = None

    def forward(
        self,
        input_: Tensor | Unnormed,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron's: `[..., in]` -> `[..., out]`, and the bias if it is to be added later.

        Where `takes_unnormed`, the input may be the arguments of the norm before this layer.
        """
        if get_pg_size(self.tp_group) > 1:
            return super().forward(input_, weight, runtime_gather_output)
        bias = None if self.skip_bias_add else self.bias
        weight = self.weight if weight is None else weight
        output = linear(input_, weight, bias, self.packed_weight)
        return output, self.bias if self.skip_bias_add else None

    def forward_swiglu(self, input_: Tensor | Unnormed) -> Tensor | None:
        """SwiGLU of the output, `[tokens, 1, out / 2]`, where one kernel does both; else None."""
        row = input_.x if isinstance(input_, Unnormed) else input_
        if not row.is_cuda or self.bias is not None or get_pg_size(self.tp_group) > 1:
            return None
        rows = input_ if isinstance(input_, Unnormed) else input_.flatten(0, -2)
        return kernels_for(row).linear_swiglu(rows, self.weight)[:, None]

    def takes_unnormed(self, hidden_states: Tensor) -> bool:
        """Whether `forward` should be given the arguments of the norm before it."""
        alone = hidden_states.is_cuda and get_pg_size(self.tp_group) == 1
        return alone and takes_unnormed(hidden_states.flatten(0, -2))


class InferenceRowParallelLinear(RowParallelLinear):
    """Megatron's `RowParallelLinear`; alone in its group it is a plain linear layer.

    Attributes:
        may_split: set by a caller that takes partial sums, `[splits, tokens, 1, out]`.
    """

    packed_weight: Tensor | None = None
    may_split: bool = False

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """As Megatron's: `[..., in]` -> `[..., out]`, and the bias if it is to be added later."""
        if get_pg_size(self.tp_group) > 1:
            return super().forward(input_)
        may_split = self.may_split and self.bias is None
        bias = None if self.skip_bias_add else self.bias
        output = linear(input_, self.weight, bias, self.packed_weight, may_split)
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
