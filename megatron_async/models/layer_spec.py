"""Megatron's layer spec of our layers, whatever their products and norms are made of."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_async.models.attention import PagedCoreAttention, PagedSelfAttention
from megatron_async.models.gated_delta import GatedDeltaMixer
from megatron_async.models.hybrid_stack import PagedHybridStack
from megatron_async.models.linear import InferenceColumnParallelLinear, InferenceRowParallelLinear
from megatron_async.models.mamba import Mamba2Mixer
from megatron_async.models.mlp import InferenceMLP
from megatron_async.models.moe import MoELayer
from megatron_async.models.norm import make_norm


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
