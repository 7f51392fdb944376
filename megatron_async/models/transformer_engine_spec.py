"""Layer spec of Megatron's TransformerEngine modules around our paged attention.

Megatron-Core's own hybrid stack is made of these: `TELayerNormColumnParallelLinear` (the norm fused
into the linear layer behind it), `TERowParallelLinear` and `TENorm`. Attention, rotary, KV append
and SwiGLU stay ours; embedding and output layer are Megatron's with either spec. In float32
TransformerEngine multiplies as TF32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols as LayerSymbols
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import WrappedTensor
from torch import Tensor, nn

from megatron_async.errors import ConfigurationError
from megatron_async.models.attention import PagedCoreAttention, PagedSelfAttention
from megatron_async.models.hybrid_stack import PagedHybridStack
from megatron_async.models.mlp import InferenceMLP
from megatron_async.models.moe import MoELayer


def require_transformer_engine(device: torch.device) -> None:
    """Check that TransformerEngine can run.

    Raises:
        ConfigurationError: `device` is no GPU, or the package is not installed.
    """
    if device.type != "cuda":
        raise ConfigurationError(
            f"transformer_impl='transformer_engine' needs a GPU, but the device is {device}: "
            "TransformerEngine has no CPU kernels. Use transformer_impl='local' there."
        )
    if not HAVE_TE:
        raise ConfigurationError(
            "transformer_impl='transformer_engine', but TransformerEngine is not installed: "
            "run `pip install --no-build-isolation transformer-engine[pytorch]` (it compiles its "
            "PyTorch extension and wants the CUDA toolkit), or use transformer_impl='local'."
        )


class TransformerEngineHybridStack(PagedHybridStack):
    """The hybrid stack with norms inside the linear layers, and TransformerEngine's final norm."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.post_process:
            self.final_norm = _on_meta_device(TENorm, config)(
                hidden_size=config.hidden_size, config=config, eps=config.layernorm_epsilon
            )
        for module in self.modules():
            if isinstance(module, MoELayer):
                module.may_split = False  # no norm here adds up summands

    def forward(
        self,
        hidden_states: Tensor | WrappedTensor,
        attention_mask: Tensor | None,
        inference_context: Any = None,
        **_: Any,
    ) -> Tensor:
        """Run the layers: hidden states `[tokens, 1, hidden]` -> the same, normalised at the end of
        the last stage."""
        if isinstance(hidden_states, WrappedTensor):
            hidden_states = hidden_states.unwrap()
        if not self.pre_process:
            hidden_states = self.input_tensor
        for layer, kind in zip(self.layers, self.layer_type_list, strict=True):
            block = layer.self_attention if kind == LayerSymbols.ATTENTION else layer.mlp
            # The norms of the others are inside their first linear layers.
            is_moe = kind == LayerSymbols.MOE
            x = layer.pre_mlp_layernorm(hidden_states) if is_moe else hidden_states
            output, bias = block(x, inference_context=inference_context)
            if bias is not None:
                output = output + bias
            hidden_states = hidden_states + output
        return self.final_norm(hidden_states) if self.post_process else hidden_states


def transformer_engine_stack_spec(config: TransformerConfig) -> ModuleSpec:
    """Layer spec of attention (`*`) and MLP (`-`) layers of TransformerEngine's modules, and of
    expert layers (`E`), which are ours behind its norm.

    Parameters bear the names that Megatron's checkpoints have: a norm's weight is
    `linear_qkv.layer_norm_weight` or `linear_fc1.layer_norm_weight`.
    """
    column = _on_meta_device(TELayerNormColumnParallelLinear, config)
    row = _on_meta_device(TERowParallelLinear, config)
    any_norm = _on_meta_device(TENorm, config)
    norm = any_norm if config.qk_layernorm else None
    attention_layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=PagedSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column,
                    core_attention=PagedCoreAttention,
                    linear_proj=row,
                    q_layernorm=norm,
                    k_layernorm=norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
        ),
    )
    mlp_layer = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            mlp=partial(
                InferenceMLP.as_mlp_submodule,
                submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    moe_layer = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=any_norm, mlp=MoELayer, mlp_bda=get_bias_dropout_add
        ),
    )
    return ModuleSpec(
        module=TransformerEngineHybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=attention_layer, mlp_layer=mlp_layer, moe_layer=moe_layer
        ),
    )


def _on_meta_device(module: Callable[..., nn.Module], config: TransformerConfig) -> Any:
    """A builder of `module` that makes its parameters on the meta device.

    TransformerEngine names a device for every parameter, so torch's default device does not reach
    it; Megatron chooses that device by the configuration.
    """
    meta_config = copy.copy(config)
    meta_config.use_cpu_initialization = False
    meta_config.init_model_with_meta_device = True

    def build(*args: Any, config: TransformerConfig, **kwargs: Any) -> nn.Module:
        return module(*args, config=meta_config, **kwargs)

    return build
