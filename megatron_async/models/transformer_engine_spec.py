"""Layer spec of Megatron's TransformerEngine modules around our paged attention.

Megatron-Core's own hybrid stack is made of these: `TELayerNormColumnParallelLinear` (the norm fused
into the linear layer behind it), `TERowParallelLinear` and `TENorm`. Ours stay attention with its
norms of heads, rotary and KV append, SwiGLU, experts, convolutions, recurrences and their gated
norms; of a depth of multi-token prediction all that is around its layers. Embedding and output
layer are Megatron's with either spec. In float32 TransformerEngine multiplies as TF32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, override

import torch
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import EXPERTS
from megatron_async.models.decoder_layer import LAYER_KINDS
from megatron_async.models.hybrid_stack import PagedHybridStack, hybrid_stack_spec
from megatron_async.ops.linear.stream import Stream


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
        if self.post_process and not self.is_mtp_layer:
            self.final_norm = _on_meta_device(TENorm, config)(
                hidden_size=config.hidden_size, config=config, eps=config.layernorm_epsilon
            )

    @override
    def run(self, stream: Stream, view: Any) -> Stream:
        hidden_states = stream.value[:, None]
        for layer, kind in zip(self.layers, self.layer_type_list, strict=True):
            # The norms of the others are inside their first linear layers.
            is_moe = kind == EXPERTS
            x = layer.pre_mlp_layernorm(hidden_states) if is_moe else hidden_states
            output, bias = LAYER_KINDS[kind].block(layer)(x, inference_context=view)
            if bias is not None:
                output = output + bias
            hidden_states = hidden_states + output
        return Stream(hidden_states.flatten(0, 1))

    @override
    def finish(self, stream: Stream) -> tuple[Tensor, Tensor]:
        return self.final_norm(stream.value[:, None]).squeeze(1), stream.value


def transformer_engine_stack_spec(config: TransformerConfig) -> ModuleSpec:
    """Layer spec of TransformerEngine's modules; expert layers are ours behind its norm.

    Parameters bear the names that Megatron's checkpoints have: a norm's weight is
    `linear_qkv.layer_norm_weight`, `linear_fc1.layer_norm_weight` or `in_proj.layer_norm_weight`.
    """
    kinds = (TELayerNormColumnParallelLinear, TERowParallelLinear, TENorm)
    column, row, norm = (_on_meta_device(kind, config) for kind in kinds)
    return hybrid_stack_spec(
        config, TransformerEngineHybridStack, column, row, norm, norms_inside=True
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
