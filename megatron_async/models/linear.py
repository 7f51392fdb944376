"""Parallel linear layers for inference: Megatron's parameters, with a forward without training
code.

A column-parallel layer computes a share of the outputs. A row-parallel layer has a share of the
inputs; its product is one summand of the sum over the ranks, which the layer also computes. With
sequence parallelism (Korthikanti et al. 2022) the residual stream between the two is split by
tokens: a reduce-scatter gives each rank its rows, and the next column-parallel layer gathers them.

On a CPU in float32 the weight is also kept in oneDNN's blocked layout, with which a small batch
reads weights at nearly memory speed. On a 2-core EPYC the matrix products of a SmolLM2-135M step
take 25 to 32 ms at batch 8 in this layout, and 55 to 63 with torch's linear
(docs/records/cpu_throughput.md). Or the weight is kept as 8-bit integers
(`ops/linear/eight_bit.py`). On a GPU, decode steps have their own kernels
(`ops/linear/skinny_linear.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import get_pg_size
from torch import Tensor, nn

from megatron_async.errors import OutOfMemoryError
from megatron_async.models.layer_ops import LayerOps
from megatron_async.models.step_state import OfThread
from megatron_async.ops.all_ops import Ops
from megatron_async.ops.cpu.compiler import multiplies_integers
from megatron_async.ops.linear.eight_bit import EightBitWeight, is_available
from megatron_async.ops.linear.partial_sums import add_partial_sums
from megatron_async.ops.linear.qkv_places import QkvPlaces
from megatron_async.ops.linear.skinny_plan import (
    adds_residual,
    rotates_heads,
    takes_squares,
    takes_unnormed,
)
from megatron_async.ops.linear.unnormed import Unnormed
from megatron_async.ops.ranks.tensor_collectives import TensorCollectives, Unreduced, collectives_of

PACKING_BATCH_HINT = 256
"""oneDNN picks a layout for this many rows. Measured: 256 serves 1 to 256 rows well, 1 does not."""
PACKING_MEMORY_SHARE = 0.5
"""Weights are packed only if the copy takes at most this share of the free memory."""

PackedWeight = Tensor | EightBitWeight
"""A weight in oneDNN's blocked layout, or as 8-bit integers."""


def linear(
    ops: Ops,
    x: Tensor | Unnormed,
    weight: Tensor,
    bias: Tensor | None,
    packed: PackedWeight | None,
    may_split: bool = False,
    added: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        ops: of the layer.
        x: `[tokens, 1, in]`, or `[..., in]` on a CPU; or, on a GPU, a row whose norm must be
            computed first.
        weight: `[out, in]`.
        bias: `[out]` or None.
        packed: the weight from `pack_weights`, or None.
        may_split: partial sums may be returned.
        added: `[tokens, out]`, to be added to the product, on a GPU.

    Returns:
        `[tokens, 1, out]`; or partial sums `[splits, tokens, 1, out]`.
    """
    if isinstance(packed, EightBitWeight):
        assert isinstance(x, Tensor), "on a CPU"
        return packed.product(x, bias)
    if packed is not None:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    if isinstance(x, Unnormed):
        output = ops.linear(x, weight, bias, may_split, added)
        return output.unsqueeze(-2)
    if x.is_cuda:
        rows = x.flatten(0, -2)
        output = ops.linear(rows, weight, bias, may_split, added)
        shape = (*output.shape[:-2], *x.shape[:-1], output.size(-1))
        return output.view(shape)
    return ops.linear(x, weight, bias)


class InferenceColumnParallelLinear(ColumnParallelLinear):
    """Megatron's `ColumnParallelLinear`.

    With `sequence_parallel` it takes this rank's rows and works on all: tokens, padded to a
    multiple of the ranks.
    """

    packed_weight: PackedWeight | None = None
    ops = LayerOps()

    @property
    def collectives(self) -> TensorCollectives:
        """Collectives of the ranks that share this layer."""
        return collectives_of(self.tp_group)

    def forward(
        self,
        input_: Tensor | Unnormed,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`[..., in]` -> `[..., out of this rank]`, and the bias where the caller adds it later.

        Where `takes_unnormed`, the input may be the arguments of the norm before this layer.
        """
        bias = None if self.skip_bias_add else self.bias
        weight = self.weight if weight is None else weight
        output = linear(self.ops, self._all_rows(input_), weight, bias, self.packed_weight)
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather:
            output = self.collectives.all_gather_columns(output, self.output_size)
        return output, self.bias if self.skip_bias_add else None

    def forward_activated(self, input_: Tensor | Unnormed, gated: bool) -> Tensor | None:
        """SwiGLU of the output, `[tokens, 1, out / 2]`, or if not `gated` its squared ReLU,
        `[tokens, 1, out]`, where one op does both; else None."""
        row = input_.x if isinstance(input_, Unnormed) else input_
        if not row.is_cuda or self.bias is not None:
            return None
        input_ = self._all_rows(input_)
        rows = input_ if isinstance(input_, Unnormed) else input_.flatten(0, -2)
        product = self.ops.linear_swiglu if gated else self.ops.linear_squared_relu
        return product(rows, self.weight)[:, None]

    @property
    def may_rotate(self) -> bool:
        """Whether a qkv layer may have an op that also rotates and appends its outputs."""
        return self.weight.is_cuda and not self.sequence_parallel and not self.skip_bias_add

    def rotates(self, input_: Tensor | Unnormed, dim: int) -> bool:
        """Whether `forward_rotated` takes such an input, with heads of `dim` elements."""
        if not self.may_rotate:
            return False
        is_normed = isinstance(input_, Unnormed)
        rows = input_.x if isinstance(input_, Unnormed) else input_.flatten(0, -2)
        return rotates_heads(rows, self.weight, dim, is_normed)

    def forward_rotated(self, input_: Tensor | Unnormed, places: QkvPlaces) -> Tensor:
        """Rotated queries `[tokens, heads, dim]`, with keys and values appended; of a qkv layer, if
        it `rotates` such an input."""
        rows = input_ if isinstance(input_, Unnormed) else input_.flatten(0, -2)
        return self.ops.linear_rope_append(rows, self.weight, self.bias, places)

    def takes_unnormed(self, hidden_states: Tensor) -> bool:
        """Whether `forward` should be given the arguments of the norm before it."""
        whole = hidden_states.is_cuda and not self.sequence_parallel
        return whole and takes_unnormed(hidden_states.flatten(0, -2))

    def _all_rows(self, input_: Tensor | Unnormed) -> Tensor | Unnormed:
        if not self.sequence_parallel or isinstance(input_, Unnormed):
            return input_
        return self.collectives.all_gather(input_)


class InferenceRowParallelLinear(RowParallelLinear):
    """Megatron's `RowParallelLinear`.

    With `sequence_parallel` it takes all rows and gives this rank's, of the tokens padded to a
    multiple of the ranks.

    Attributes:
        may_split: set by a caller that takes partial sums: `[splits, tokens, 1, out]` of a layer
            that is alone in its group, `Unreduced` of one that is not.
        residual: `[tokens, out]`, set by a caller for the next `forward` where `adds_residual`: the
            product is added to it.
    """

    packed_weight: PackedWeight | None = None
    may_split: bool = False
    residual = OfThread()
    ops = LayerOps()

    @property
    def collectives(self) -> TensorCollectives:
        """Collectives of the ranks that share this layer."""
        return collectives_of(self.tp_group)

    def adds_residual(self, rows: Tensor) -> bool:
        """Whether the product can be added to `rows`, `[tokens, out]`."""
        alone = get_pg_size(self.tp_group) == 1 and self.bias is None
        return alone and adds_residual(rows, self.weight)

    def takes_squares(self, rows: Tensor, groups: int) -> bool:
        """Whether `forward` takes an `Unnormed` with squares of such `rows`, `[tokens, in]`, in so
        many groups."""
        if not rows.is_cuda or get_pg_size(self.tp_group) > 1:
            return False
        may_split = self.may_split and self.bias is None
        return takes_squares(rows, self.weight, groups, may_split)

    def forward(self, input_: Tensor | Unnormed) -> tuple[Tensor | Unreduced, Tensor | None]:
        """`[..., in of this rank]` -> `[..., out]`, and the bias where the caller adds it later.

        Where `takes_squares`, the input may be one that this layer has to divide.
        """
        alone = get_pg_size(self.tp_group) == 1
        may_split = self.may_split and self.bias is None
        bias = self.bias if alone and not self.skip_bias_add else None
        # Among ranks, partial sums are added up on their way into the sum over the ranks.
        may_split = may_split or not alone
        residual, self.residual = self.residual, None
        output: Tensor | Unreduced
        packed = self.packed_weight
        output = linear(self.ops, input_, self.weight, bias, packed, may_split, residual)
        if not alone:
            assert isinstance(input_, Tensor), "see takes_squares"
            output = self._reduced(output, input_.dtype)
            if self.bias is not None and not self.skip_bias_add:
                assert isinstance(output, Tensor), "a sum with a bias is done here"
                output = output + self.bias
        return output, self.bias if self.skip_bias_add else None

    def _reduced(self, product: Tensor, dtype: torch.dtype) -> Tensor | Unreduced:
        collectives = self.collectives
        if self.explicit_expert_comm:
            return add_partial_sums(product, dtype)
        if self.sequence_parallel:
            return collectives.reduce_scatter(add_partial_sums(product, dtype))
        if self.may_split and self.bias is None and collectives.adds_with_norm(product, dtype):
            return Unreduced(product, collectives.all_reduce_add_rms_norm)
        return collectives.all_reduce(product, dtype)


def pack_weights(model: nn.Module, free_memory: int, quantization: str | None = None) -> int:
    """Keep a blocked or an 8-bit copy of every linear weight, where this is possible and faster.

    Call it again when the weights have changed. Layers on a GPU or in another dtype than float32
    use their plain weights. So do all layers if blocked copies would take more than
    `PACKING_MEMORY_SHARE` of `free_memory` bytes.

    Args:
        model: whose linear layers are of this file's classes.
        free_memory: bytes.
        quantization: "int8", or None for blocked copies; "auto": int8 where this CPU has loops for
            it and the copies fit.

    Returns:
        bytes of the copies, 0 if nothing was packed.

    Raises:
        OutOfMemoryError: 8-bit copies that were asked for do not fit.
        ConfigurationError: this CPU cannot multiply them.
    """
    jobs = _weights_on_cpu(model)
    if quantization == "auto":
        fits = sum(weight.numel() for _, weight in jobs) <= free_memory
        quantization = "int8" if fits and multiplies_integers() and is_available() else None
    if quantization is not None:
        return _keep_eight_bits(jobs, free_memory)
    total = sum(weight.numel() * weight.itemsize for _, weight in jobs)
    if not torch.backends.mkldnn.is_available() or total > PACKING_MEMORY_SHARE * free_memory:
        return 0
    with torch.no_grad():
        for module, weight in jobs:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKING_BATCH_HINT)
            module.packed_weight = packed
    return total


def bits_of_weights(model: nn.Module) -> list[int]:
    """Bits of the model's quantized weights, 4 or 8, each once; none: all are the model's own."""
    packed = (getattr(module, "packed_weight", None) for module in model.modules())
    return sorted({weight.bits for weight in packed if isinstance(weight, EightBitWeight)})


def _keep_eight_bits(jobs: list[tuple[Any, Tensor]], free_memory: int) -> int:
    needed = sum(weight.numel() for _, weight in jobs)
    if needed > free_memory:
        raise OutOfMemoryError(
            f"quantization='int8' keeps {needed / 2**30:.2f} GiB of 8-bit weights, and "
            f"{free_memory / 2**30:.2f} GiB are free: leave it None, or free memory."
        )
    total = 0
    with torch.no_grad():
        for module, weight in jobs:
            module.packed_weight = EightBitWeight(weight.detach())
            total += module.packed_weight.nbytes
    return total


def _weights_on_cpu(model: nn.Module) -> list[tuple[Any, Tensor]]:
    """Linear layers with a float32 weight on a CPU, and that weight."""
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    jobs: list[tuple[Any, Tensor]] = []
    for module in model.modules():
        if isinstance(module, InferenceColumnParallelLinear | InferenceRowParallelLinear):
            weight = module.weight
            if weight is None and tied:
                weight = model.shared_embedding_or_output_weight()  # type: ignore[operator]
            if weight.device.type == "cpu" and weight.dtype == torch.float32:
                jobs.append((module, weight))
    return jobs
