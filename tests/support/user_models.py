"""A user's own `GPTModel`, twice: with our attention in its layer spec, and all Megatron's."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_async.models.attention import PagedCoreAttention, PagedSelfAttention
from megatron_async.models.parallel_state import ensure_process_groups

VOCABULARY = 96
LENGTH = 256
"""Positions of the models."""


def gpt_config(**changes: Any) -> TransformerConfig:
    """Two layers of Megatron's `TransformerConfig`, which says nothing of rope."""
    fields = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 48,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "attention_softmax_in_fp32": True,
    }
    return TransformerConfig(**{**fields, **changes})


def make_gpt(
    config: TransformerConfig,
    *,
    paged: bool = True,
    mask: AttnMaskType = AttnMaskType.causal,
    q_norm: Any = WrappedTorchNorm,
    k_norm: Any = WrappedTorchNorm,
    **options: Any,
) -> GPTModel:
    """A float32 model on the CPU whose tokens depend on the whole sequence before them.

    Args:
        config: of the model; its weights follow from it alone.
        paged: with our attention, or with Megatron's.
        mask: in the layer spec.
        q_norm, k_norm: norms of heads, where the configuration asks for them.
        **options: of `GPTModel`.
    """
    attention = ModuleSpec(
        module=PagedSelfAttention if paged else SelfAttention,
        params={"attn_mask_type": mask},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PagedCoreAttention if paged else DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=q_norm if config.qk_layernorm else None,
            k_layernorm=k_norm if config.qk_layernorm else None,
        ),
    )
    products = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=partial(MLP.as_mlp_submodule, submodules=products),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    options = {"position_embedding_type": "rope", "max_sequence_length": LENGTH, **options}
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=VOCABULARY,
        pg_collection=ensure_process_groups(),
        **options,
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        width = 1.0 if parameter.dim() == 1 or "embedding" in name else parameter.size(1)
        # Scores of queries and keys must be large, or positions would hardly matter.
        scale = (4.0 if "linear_qkv" in name else 2.0) / math.sqrt(width)
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            values = 1 + 0.3 * values
        parameter.data.copy_(values * (scale if parameter.dim() > 1 else 1.0))
    return model.eval()


@torch.no_grad()
def logits_of(model: GPTModel, tokens: list[int]) -> torch.Tensor:
    """float32 `[tokens, vocabulary]` by Megatron's own forward of a whole sequence."""
    ids = torch.tensor([tokens])
    mask = torch.ones(1, 1, len(tokens), len(tokens)).triu(1).bool()
    return model(ids, torch.arange(len(tokens))[None], mask)[0]
