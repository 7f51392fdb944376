"""The layers of a hybrid model, run one after the other: Megatron's `HybridStack` for inference."""

from __future__ import annotations

from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import WrappedTensor
from torch import Tensor, nn

from megatron_async.errors import ConfigurationError
from megatron_async.models.compiled_layers import CompiledLayers
from megatron_async.models.layer_kinds import LAYER_KINDS
from megatron_async.models.layer_ops import LayerOps
from megatron_async.models.norm import factors_of, make_norm
from megatron_async.models.recurrent_layers import stamp_state_layers
from megatron_async.ops.all_ops import Ops
from megatron_async.ops.linear.unnormed import Unnormed
from megatron_async.ops.ranks.tensor_collectives import Unreduced, collectives_of


class PagedHybridStack(HybridStack):
    """Megatron's `HybridStack` for one pipeline stage of the kinds in `LAYER_KINDS`.

    Its final norm is torch's (Megatron's stack has TransformerEngine's). A depth of multi-token
    prediction has its own norm after the stack, and calls `run` instead of `forward`.

    Attributes:
        gives_mtp_hidden: whether `forward` leaves the input of the first depth of multi-token
            prediction, if any is built, with its `inference_context`: `StepView.mtp_hidden`, taken
            after the final norm, or before it with `mtp_hidden_before_norm`.
        compiled: the layers as one call for some steps; None where there is none.
    """

    gives_mtp_hidden = True
    compiled: CompiledLayers | None = None
    ops = LayerOps()

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        unknown = set(self.layer_type_list) - LAYER_KINDS.keys()
        if unknown:
            raise ConfigurationError(
                f"layer kinds {sorted(unknown)} are not served yet: build a model of attention "
                "(*), MLP (-), expert (E), Mamba-2 (M) and Gated DeltaNet (G) layers."
            )
        stamp_state_layers(self)
        if self.post_process and not self.is_mtp_layer:
            self.final_norm = make_norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
        kinds = [LAYER_KINDS[kind] for kind in self.layer_type_list]
        products = [
            kind.last_product(layer) for kind, layer in zip(kinds, self.layers, strict=True)
        ]
        for product in products:
            product.may_split = True  # what follows is a norm, which adds up partial sums
        for product in products[-1:] if not self.post_process else ():
            product.may_split = False  # but the next stage's norm is not here

    def forward(
        self,
        hidden_states: Tensor | WrappedTensor,
        attention_mask: Tensor | None,
        inference_context: Any = None,
        **_: Any,
    ) -> Tensor:
        """Run the layers: hidden states `[tokens, 1, hidden]` -> the same, normalised at the end.

        A pipeline stage sends the sum of `run`'s outputs. The next stage's first norm would add
        both and keep the sum as the residual, so the result is the same with half the data.
        """
        if isinstance(hidden_states, WrappedTensor):
            hidden_states = hidden_states.unwrap()
        if not self.pre_process:
            hidden_states = self.input_tensor
        output, residual = self.run(hidden_states, inference_context)
        if not self.post_process:
            assert isinstance(output, Tensor), "its last product may not split"
            return output if residual is None else output + residual
        normed, total = self.finish(output, residual)
        if getattr(self.config, "mtp_num_depths", 0):
            is_before = self.config.mtp_hidden_before_norm
            inference_context.mtp_hidden = (total if is_before else normed).flatten(0, 1)
        if self.config.sequence_parallel:
            rows = collectives_of(self.pg_collection.tp).all_gather(normed)
            return rows[: inference_context.dims.tokens]
        return normed

    def run(
        self, hidden_states: Tensor, inference_context: Any
    ) -> tuple[Tensor | Unreduced, Tensor | None]:
        """The layers, without the norm at the end.

        The residual stream is kept separate from the blocks' outputs, so that each addition is
        fused with the next norm, and both, where this is faster, with the next product. A block
        whose last product adds its output to the stream (of one row) leaves the stream alone.

        Args:
            hidden_states: `[tokens, 1, hidden]`.
            inference_context: the device view of the step.

        Returns:
            the last layer's output and the residual stream that it belongs to, for `add_norm`; None
            where the output is the whole stream.
        """
        if self.compiled is not None and self.compiled.serves(hidden_states, inference_context):
            return self.compiled.run(hidden_states, inference_context)
        output: Any = hidden_states
        residual: Tensor | None = None
        for layer, character in zip(self.layers, self.layer_type_list, strict=True):
            kind = LAYER_KINDS[character]
            norm, block, product = kind.norm(layer), kind.block(layer), kind.first_product(layer)
            last, is_total = kind.last_product(layer), residual is None
            if isinstance(output, Tensor) and product.takes_unnormed(output):
                before = None if residual is None else residual.flatten(0, 1)
                assert norm.eps is not None, "make_norm sets it"
                unnormed = Unnormed(output.flatten(-3, -2), before, factors_of(norm), norm.eps)
                # A new total has its place only once the first product is launched.
                adds = self._adds(last, unnormed.x if is_total else None)
                output, bias = block(unnormed, inference_context=inference_context)
                assert unnormed.total is not None
                residual = unnormed.total[:, None]
            else:
                output, residual = add_norm(self.ops, output, residual, norm)
                adds = self._adds(last, residual.flatten(0, 1))
                output, bias = block(output, inference_context=inference_context)
            if bias is not None:
                output = output + bias
            residual = None if adds else residual
        return output, residual

    def finish(self, output: Tensor | Unreduced, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """What `run` returned, normalised by the final norm, and without it."""
        return add_norm(self.ops, output, residual, self.final_norm)

    @staticmethod
    def _adds(last: Any, stream: Tensor | None) -> bool:
        """Whether a block's last product will add its output to the stream, `[tokens, hidden]`; it
        is told."""
        adds = stream is not None and stream.dim() == 2 and last.adds_residual(stream)
        last.residual = stream if adds else None
        return bool(adds)


def add_norm(
    ops: Ops, x: Tensor | Unreduced, residual: Tensor | None, norm: nn.RMSNorm
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` on Megatron's `[tokens, 1, hidden]`, or on parts of a sum over ranks."""
    flat = None if residual is None else residual.flatten(0, 1)
    assert norm.eps is not None, "make_norm sets it"
    if isinstance(x, Unreduced):
        assert flat is not None, "the embedding is reduced"
        normed, total = x.add_rms_norm(x.product, flat, factors_of(norm), norm.eps)
        return normed[:, None], total[:, None]
    factors = factors_of(norm)
    normed, total = ops.add_rms_norm(x.flatten(-3, -2), flat, factors, norm.eps)
    return normed[:, None], total[:, None]
