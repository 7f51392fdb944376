"""The layers of a hybrid model, run one after the other: Megatron's `HybridStack` for inference;
and Megatron's spec of these layers, whatever their products and norms are made of."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import WrappedTensor
from torch import Tensor

from megatron_async.errors import ConfigurationError
from megatron_async.models.attention import PagedCoreAttention, PagedSelfAttention
from megatron_async.models.decoder_layer import LAYER_KINDS
from megatron_async.models.gated_delta import GatedDeltaMixer
from megatron_async.models.layer_ops import LayerOps
from megatron_async.models.linear import InferenceColumnParallelLinear, InferenceRowParallelLinear
from megatron_async.models.mamba import Mamba2Mixer
from megatron_async.models.mlp import InferenceMLP
from megatron_async.models.moe import MoELayer
from megatron_async.models.norm import make_norm, normalised
from megatron_async.models.recurrent_layers import stamp_state_layers
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.ranks.tensor_collectives import collectives_of


class LayersAtOnce(Protocol):
    """All layers of a stack as one call, for the passes that it serves."""

    def serves(self, hidden_states: Tensor, view: Any) -> bool:
        """Whether `run` does a pass over hidden states `[tokens, hidden]`."""

    def run(self, hidden_states: Tensor, view: Any) -> Stream:
        """The layers, as `PagedHybridStack.run`."""


class PagedHybridStack(HybridStack):
    """Megatron's `HybridStack` for one pipeline stage of the kinds in `LAYER_KINDS`.

    Its final norm is torch's (Megatron's stack has TransformerEngine's). A depth of multi-token
    prediction has its own norm after the stack, and calls `run` instead of `forward`.

    Attributes:
        gives_mtp_hidden: whether `forward` leaves the input of the first depth of multi-token
            prediction, if any is built, with the view (`StepView.mtp_hidden`): the state behind the
            final norm, or before it with `mtp_hidden_before_norm`.
        compiled: the layers as one call for some steps, given by the stack's owner; or None.
    """

    gives_mtp_hidden = True
    compiled: LayersAtOnce | None = None
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
        stream = self.run(Stream(hidden_states.flatten(0, 1)), inference_context)
        if not self.post_process:
            whole = stream.value if stream.residual is None else stream.value + stream.residual
            return whole[:, None]
        normed, total = self.finish(stream)
        if getattr(self.config, "mtp_num_depths", 0):
            is_before = self.config.mtp_hidden_before_norm
            inference_context.mtp_hidden = total if is_before else normed
        if self.config.sequence_parallel:
            rows = collectives_of(self.pg_collection.tp).all_gather(normed)
            normed = rows[: inference_context.dims.tokens]
        return normed[:, None]

    def run(self, stream: Stream, view: Any) -> Stream:
        """The stream behind the layers, without the norm at the end. On a stage with the final norm
        its value may be parts of a sum.

        The residual stream is kept separate from the blocks' outputs, so that each addition is
        fused with the next norm, and both, where this is faster, with the next product. A block
        whose last product adds its output to the stream (of one row) leaves the stream whole.
        """
        if self.compiled is not None and self.compiled.serves(stream.value, view):
            return self.compiled.run(stream.value, view)
        last = len(self.layer_type_list) - 1
        for number, kind in enumerate(self.layer_type_list):
            # What follows is a norm, which adds up partial sums; but the next stage's is not here.
            may_split = self.post_process or number < last
            stream = LAYER_KINDS[kind](self.layers[number], stream, view, may_split)
        return stream

    def finish(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """What `run` returned, `[tokens, hidden]`, normalised by the final norm, and without it."""
        return normalised(self.ops, stream, self.final_norm)


def hybrid_stack_spec(
    config: TransformerConfig,
    stack: type[PagedHybridStack] = PagedHybridStack,
    column: Any = InferenceColumnParallelLinear,
    row: Any = InferenceRowParallelLinear,
    norm: Any = make_norm,
    norms_inside: bool = False,
) -> ModuleSpec:
    """Layer spec of attention (`*`), MLP (`-`), expert (`E`), Mamba-2 (`M`) and Gated DeltaNet
    (`G`) layers; by default without any package beyond torch.

    A norm's name in a checkpoint is that which it has inside the linear layer behind it, as in
    Megatron's TransformerEngine spec, so checkpoints are interchangeable.

    Args:
        config: of the model.
        stack: of the layers.
        column, row: the products of a layer, the first and the last.
        norm: of layers; those of query and key heads are always ours.
        norms_inside: `column` has the norm before it inside; an expert layer's stands alone.
    """

    def before(name: str, product: str) -> dict[str, Any]:
        keys = {f"{name}.": f"{product}.layer_norm_"}
        return {} if norms_inside else {name: norm, "sharded_state_dict_keys_map": keys}

    heads_norm = make_norm if config.qk_layernorm else None
    attention = ModuleSpec(
        module=PagedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column,
            core_attention=PagedCoreAttention,
            linear_proj=row,
            q_layernorm=heads_norm,
            k_layernorm=heads_norm,
        ),
    )
    mlp = partial(
        InferenceMLP.as_mlp_submodule,
        submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row),
    )
    products, bda = {"in_proj": column, "out_proj": row}, get_bias_dropout_add
    layers = {
        "attention_layer": ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                self_attention=attention,
                self_attn_bda=bda,
                **before("input_layernorm", "self_attention.linear_qkv"),
            ),
        ),
        "mlp_layer": ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                mlp=mlp, mlp_bda=bda, **before("pre_mlp_layernorm", "mlp.linear_fc1")
            ),
        ),
        "moe_layer": ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=norm, mlp=MoELayer, mlp_bda=bda
            ),
        ),
        "mamba_layer": ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                mixer=ModuleSpec(module=Mamba2Mixer, params=products),
                mamba_bda=bda,
                **before("norm", "mixer.in_proj"),
            ),
        ),
        "gdn_layer": ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                self_attention=ModuleSpec(module=GatedDeltaMixer, params=products),
                self_attn_bda=bda,
                **before("input_layernorm", "self_attention.in_proj"),
            ),
        ),
    }
    return ModuleSpec(module=stack, submodules=HybridStackSubmodules(**layers))
