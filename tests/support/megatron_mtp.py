"""Megatron-Core's own layer of multi-token prediction on a CPU, to compare ours with."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_async.models.parallel_state import ensure_process_groups
from megatron_async.models.rotary import described_frequencies


class PlainCore(torch.nn.Module):
    """Causal attention by torch, where Megatron's own needs a GPU's memory buffer."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """`[tokens, 1, heads, dim]` each -> `[tokens, 1, heads * dim]`."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return found.permute(2, 0, 1, 3).flatten(2)


def megatron_layer(config: Any, pattern: str) -> MultiTokenPredictionLayer:
    """A layer of attention and MLP, all parts but the core of attention being Megatron's."""
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=PlainCore, linear_proj=RowParallelLinear
        ),
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    norm: Any = WrappedTorchNorm
    stack = HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm, self_attention=attention, self_attn_bda=get_bias_dropout_add
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=norm,
                mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    )
    ends = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=norm
    )
    return MultiTokenPredictionLayer(
        config=config,
        submodules=ends,
        pg_collection=ensure_process_groups(),
        mtp_layer_pattern=pattern,
        hybrid_submodules=stack,
    )


@torch.no_grad()
def megatron_output(
    layer: MultiTokenPredictionLayer, config: Any, embedded: Tensor, hidden: Tensor
) -> Tensor:
    """What it makes of `[tokens, 1, hidden]` and `[tokens, hidden]`, in one shot:
    `[tokens, 1, hidden]`."""
    positions = torch.arange(len(hidden), dtype=torch.float32)
    angles = torch.outer(positions, described_frequencies(config))
    rope = torch.cat((angles, angles), -1)[:, None, None]
    found: Tensor = layer._proj_and_transformer_layer(
        hidden[:, None], embedded, attention_mask=None, rotary_pos_emb=rope
    )
    return found
