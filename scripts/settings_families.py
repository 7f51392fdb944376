"""Small models of every family that is served, in transformers' words, with settings that differ
from the defaults of its classes."""

import json
from copy import deepcopy
from typing import Any

import transformers

VOCABULARY = 99
TRUNK: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "head_dim": 20,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 3000.0}}
EXPERT_SIZES = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
MIXER = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", TRUNK | ROPE),
    "mistral": ("Mistral", TRUNK | ROPE | {"sliding_window": None}),
    "qwen2": ("Qwen2", {k: v for k, v in (TRUNK | ROPE).items() if k != "head_dim"}),
    "qwen3": ("Qwen3", TRUNK | ROPE),
    "mixtral": ("Mixtral", TRUNK | ROPE | {"num_local_experts": 4, "num_experts_per_tok": 3}),
    "qwen3_moe": (
        "Qwen3Moe",
        TRUNK | ROPE | EXPERT_SIZES | {"num_experts": 4, "mlp_only_layers": [1]},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **{k: v for k, v in TRUNK.items() if k != "rms_norm_eps"},
            **EXPERT_SIZES,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "layer_norm_epsilon": 1e-3,
            "head_dim": 16,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 56,
            "routed_scaling_factor": 2.5,
            "mamba_num_heads": 16,
            "mamba_head_dim": 8,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **TRUNK,
            **ROPE,
            **MIXER,
            "layer_types": ["linear_attention", "full_attention"],
            "position_embedding_type": "rope",
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 72,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.125,
        },
    ),
    "bamba": ("Bamba", TRUNK | ROPE | MIXER | {"attn_layer_indices": [1], "head_dim": 16}),
    "mamba2": (
        "Mamba2",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 16,
            "head_dim": 8,
            "state_size": 16,
            "n_groups": 2,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **TRUNK,
            **EXPERT_SIZES,
            **LINEAR,
            "num_experts": 4,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5": ("Qwen3_5", TRUNK | LINEAR),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        TRUNK | EXPERT_SIZES | LINEAR | {"num_experts": 4, "shared_expert_intermediate_size": 56},
    ),
}
"""Family -> the beginning of its classes' names, and a small model whose settings are no
defaults."""
VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "patch_size": 4,
    "out_hidden_size": 64, "num_position_embeddings": 16,
}  # fmt: skip
COMPOSITES = ("qwen3_5", "qwen3_5_moe")
"""Families that also have a class with a vision tower."""


def plain_config(family: str) -> dict[str, Any]:
    """The content of a family's plain `config.json`: every key of its class."""
    kind, options = FAMILIES[family]
    found = config_class(family)(**deepcopy(options))  # it writes into what it is given
    content: dict[str, Any] = json.loads(found.to_json_string(use_diff=False))
    content["architectures"] = [f"{kind}ForCausalLM"]
    return content


def config_class(family: str) -> Any:
    """The class that transformers has for a family's language model."""
    kind = FAMILIES[family][0]
    return getattr(transformers, f"{kind}{'Text' if family in COMPOSITES else ''}Config")


def composite_config(family: str, plain: dict[str, Any]) -> dict[str, Any]:
    """The content of the `config.json` of a model with a vision tower, with `plain` inside."""
    kind = FAMILIES[family][0]
    return {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "model_type": family,
        "tie_word_embeddings": False,
        "text_config": plain,
        "vision_config": VISION,
    }
