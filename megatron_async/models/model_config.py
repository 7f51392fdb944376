"""Megatron's configuration of a `ModelArchitecture`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_async.models.architecture import (
    ATTENTION,
    DELTA,
    RECURRENT,
    ModelArchitecture,
    RopeScaling,
)
from megatron_async.models.mlp import GATED, UNGATED
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.models.pipeline import layer_costs, output_cost, split_pattern
from megatron_async.models.sizes import CONV_KERNEL, SIZES_OF


@dataclass
class ModelConfig(TransformerConfig):
    """Megatron's `TransformerConfig` plus fields that the engine needs and that Megatron passes to
    the model's constructor instead."""

    hybrid_layer_pattern: str | None = None
    """Layer pattern of the `HybridModel`, "|" between pipeline stages; None for a `GPTModel`."""
    rotary_base: float = 10000.0
    """Rope base ("theta")."""
    window_rotary_base: float | None = None
    """Rope base of layers with a window, whose frequencies are not scaled (Gemma 3); None: theirs
    are those of all layers."""
    rope_scaling: RopeScaling | None = None
    """Llama-3 frequency scaling."""
    position_embedding_type: str = "rope"
    """"rope" or "none"."""
    rotary_percent: float = 1.0
    """Share of each head that rope turns."""
    has_post_norms: bool = False
    """Attention and MLPs have a norm behind them."""
    attn_logit_softcapping: float | None = None
    """Bound of scaled attention scores."""
    final_logit_softcapping: float | None = None
    """Bound of logits."""
    mamba_norm_epsilon: float = 1e-5
    """Epsilon of the gated norm of Mamba-2 layers."""
    pipeline_stage: int = 0
    """Which of the stages in `hybrid_layer_pattern` this is."""
    vocab_size: int | None = None
    """Tokens of the model's vocabulary; None if unknown."""
    mtp_pattern: str = ""
    """Layers of one depth of multi-token prediction; "": none is built."""
    mtp_num_depths: int = 0
    """Depths that are built, each with KV layers of its own. (Megatron's `mtp_num_layers` stays
    unset: its block is another.)"""
    mtp_hidden_before_norm: bool = False
    """The first depth takes hidden states from before the final norm."""


SAME = (
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "layernorm_epsilon",
    "add_qkv_bias",
    "softmax_type",
    "activation_func_clamp_value",
    "glu_linear_offset",
    "qk_layernorm",
    "attention_output_gate",
    "layernorm_zero_centered_gamma",
    "rotary_base",
    "window_rotary_base",
    "rope_scaling",
    "position_embedding_type",
    "rotary_percent",
    "has_post_norms",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "mamba_norm_epsilon",
)
"""Fields of `ModelArchitecture` that are fields of `ModelConfig`, with the same values."""
SAME_OF_EXPERTS = (
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor",
    "moe_shared_expert_gate",
)
"""Further ones of a model with experts."""
DECIDING_TIMES = (
    "hybrid_layer_pattern", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
    "num_query_groups", "kv_channels", "qk_layernorm", "attention_output_gate",
    "gated_linear_unit", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "mamba_num_heads", "mamba_head_dim", "mamba_state_dim",
    "mamba_num_groups", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "mtp_pattern", "mtp_num_depths", "transformer_impl",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "sequence_parallel",
)  # fmt: skip
"""Fields that decide how long a step takes: of the whole model, and over how many ranks it is
split."""


def transformer_config(
    architecture: ModelArchitecture,
    dtype: torch.dtype,
    sizes: ParallelSizes | None = None,
    with_mtp: bool = False,
) -> ModelConfig:
    """Megatron configuration of an architecture, every fusion that needs a GPU package off; of one
    rank, unless `sizes` say otherwise."""
    a, sizes = architecture, sizes or ParallelSizes()
    stages = sizes.pipeline_model_parallel
    recurrent = [SIZES_OF[kind].FIELDS for kind in RECURRENT if kind in a.pattern]
    names = [*SAME, *chain.from_iterable(recurrent)]
    same: dict[str, Any] = {name: getattr(a, name) for name in names}
    if DELTA in a.pattern:
        same["linear_conv_kernel_dim"] = CONV_KERNEL
    config = ModelConfig(
        tensor_model_parallel_size=sizes.tensor_model_parallel,
        pipeline_model_parallel_size=stages,
        expert_model_parallel_size=sizes.expert_model_parallel,
        sequence_parallel=sizes.sequence_parallel and sizes.tensor_model_parallel > 1,
        num_layers=len(a.pattern),
        ffn_hidden_size=a.ffn_hidden_size or None,
        normalization="RMSNorm",
        gated_linear_unit=a.is_gated,
        activation_func=GATED.get(a.activation, UNGATED),
        add_bias_linear=False,
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
            a.pattern, stages, output_cost(a, dtype, sizes), layer_costs(a, dtype, sizes)
        ),
        **_windows(a),
        no_rope_freq=_layers_without_rope(a),
        # Or a tied embedding's copy would be filled by a collective on GPUs, before it has memory.
        init_model_with_meta_device=stages > 1,
        is_hybrid_model=a.count(RECURRENT) > 0,
        mtp_pattern=a.mtp_pattern if with_mtp else "",
        mtp_num_depths=a.mtp_num_depths if with_mtp else 0,
        mtp_hidden_before_norm=a.mtp_hidden_before_norm and with_mtp,
        **same,
        **_multipliers(a, dtype),
        **_moe_options(a),
    )
    # Megatron-Core refuses to make a configuration with a single expert a token whose weight is
    # always 1, since nothing trains such a router. Served it can be.
    config.moe_router_pre_softmax = a.moe_router_pre_softmax
    # Nor experts with biases that tensor-parallel ranks share.
    config.add_bias_linear = a.add_bias_linear
    return config


def _windows(architecture: ModelArchitecture) -> dict[str, Any]:
    """Megatron's window of the keys before a token's own, and which layers of the pattern have
    it."""
    a = architecture
    if a.sliding_window is None or not any(a.attention_windows):
        return {}
    windows = iter(a.attention_windows)
    listed = [int(kind == ATTENTION and next(windows) > 0) for kind in a.pattern]
    return {"window_size": (a.sliding_window - 1, 0), "window_attn_skip_freq": listed}


def _layers_without_rope(architecture: ModelArchitecture) -> list[int] | None:
    """Megatron's list of the layers of the pattern: 1 for those without rope; None: there are
    none."""
    a = architecture
    if not any(a.no_rope_freq):
        return None
    return [a.no_rope_freq[n // a.layers_per_block] for n in range(len(a.pattern))]


def _multipliers(architecture: ModelArchitecture, dtype: torch.dtype) -> dict[str, Any]:
    """Granite's multipliers, under the names that Megatron-Core has for them.

    Attention's is the softmax scale. The residual stream's is part of the weights
    (`ModelArchitecture.residual_multiplier`). Embedding's and logits' stay numbers, because
    the matrix that both would be part of is one where embeddings are tied.
    """
    a = architecture
    options: dict[str, Any] = {}
    if a.attention_multiplier is not None:
        options["softmax_scale"] = a.attention_multiplier
    if a.embedding_multiplier == a.logits_scaling == 1:
        return options
    return {
        # Megatron-Core would take another scale of attention, if none were given.
        "softmax_scale": a.kv_channels**-0.5,
        "use_mup": True,
        "mup_embedding_mult": _embedding_multiplier(a, dtype),
        "mup_output_mult": 1 / a.logits_scaling,
        **options,
    }


def _embedding_multiplier(a: ModelArchitecture, dtype: torch.dtype) -> float:
    """Factor of embeddings; Gemma's is rounded to the weights' dtype."""
    if not a.model_type.startswith("gemma"):
        return a.embedding_multiplier
    rounded = torch.full((), a.embedding_multiplier, dtype=dtype, device="cpu")
    return float(rounded)


def _moe_options(architecture: ModelArchitecture) -> dict[str, Any]:
    a = architecture
    if not a.num_moe_experts:
        return {}
    return {
        **{name: getattr(a, name) for name in SAME_OF_EXPERTS},
        "moe_router_pre_softmax": a.moe_router_pre_softmax or a.moe_router_topk == 1,
        "moe_shared_expert_intermediate_size": a.moe_shared_expert_intermediate_size or None,
        "moe_router_load_balancing_type": "none",
    }
