"""What the keys of a Hugging Face `config.json` mean where a file is silent, and which of them may
be passed over.

The defaults are those of transformers' configuration classes (5.17), which a test compares. A key
that a reader asks for is in no other table. Every other key stands here: with the values at which
it changes nothing, or with the reason why it never does. What stands nowhere is unknown.
"""

from __future__ import annotations

from typing import Any

REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
"""Sizes that a file must tell, though transformers' classes have some published model's."""
_SILU = {"hidden_act": "silu"}
_COMMON: dict[str, Any] = {
    **_SILU,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "attention_bias": False,
}
_HEADS = {"num_key_value_heads": None, "head_dim": None}
_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_QWEN2 = {
    **_COMMON,
    **_HEADS,
    **_WINDOW,
    "num_key_value_heads": 32,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "use_bidirectional_attention": None,
}
_MAMBA = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, float("inf")),
}
_DELTA = {
    **_COMMON,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
    "full_attention_interval": 4,
}
_DELTA_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": None}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | _HEADS | {"max_position_embeddings": 2048, "mlp_bias": False},
    "mistral": {
        **_COMMON,
        **_HEADS,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "ministral": {
        **_COMMON,
        **_HEADS,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "layer_types": None,
    },
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128},
    "mimo": _QWEN2 | {"attention_bias": True},  # whatever its files say, as in Qwen2
    "mixtral": {
        **_COMMON,
        **_HEADS,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        **_COMMON,
        **_HEADS,
        **_WINDOW,
        **_SPARSE,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    "gemma2": {
        **_COMMON,
        **_GEMMA,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {
        **_COMMON,
        **_GEMMA,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "sliding_window_pattern": 6,
    },
    "gpt_oss": {
        **_COMMON,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": None,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    "nemotron_h": {
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "layers_block_type": None,
        "layer_norm_epsilon": 1e-5,
        "attention_bias": False,
        "sliding_window": None,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_limit": (0.0, float("inf")),
        "time_step_min": 0.001,
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_proj_bias": False,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "mtp_layers_block_type": None,
        "residual_in_fp32": False,
    },
    "granitemoehybrid": {
        **_COMMON,
        **_HEADS,
        **_MAMBA,
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "position_embedding_type": None,
        "layer_types": None,
    },
    "bamba": {
        **_COMMON,
        **_HEADS,
        **_MAMBA,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "attn_layer_indices": None,
        "mlp_bias": False,
    },
    "mamba2": {
        **_SILU,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "layer_norm_epsilon": 1e-5,
        "expand": 2,
        "conv_kernel": 4,
        "n_groups": 8,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.0, float("inf")),
        "tie_word_embeddings": False,
    },
    "qwen3_next": {
        **_DELTA,
        **_DELTA_EXPERTS,
        **_SPARSE,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
    "qwen3_5": _DELTA | {"num_key_value_heads": 4},
    "qwen3_5_moe": {
        **_DELTA,
        **_DELTA_EXPERTS,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
}
"""What a missing key means, by `ModelArchitecture.model_type`. None: it follows from others."""

ALIASES: dict[str, dict[str, str]] = {
    "mixtral": {"num_experts": "num_local_experts"},
    "gpt_oss": {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "qwen3_next": {"num_local_experts": "num_experts"},
    "qwen3_5_moe": {"num_local_experts": "num_experts"},
    "granitemoehybrid": {"layers_block_type": "layer_types"},
    "nemotron_h": {
        "layer_types": "layers_block_type",
        "num_local_experts": "n_routed_experts",
        "attention_head_dim": "head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_limit": "time_step_limit",
        "mamba_dt_min": "time_step_min",
    },
}
"""Other names that a family's files have for a key -> the key."""

_GEMMA_NULLS = (
    "layer_types",
    "sliding_window",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "use_bidirectional_attention",
)
NULLABLE: dict[str, tuple[str, ...]] = {
    "llama": ("num_key_value_heads", "head_dim"),
    "mistral": ("head_dim", "sliding_window"),
    "ministral": ("num_key_value_heads", "head_dim", "sliding_window", "layer_types"),
    "qwen2": ("num_key_value_heads", "sliding_window", "layer_types"),
    "qwen3": ("num_key_value_heads", "sliding_window", "layer_types"),
    "mimo": ("num_key_value_heads", "sliding_window", "layer_types", "head_dim"),
    "mixtral": ("head_dim", "sliding_window"),
    "gemma2": _GEMMA_NULLS,
    "gemma3_text": _GEMMA_NULLS,
    "gpt_oss": ("num_key_value_heads", "head_dim", "layer_types", "sliding_window"),
    "qwen3_moe": ("sliding_window", "mlp_only_layers"),
    "nemotron_h": (
        "layers_block_type",
        "mtp_layers_block_type",
        "sliding_window",
        "moe_latent_size",
    ),
    "granitemoehybrid": ("num_key_value_heads", "layer_types", "position_embedding_type"),
    "bamba": ("num_key_value_heads", "attn_layer_indices"),
    "qwen3_next": ("mlp_only_layers", "layer_types", "partial_rotary_factor"),
    "qwen3_5": ("layer_types", "partial_rotary_factor"),
    "qwen3_5_moe": ("layer_types", "partial_rotary_factor"),
}
"""Keys of `DEFAULTS` whose null transformers computes with; it refuses every other null."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "quantization": (),
    "per_layer_config": (),
    "transformers_weights": ("model.safetensors", "model.safetensors.index.json"),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
    "attention_bias": (False,),
    "attention_in_bias": (False,),
    "attention_out_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "norm_topk_prob": (True,),
    "normalization_function": ("rmsnorm",),
    "rms_norm": (True,),
    "use_rms_norm": (True,),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "attention_chunk_size": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attn_temperature_tuning": (False,),
    "embedding_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "lm_head_multiplier": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "qk_layernorm": (False,),
    "use_qk_norm": (False,),
    "num_kv_shared_layers": (0,),
    "q_lora_rank": (),
    "kv_lora_rank": (),
    "routed_scaling_factor": (1,),
    "n_group": (1,),
    "topk_group": (1,),
    "first_k_dense_replace": (0,),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "moe_latent_size": (),
    "attn_output_gate": (False,),
    "layers_block_type": (),
    "original_max_position_embeddings": (),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "rotary_interleaved": (False,),
    "rotary_pct": (1,),
    "rotary_percent": (1,),
    "rope_ratio": (1,),
    "use_mrope": (False,),
    "use_rope": (True,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "mtp_use_dedicated_embeddings": (False,),
}
"""Keys that change the computation of some model, and the values at which they do not. With
another value they are refused, unless a family reads them."""

_NORMS_OF_HEADS: dict[str, tuple[Any, ...]] = {"qk_layernorm": (True,), "use_qk_norm": (True,)}
NEUTRAL_IN = dict.fromkeys(
    ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"), NEUTRAL | _NORMS_OF_HEADS
)
NEUTRAL_IN["gpt_oss"] = NEUTRAL | {"swiglu_limit": (7.0,)}
"""`NEUTRAL` in families where other values change nothing: published files of Qwen3-Coder say that
queries and keys have norms, which the family has anyway."""

_REASONS: dict[str, tuple[str, ...]] = {
    "only training reads it": (
        "initializer_range", "initializer_cutoff_factor", "init_method", "attention_dropout",
        "hidden_dropout", "embd_pdrop", "resid_pdrop", "dropout", "classifier_dropout",
        "output_router_logits", "router_aux_loss_coef", "router_z_loss_coef",
        "router_jitter_noise", "z_loss_coefficient", "rescale_prenorm_residual",
        "gradient_checkpointing", "time_step_min", "time_step_max", "time_step_floor",
        "time_step_rank", "time_step_scale", "time_step_init_scheme", "mamba_dt_max",
        "mamba_dt_init_floor", "id2label", "label2id", "num_labels",
        "problem_type", "finetuning_task", "task_specific_params",
    ),
    "it says how another program computes or answers, not what": (
        "use_cache", "pretraining_tp", "chunk_size", "mamba_chunk_size", "use_mamba_kernels",
        "num_logits_to_keep", "moe_shared_expert_overlap", "chunk_size_feed_forward",
        "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
        "_attn_implementation_autoset", "experts_implementation",
        "_experts_implementation_internal", "output_attentions", "output_hidden_states",
        "return_dict", "use_return_dict", "torchscript", "use_bfloat16", "is_decoder",
        "distributed_config", "tie_encoder_decoder", "pruned_heads", "cross_attention_hidden_size",
    ),
    "weights have the dtype that they are stored or loaded in": (
        "mamba_ssm_cache_dtype", "mamba_ssm_dtype", "residual_in_fp32",
    ),
    "it says where the folder comes from; no code is imported": (
        "architectures", "model_type", "_name_or_path", "name_or_path", "_commit_hash",
        "transformers_version", "auto_map", "custom_pipelines", "unsloth_version",
        "unsloth_fixed", "tokenizer_class", "is_llama_config", "transformers.js_config",
    ),
    "tokens are read where the tokenizer is": (
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
        "decoder_start_token_id", "image_token_id", "video_token_id", "vision_start_token_id",
        "vision_end_token_id",
    ),
}  # fmt: skip
HARMLESS = {key: reason for reason, keys in _REASONS.items() for key in keys}
"""Keys of any family that change nothing, and why."""
_STORED = "the shapes of the stored tensors tell it"
HARMLESS_IN: dict[str, dict[str, str]] = {
    "mistral": {"max_window_layers": "all layers have the window"},
    "qwen3_moe": {"max_window_layers": "all layers have the window"},
    "gemma3_text": {"_sliding_window_pattern": "layer_types tells it"},
    "gpt_oss": {"initial_context_length": "the values of rope tell it"},
    "nemotron_h": {
        "num_hidden_layers": "the list of layers tells it",
        "expand": "the heads tell it",
        "mamba_expand": "the heads tell it",
        "n_shared_experts": _STORED,
    },
    "granitemoehybrid": {"intermediate_size": "there are no experts"},
    "mamba2": {
        "intermediate_size": "the heads tell it",
        "num_attention_heads": "there is no attention",
        "num_key_value_heads": "there is no attention",
        "norm_before_gate": "transformers' class gates first, whatever it says",
        "max_position_embeddings": "the model has no longest sequence",
    },
    "qwen3_next": {"intermediate_size": "there is no dense MLP"},
    "qwen3_5_moe": {"intermediate_size": "there is no dense MLP"},
}
"""Keys that change nothing in one family, and why."""
