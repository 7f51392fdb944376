"""Build a Megatron-Core model for the engine from a `ModelArchitecture`.

One class serves all: Megatron's `HybridModel` with a layer pattern. The layer spec below uses
Megatron's own parallel linear layers and torch norms, and our paged attention; parameter names are
Megatron's, so a checkpoint of either side loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols as LayerSymbols
from megatron.core.models.hybrid.hybrid_model import HybridModel
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
from megatron_async.models.architecture import ModelArchitecture, RopeScaling
from megatron_async.models.attention import PagedCoreAttention, PagedSelfAttention
from megatron_async.models.embedding import shard_vocabulary
from megatron_async.models.linear import (
    InferenceColumnParallelLinear,
    InferenceRowParallelLinear,
)
from megatron_async.models.mlp import UNGATED, InferenceMLP
from megatron_async.models.moe import MoELayer
from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups
from megatron_async.models.partition import check_partition, padded_vocab_size
from megatron_async.models.pipeline import (
    EMBEDDING,
    OUTPUT,
    layer_costs,
    output_cost,
    split_pattern,
    stage_of,
)
from megatron_async.ops.kernels import kernels_for
from megatron_async.ops.linear.skinny_linear import Unnormed
from megatron_async.ops.ranks.tensor_collectives import Unreduced, collectives_of

SERVED_LAYERS = {LayerSymbols.ATTENTION, LayerSymbols.MLP, LayerSymbols.MOE}
TRANSFORMER_IMPLS = ("local", "transformer_engine")
"""Values of Megatron's `transformer_impl` that are served."""


@dataclass
class ModelConfig(TransformerConfig):
    """Megatron's `TransformerConfig` plus what the engine must know of a model and Megatron keeps
    in the model's constructor arguments instead."""

    hybrid_layer_pattern: str | None = None
    """Layer pattern of the `HybridModel`, "|" between pipeline stages; None for a `GPTModel`."""
    rotary_base: float = 10000.0
    """Rope base ("theta")."""
    rope_scaling: RopeScaling | None = None
    """Llama-3 frequency scaling."""
    pipeline_stage: int = 0
    """Which of the stages in `hybrid_layer_pattern` this is."""
    vocab_size: int | None = None
    """Tokens of the model's vocabulary; None where nobody has told."""


def transformer_config(
    architecture: ModelArchitecture, dtype: torch.dtype, sizes: ParallelSizes | None = None
) -> ModelConfig:
    """Megatron configuration of an architecture, every fusion that needs a GPU package off.

    Args:
        architecture: of the whole model.
        dtype: of weights and activations.
        sizes: over how many ranks it is split; None: one.
    """
    sizes = sizes or ParallelSizes()
    stages = sizes.pipeline_model_parallel
    gated = architecture.activation == "silu"
    return ModelConfig(
        tensor_model_parallel_size=sizes.tensor_model_parallel,
        pipeline_model_parallel_size=sizes.pipeline_model_parallel,
        expert_model_parallel_size=sizes.expert_model_parallel,
        sequence_parallel=sizes.sequence_parallel and sizes.tensor_model_parallel > 1,
        num_layers=len(architecture.pattern),
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_query_groups,
        kv_channels=architecture.kv_channels,
        ffn_hidden_size=architecture.ffn_hidden_size,
        layernorm_epsilon=architecture.layernorm_epsilon,
        normalization="RMSNorm",
        gated_linear_unit=gated,
        activation_func=F.silu if gated else UNGATED,
        add_bias_linear=False,
        add_qkv_bias=architecture.add_qkv_bias,
        qk_layernorm=architecture.qk_layernorm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        # Weights come from a checkpoint; CPU initialization needs no CUDA generator.
        use_cpu_initialization=True,
        perform_initialization=False,
        # bias_activation_fusion starts inductor (a C++ compiler and 20 s on a CPU).
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        hybrid_layer_pattern=split_pattern(
            architecture.pattern,
            stages,
            output_cost(architecture, dtype, sizes),
            layer_costs(architecture, dtype, sizes),
        ),
        # Or a tied embedding's copy would be filled by a collective on GPUs, before it has memory.
        init_model_with_meta_device=stages > 1,
        rotary_base=architecture.rotary_base,
        rope_scaling=architecture.rope_scaling,
        **_moe_options(architecture),
    )


def _moe_options(architecture: ModelArchitecture) -> dict[str, Any]:
    if not architecture.num_moe_experts:
        return {}
    shared = architecture.moe_shared_expert_intermediate_size or None
    return {
        "num_moe_experts": architecture.num_moe_experts,
        "moe_ffn_hidden_size": architecture.moe_ffn_hidden_size,
        "moe_router_topk": architecture.moe_router_topk,
        "moe_router_pre_softmax": architecture.moe_router_pre_softmax,
        "moe_router_score_function": architecture.moe_router_score_function,
        "moe_router_enable_expert_bias": architecture.moe_router_enable_expert_bias,
        "moe_router_topk_scaling_factor": architecture.moe_router_topk_scaling_factor,
        "moe_shared_expert_intermediate_size": shared,
        "moe_router_load_balancing_type": "none",
    }


class PagedHybridStack(HybridStack):
    """Megatron's `HybridStack` for one pipeline stage of attention, gated-MLP and expert layers.

    Its final norm is torch's (the stock one is TransformerEngine's).
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        unknown = set(self.layer_type_list) - SERVED_LAYERS
        if unknown:
            raise ConfigurationError(
                f"layer kinds {sorted(unknown)} are not served yet: build a model of attention (*) "
                "and MLP (-) or expert (E) layers."
            )
        if self.post_process:
            self.final_norm = make_norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
        kinds = InferenceRowParallelLinear | MoELayer
        products = [module for module in self.modules() if isinstance(module, kinds)]
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
        """As `HybridStack.forward`: hidden states `[tokens, 1, hidden]`, normalised at the end.

        The residual stream is carried beside the blocks' outputs, so that each addition is done
        together with the norm that follows it, and both, where that pays, by the product behind.
        A pipeline stage hands on their sum: the next one's first norm would add them up and keep
        the sum as the residual, so it computes the same, of half the data.
        """
        if isinstance(hidden_states, WrappedTensor):
            hidden_states = hidden_states.unwrap()
        if not self.pre_process:
            hidden_states = self.input_tensor
        output, residual = hidden_states, None
        for layer, kind in zip(self.layers, self.layer_type_list, strict=True):
            attends = kind == LayerSymbols.ATTENTION
            norm = layer.input_layernorm if attends else layer.pre_mlp_layernorm
            block = layer.self_attention if attends else layer.mlp
            product = block.linear_qkv if attends else getattr(block, "linear_fc1", None)
            whole = product is not None and isinstance(output, Tensor)
            if product is not None and whole and product.takes_unnormed(output):
                before = None if residual is None else residual.flatten(0, 1)
                unnormed = Unnormed(output.flatten(0, 1), before, norm.weight, norm.eps)
                output, bias = block(unnormed, inference_context=inference_context)
                assert unnormed.total is not None
                residual = unnormed.total[:, None]
            else:
                output, residual = _add_norm(output, residual, norm)
                output, bias = block(output, inference_context=inference_context)
            if bias is not None:
                output = output + bias
        if not self.post_process:
            return output if residual is None else output + residual
        normed, _residual = _add_norm(output, residual, self.final_norm)
        if self.config.sequence_parallel:
            rows = collectives_of(self.pg_collection.tp).all_gather(normed)
            return rows[: inference_context.dims.tokens]
        return normed


def make_norm(config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> nn.RMSNorm:
    """An RMSNorm of torch, called as Megatron's `WrappedTorchNorm`, which refuses sequence
    parallelism for the gradients' sake."""
    return nn.RMSNorm(hidden_size, eps=eps)


def _add_norm(
    x: Tensor | Unreduced, residual: Tensor | None, norm: nn.RMSNorm
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` on Megatron's `[tokens, 1, hidden]`, or on parts of a sum over ranks."""
    flat = None if residual is None else residual.flatten(0, 1)
    if isinstance(x, Unreduced):
        assert flat is not None, "the embedding is reduced"
        assert norm.eps is not None, "make_norm sets it"
        normed, total = x.add_rms_norm(x.product, flat, norm.weight, norm.eps)
        return normed[:, None], total[:, None]
    normed, total = kernels_for(x).add_rms_norm(x.flatten(-3, -2), flat, norm.weight, norm.eps)
    return normed[:, None], total[:, None]


def hybrid_stack_spec(config: TransformerConfig) -> ModuleSpec:
    """Layer spec of attention (`*`), MLP (`-`) and expert (`E`) layers without any package beyond
    torch.

    The key maps give norms the names that Megatron's TransformerEngine spec uses inside a
    checkpoint (there the norm is fused into the linear layer), so checkpoints are interchangeable.
    """
    norm = make_norm if config.qk_layernorm else None
    attention_layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=make_norm,
            self_attention=ModuleSpec(
                module=PagedSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=InferenceColumnParallelLinear,
                    core_attention=PagedCoreAttention,
                    linear_proj=InferenceRowParallelLinear,
                    q_layernorm=norm,
                    k_layernorm=norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_"
            },
        ),
    )
    mlp_layer = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=make_norm,
            mlp=partial(
                InferenceMLP.as_mlp_submodule,
                submodules=MLPSubmodules(
                    linear_fc1=InferenceColumnParallelLinear,
                    linear_fc2=InferenceRowParallelLinear,
                ),
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
        ),
    )
    moe_layer = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=make_norm, mlp=MoELayer, mlp_bda=get_bias_dropout_add
        ),
    )
    return ModuleSpec(
        module=PagedHybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=attention_layer, mlp_layer=mlp_layer, moe_layer=moe_layer
        ),
    )


def stack_spec(config: TransformerConfig, device: torch.device) -> ModuleSpec:
    """The layer spec that `config.transformer_impl` names, for a model on `device`.

    Raises:
        ConfigurationError: no such spec, or it cannot run here.
    """
    if config.transformer_impl == "local":
        return hybrid_stack_spec(config)
    if config.transformer_impl == "transformer_engine":
        from megatron_async.models import transformer_engine_spec

        transformer_engine_spec.require_transformer_engine(device)
        return transformer_engine_spec.transformer_engine_stack_spec(config)
    raise ConfigurationError(
        f"transformer_impl={config.transformer_impl!r} is unknown: use one of "
        f"{', '.join(map(repr, TRANSFORMER_IMPLS))}."
    )


def build_model(
    architecture: ModelArchitecture,
    dtype: torch.dtype,
    device: torch.device,
    transformer_impl: str = "local",
    sizes: ParallelSizes | None = None,
) -> HybridModel:
    """A `HybridModel` with uninitialised weights on `device`, in eval mode, without gradients.

    It is laid out on the meta device first, so that no memory is touched twice.

    Args:
        architecture: of the model.
        dtype: of the weights and of the computation.
        device: where the weights are.
        transformer_impl: what the layers are made of, in Megatron's words: "local" (our spec in
            this file) or "transformer_engine".
        sizes: over how many ranks the model is split; this process gets its part. None: one.

    Raises:
        ConfigurationError: see `stack_spec`, `check_partition` and `ensure_process_groups`.
    """
    check_partition(architecture, sizes or ParallelSizes(), transformer_impl)
    groups = ensure_process_groups(sizes)
    config = transformer_config(architecture, dtype, sizes)
    config.transformer_impl = transformer_impl
    config.pipeline_stage = groups.pp.rank()
    stage = stage_of(config)
    with torch.device("meta"):
        model = HybridModel(
            config=config,
            hybrid_stack_spec=stack_spec(config, device),
            vocab_size=padded_vocab_size(
                architecture.vocab_size, config.tensor_model_parallel_size
            ),
            max_sequence_length=architecture.max_position_embeddings,
            hybrid_layer_pattern=config.hybrid_layer_pattern,
            pre_process=stage.is_first,
            post_process=stage.is_last,
            parallel_output=False,
            share_embeddings_and_output_weights=architecture.tie_word_embeddings,
            # Rotary is applied by position inside PagedSelfAttention.
            position_embedding_type="none",
            pg_collection=groups,
        )
    shard_vocabulary(model, architecture.vocab_size)
    config.vocab_size = model.vocab_size
    model = model.to(dtype=dtype).to_empty(device=device)
    return model.eval().requires_grad_(False)


def init_dummy_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill a model with random weights, made on its own device.

    Norms get 1; the rest N(0, 0.02), so that activations stay finite and logits differ. A weight
    depends on its name in the whole model, so it is the same whatever the pipeline stages.
    """
    stage = stage_of(model.config)
    for name, parameter in model.named_parameters():
        is_tied = name == OUTPUT and model.share_embeddings_and_output_weights
        known = EMBEDDING if is_tied else stage.global_name(name)
        fill_dummy_weight(known, parameter.data, seed)


def fill_dummy_weight(name: str, weight: Tensor, seed: int = 0) -> None:
    """The numbers of `init_dummy_weights` for one whole weight, by its name in the whole model."""
    if weight.dim() == 1 and "norm" in name:
        weight.fill_(1.0)
    elif weight.dim() == 1:
        weight.zero_()
    else:
        generator = torch.Generator(weight.device).manual_seed(seed + crc32(name.encode()))
        weight.normal_(0.0, 0.02, generator=generator)
