"""What transformers reads in a file of `settings_grid.py`, in the words of `ModelArchitecture`."""

import json
from typing import Any

import transformers
from settings_families import FAMILIES, config_class
from settings_grid import Variant

from megatron_async.checkpoints.huggingface_hybrid import LAYER_NAMES
from megatron_async.models.architecture import (
    ATTENTION,
    DELTA,
    EXPERTS,
    MLP,
    RopeScaling,
    yarn_factor,
)


def their_config(variant: Variant) -> Any:
    """What transformers makes of a file: the language model's configuration, or its exception."""
    if "text_config" not in variant.config:
        return config_class(variant.family)(**_content(variant))
    whole = their_whole(variant)
    whole.text_config.tie_word_embeddings = whole.tie_word_embeddings
    return whole.text_config


def their_whole(variant: Variant) -> Any:
    """The configuration of a model with a vision tower, or transformers' exception."""
    kind = FAMILIES[variant.family][0]
    return getattr(transformers, f"{kind}Config")(**_content(variant))


def _content(variant: Variant) -> dict[str, Any]:
    """The variant's config.json as transformers reads it, with numbers that JSON does not have;
    without the family's name, which a class has."""
    content = transformers.PreTrainedConfig._decode_special_floats(
        json.loads(json.dumps(variant.config))
    )
    content.pop("model_type", None)
    return dict(content)


def their_architecture(config: Any) -> dict[str, Any]:
    """Fields of `ModelArchitecture` as transformers reads them (`their_config`), and `unserved`:
    settings of its model that `ModelArchitecture` has no field for, which must not be there in a
    served file."""
    kind = config.model_type.removesuffix("_text")
    is_mamba2, has_list = kind == "mamba2", kind in ("nemotron_h", "mamba2")
    heads = config.num_heads if is_mamba2 else config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    epsilon = config.layer_norm_epsilon if has_list else config.rms_norm_eps
    found: dict[str, Any] = {
        "model_type": kind,
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_attention_heads": heads,
        "num_query_groups": heads if is_mamba2 else config.num_key_value_heads,
        "kv_channels": head_dim,
        "layernorm_epsilon": epsilon,
        "tie_word_embeddings": config.tie_word_embeddings,
        "pattern": _pattern(config, kind),
        "sliding_window": _window(config, kind),
    }
    if not is_mamba2:
        found["max_position_embeddings"] = config.max_position_embeddings
    unserved = [f"hidden_act {a}" for a in _activations(config, kind)]
    unserved += [key for key in _biases(kind) if getattr(config, key, False)]
    if kind == "nemotron_h" and config.time_step_min not in (0, 0.001):
        unserved.append("time_step_min")
    for key in ("quantization_config", "_per_layer_config", "per_layer_config"):
        if config.__dict__.get(key):
            unserved.append(key)
    if not getattr(config, "is_causal", True):
        unserved.append("is_causal")
    if EXPERTS in found["pattern"]:
        found |= _experts(config, kind)
    if "M" in found["pattern"]:
        found |= _mamba(config, kind, epsilon)
    if DELTA in found["pattern"]:
        for key in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
            found[f"linear_{key}"] = getattr(config, f"linear_{key}")
    if kind == "granitemoehybrid":
        for key in ("embedding", "residual", "attention"):
            found[f"{key}_multiplier"] = getattr(config, f"{key}_multiplier")
        found["logits_scaling"] = config.logits_scaling
    if kind not in ("nemotron_h", "mamba2") and not (
        kind == "granitemoehybrid" and config.position_embedding_type != "rope"
    ):
        found |= _rope(config, unserved)
    return found | {"unserved": unserved}


def _pattern(config: Any, kind: str) -> str:
    if kind == "mamba2":
        return "M" * config.num_hidden_layers
    listed: Any = getattr(config, "layer_types", None)
    names = LAYER_NAMES | {"sliding_attention": ATTENTION}
    if kind.startswith("qwen3_") and kind != "qwen3_moe":
        names["linear_attention"] = DELTA
    if kind == "nemotron_h":
        return "".join(names[name] for name in config.layers_block_type)
    hybrid = kind in ("granitemoehybrid", "bamba", "qwen3_next", "qwen3_5", "qwen3_5_moe")
    layers = config.num_hidden_layers
    mixers = "".join(names[name] for name in listed) if hybrid else ATTENTION * layers
    ffn = [MLP] * len(mixers)
    has_experts = kind == "granitemoehybrid" and config.num_local_experts
    if kind in ("mixtral", "qwen3_5_moe") or has_experts:
        ffn = [EXPERTS] * len(mixers)
    if kind in ("qwen3_moe", "qwen3_next"):
        sparse = [(n + 1) % config.decoder_sparse_step == 0 for n in range(len(mixers))]
        ffn = [
            EXPERTS if is_sparse and n not in config.mlp_only_layers else MLP
            for n, is_sparse in enumerate(sparse)
        ]
    return "".join(a + b for a, b in zip(mixers, ffn, strict=True))


def _window(config: Any, kind: str) -> int | None:
    if kind in ("mistral", "mixtral", "qwen3_moe"):
        return config.sliding_window
    if kind in ("qwen2", "qwen3") and "sliding_attention" in config.layer_types:
        return config.sliding_window or -1
    return None


def _activations(config: Any, kind: str) -> list[str]:
    if kind == "nemotron_h":
        expected = {"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu", "swish")}
    else:
        expected = {"hidden_act": ("silu", "swish")}
    return [getattr(config, k) for k, names in expected.items() if getattr(config, k) not in names]


def _biases(kind: str) -> tuple[str, ...]:
    return {
        "qwen2": (),
        "mistral": (),
        "mixtral": (),
        "llama": ("attention_bias", "mlp_bias"),
        "bamba": ("attention_bias", "mlp_bias", "mamba_proj_bias"),
        "granitemoehybrid": ("attention_bias", "mamba_proj_bias"),
        "nemotron_h": ("mlp_bias", "use_bias", "moe_latent_size", "residual_in_fp32"),
        "mamba2": ("use_bias",),
    }.get(kind, ("attention_bias",))


def _experts(config: Any, kind: str) -> dict[str, Any]:
    sizes = {"mixtral": "intermediate_size", "granitemoehybrid": "intermediate_size"}
    number = {"nemotron_h": "n_routed_experts", "granitemoehybrid": "num_local_experts"}.get(
        kind, "num_experts"
    )
    shared = {
        "granitemoehybrid": "shared_intermediate_size",
        "nemotron_h": "moe_shared_expert_intermediate_size",
        "qwen3_next": "shared_expert_intermediate_size",
        "qwen3_5_moe": "shared_expert_intermediate_size",
    }.get(kind)
    found = {
        "num_moe_experts": getattr(config, number),
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(config, sizes.get(kind, "moe_intermediate_size")),
        "moe_shared_expert_intermediate_size": getattr(config, shared) if shared else 0,
    }
    if kind in ("qwen3_moe", "qwen3_next"):
        found["moe_router_pre_softmax"] = not config.norm_topk_prob
    if kind == "nemotron_h":
        found["moe_router_topk_scaling_factor"] = config.routed_scaling_factor
    return found


def _mamba(config: Any, kind: str, epsilon: float) -> dict[str, Any]:
    names = {
        "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups"),
        "mamba2": ("num_heads", "head_dim", "state_size", "n_groups"),
    }.get(kind, ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups"))
    ours = ("num_heads", "head_dim", "state_dim", "num_groups")
    found = {f"mamba_{k}": getattr(config, n) for k, n in zip(ours, names, strict=True)}
    return found | {"mamba_norm_epsilon": epsilon}


def _rope(config: Any, unserved: list[str]) -> dict[str, Any]:
    config.standardize_rope_params()  # as the model does once more when it is made
    rope = config.rope_parameters
    scaling = None
    if rope["rope_type"] == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = RopeScaling(*(rope[key] for key in keys))
    elif rope["rope_type"] == "yarn":
        scales = (rope.get("mscale"), rope.get("mscale_all_dim"))
        factor = rope.get("attention_factor")
        scaling = RopeScaling(
            rope["factor"],
            original_max_position_embeddings=rope["original_max_position_embeddings"],
            kind="yarn",
            beta_fast=rope.get("beta_fast") or 32.0,
            beta_slow=rope.get("beta_slow") or 1.0,
            truncate=rope.get("truncate", True),
            attention_factor=yarn_factor(rope["factor"], *scales) if factor is None else factor,
        )
    elif rope["rope_type"] == "linear":
        scaling = RopeScaling(rope["factor"], kind="linear")
    elif rope["rope_type"] != "default":
        unserved.append(f"rope_type {rope['rope_type']}")
    return {
        "rotary_base": rope["rope_theta"],
        "rope_scaling": scaling,
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
    }
