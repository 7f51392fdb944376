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
(`ops/linear/cpu/eight_bit.py`). On a GPU, decode steps have their own kernels
(`ops/linear/products.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import get_pg_size
from torch import Tensor, nn

from megatron_async.errors import OutOfMemoryError
from megatron_async.models.held_weight import HeldWeight, Operand, quantised_weights
from megatron_async.models.layer_ops import LayerOps
from megatron_async.models.norm import normalise
from megatron_async.ops.all_ops import Ops
from megatron_async.ops.cpu.compiler import multiplies_integers
from megatron_async.ops.linear.cpu.blocked_weight import BlockedWeight
from megatron_async.ops.linear.cpu.eight_bit import EightBitWeight, is_available
from megatron_async.ops.linear.partial_sums import add_partial_sums
from megatron_async.ops.linear.product_kernel import Activation
from megatron_async.ops.linear.products import Choice, choose_for, takes_rounded
from megatron_async.ops.linear.qkv_places import QkvPlaces
from megatron_async.ops.linear.quantised_weight import QuantisedWeight
from megatron_async.ops.linear.rounded_rows import RoundedRows, new_rounded
from megatron_async.ops.linear.scaled_products import ROWS
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.linear.weight_format import FLOAT32, KeptWeight
from megatron_async.ops.ranks.tensor_collectives import TensorCollectives, collectives_of

PACKING_MEMORY_SHARE = 0.5
"""Weights are packed only if the copy takes at most this share of the free memory."""


def linear(
    ops: Ops, x: Tensor, weight: Operand, bias: Tensor | None, packed: KeptWeight | None
) -> Tensor:
    """`x @ weight.T + bias`, of `[..., in]` and `[out, in]`; `packed` is the weight from
    `pack_weights`."""
    if packed is not None:
        return packed.product(x, bias)
    if x.is_cuda:
        rows = ops.product(x.flatten(0, -2), weight, bias)
        return rows.view(*x.shape[:-1], rows.size(-1))
    return ops.product(x, weight, bias)


class SharedLinear(HeldWeight):
    """What linear layers of this file have beside Megatron's."""

    tp_group: Any
    skip_bias_add: bool
    packed_weight: KeptWeight | None = None
    ops = LayerOps()

    @property
    def collectives(self) -> TensorCollectives:
        """Collectives of the ranks that share this layer."""
        return collectives_of(self.tp_group)


class InferenceColumnParallelLinear(ColumnParallelLinear, SharedLinear):
    """Megatron's `ColumnParallelLinear`.

    With `sequence_parallel` it takes this rank's rows and works on all: tokens, padded to a
    multiple of the ranks.
    """

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`[..., in]` -> `[..., out of this rank]`, and the bias where the caller adds it later."""
        bias = None if self.skip_bias_add else self.bias
        operand = self.operand if weight is None else weight
        rows = self.collectives.all_gather(input_) if self.sequence_parallel else input_
        output = linear(self.ops, rows, operand, bias, self.packed_weight)
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather:
            output = self.collectives.all_gather_columns(output, self.output_size)
        return output, self.bias if self.skip_bias_add else None

    @property
    def may_rotate(self) -> bool:
        """Whether a qkv layer may have a product that also rotates and appends its outputs."""
        return not self.sequence_parallel and not self.skip_bias_add

    def choose(
        self, stream: Stream, rotate: int = 0, activation: Activation = "", rounded: bool = False
    ) -> Choice:
        """How the product of a stream of this rank's rows is computed, with the norm before it.
        `rotate`: elements of a head, if outputs may be rotated and appended; else 0. `rounded`: the
        product behind takes the activation's rows in FP8."""
        return choose_for(
            stream.rows,
            self.operand,
            major=self.ops.major,
            ranks=self.collectives.size if self.sequence_parallel else 1,
            norm=stream.weight is not None
            and stream.parts_of_ranks is None
            and not self.sequence_parallel,
            parts=not stream.is_whole,
            rotate=rotate if rotate and self.may_rotate else 0,
            activation=activation,
            bias=self.bias is not None,
            invariant=self.ops.is_invariant,
            rounded=rounded,
        )

    def rows_of(self, stream: Stream) -> int:
        """Rows of the product of a stream."""
        ranks = self.collectives.size if self.sequence_parallel else 1
        return stream.rows.size(-2) * ranks

    def product(
        self,
        stream: Stream,
        choice: Choice,
        places: QkvPlaces | None = None,
        rounded: RoundedRows | None = None,
    ) -> Tensor:
        """The product of a stream, `[rows, out of this rank]`, with the wants that the choice
        meets. The stream's norm is done before, where it is not among them, and its `total` is set.
        With `places` for keys and values, which go with a choice that meets `rotate`, the result is
        rotated queries, `[rows, heads, dim]`; with a place for `rounded` rows, their codes."""
        if not choice.met.norm:
            normalise(self.ops, stream)
        rows: Tensor | Stream = stream if choice.met.norm else stream.value
        if self.sequence_parallel:
            rows = self.collectives.all_gather(stream.value)
        bias = None if self.skip_bias_add else self.bias
        if self.packed_weight is not None and places is None and isinstance(rows, Tensor):
            return linear(self.ops, rows, self.operand, bias, self.packed_weight)
        return self.ops.product(rows, self.operand, bias, choice, None, places, rounded)


class InferenceRowParallelLinear(RowParallelLinear, SharedLinear):
    """Megatron's `RowParallelLinear`.

    With `sequence_parallel` it takes all rows and gives this rank's, of the tokens padded to a
    multiple of the ranks.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """`[..., in of this rank]` -> `[..., out]`, and the bias where the caller adds it later."""
        rows = input_.flatten(0, -2)
        stream = Stream(rows)
        output = self._output(rows, stream, self.choose(rows, stream)).value
        if self.bias is not None and not self.skip_bias_add and get_pg_size(self.tp_group) > 1:
            output = output + self.bias
        output = output.view(-1, *input_.shape[1:-1], output.size(-1))
        return output, self.bias if self.skip_bias_add else None

    @property
    def takes_rounded(self) -> bool:
        """Whether products of this layer take rows in FP8."""
        return takes_rounded(self.operand, self.ops.major)

    def new_rounded(self, rows: int, stream: Stream) -> RoundedRows:
        """A place for rows in FP8, of a layer that takes them, on the device of a stream."""
        weight = self.operand
        assert isinstance(weight, QuantisedWeight), "see takes_rounded"
        return new_rounded(rows, weight.size(1), stream.rows.device, ROWS, weight.input_scale)

    def choose(
        self, x: Tensor, stream: Stream, may_split: bool = False, squares: int = 0
    ) -> Choice:
        """How the product that ends a block is computed.

        Args:
            x: `[rows, in of this rank]`, or a tensor of that form.
            stream: before the block.
            may_split: a norm follows, which adds up partial sums, or parts of a sum over ranks.
            squares: groups of elements whose sums of squares `x` comes with; 0: none.
        """
        alone, total = get_pg_size(self.tp_group) == 1, stream.early_total
        return choose_for(
            x,
            self.operand,
            major=self.ops.major,
            # Among ranks, partial sums are added up on their way into the sum over the ranks.
            split=(may_split and self.bias is None) or not alone,
            squares=squares if alone else 0,
            residual=alone and total is not None and self.bias is None,
            bias=alone and self.bias is not None and not self.skip_bias_add,
            invariant=self.ops.is_invariant,
        )

    def add(
        self,
        x: Tensor | Stream,
        stream: Stream,
        may_split: bool,
        choice: Choice | None = None,
    ) -> Stream:
        """The stream behind a block that ends with this layer: `x`, `[rows, in of this rank]` (or
        rows in FP8, or those that this layer has to divide, if the choice meets `squares`), and the
        stream before the block, its total known."""
        rows = x.value if isinstance(x, Stream) else x
        if choice is None:
            choice = self.choose(rows, stream, may_split)
        behind = self._output(x, stream, choice, may_split)
        if self.bias is not None and (self.skip_bias_add or get_pg_size(self.tp_group) > 1):
            behind.value = behind.value + self.bias
        return behind

    def _output(
        self, x: Tensor | Stream, stream: Stream, choice: Choice, may_split: bool = False
    ) -> Stream:
        alone = get_pg_size(self.tp_group) == 1
        bias = self.bias if alone and not self.skip_bias_add else None
        added = stream.early_total if choice.met.residual else None
        if self.packed_weight is not None and isinstance(x, Tensor):
            product = linear(self.ops, x, self.operand, bias, self.packed_weight)
        else:
            product = self.ops.product(x, self.operand, bias, choice, added)
        if alone:
            return Stream(product, None if added is not None else stream.total)
        collectives, product = self.collectives, product.unsqueeze(-2)
        dtype = self.operand.dtype
        if self.explicit_expert_comm:
            whole = add_partial_sums(product, dtype)
        elif self.sequence_parallel:
            whole = collectives.reduce_scatter(add_partial_sums(product, dtype))
        elif may_split and self.bias is None and collectives.adds_with_norm(product, dtype):
            add = collectives.all_reduce_add_rms_norm
            return Stream(product, stream.total, parts_of_ranks=add)
        else:
            whole = collectives.all_reduce(product, dtype, self.ops.is_invariant)
        return Stream(whole.squeeze(-2), stream.total)


def pack_weights(model: nn.Module, free_memory: int, quantization: str | None = None) -> int:
    """Keep a blocked or an 8-bit copy of every linear weight, where this is possible and faster.

    `repack_weights` makes them again when the weights have changed. Layers on a GPU or in another
    dtype than float32 use their plain weights. So do all layers if blocked copies would take more
    than `PACKING_MEMORY_SHARE` of `free_memory` bytes.

    Args:
        model: whose linear layers are of this file's classes.
        free_memory: bytes.
        quantization: "int8", or None or "file" for blocked copies; "auto": int8 where this CPU has
            loops for it and the copies fit.

    Returns:
        bytes of the copies, 0 if nothing was packed.

    Raises:
        OutOfMemoryError: 8-bit copies that were asked for do not fit.
        ConfigurationError: this CPU cannot multiply them.
    """
    jobs = weights_on_cpu(model)
    if quantization == "auto":
        fits = sum(weight.numel() for _, weight in jobs) <= free_memory
        quantization = "int8" if fits and multiplies_integers() and is_available() else None
    if quantization == "int8":
        return _keep_eight_bits(jobs, free_memory)
    total = sum(weight.numel() * weight.itemsize for _, weight in jobs)
    if not torch.backends.mkldnn.is_available() or total > PACKING_MEMORY_SHARE * free_memory:
        return 0
    with torch.no_grad():
        for module, weight in jobs:
            module.packed_weight = BlockedWeight(weight.detach())
    return total


def repack_weights(model: nn.Module) -> None:
    """Make the copies of `pack_weights` again, one after the other, each in the form it has."""
    with torch.no_grad():
        for module, weight in weights_on_cpu(model):
            kept: Any = module.packed_weight
            if kept is not None:
                module.packed_weight = type(kept)(weight.detach())


def bits_of_weights(model: nn.Module) -> list[int]:
    """Bits of the model's quantized weights, 4 or 8, each once; none: all are the model's own."""
    packed = (getattr(module, "packed_weight", None) for module in model.modules())
    formats = {weight.format for weight in packed if weight is not None}
    bits = {weight.form.bits for _, weight in quantised_weights(model)}
    return sorted(bits | {kept.bits for kept in formats - {FLOAT32}})


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


def weights_on_cpu(model: nn.Module) -> list[tuple[Any, Tensor]]:
    """Linear layers with a float32 weight on a CPU, and that weight: none that `keep_weight` has
    taken away."""
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
