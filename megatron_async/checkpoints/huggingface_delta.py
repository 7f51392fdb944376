"""Families with Gated DeltaNet in Hugging Face's `config.json`, read and written: Qwen3-Next,
Qwen3.5 and Qwen3.5-MoE.

Their layers are two of the pattern: Gated DeltaNet or attention, and an MLP or experts. All have
norms of 1 + weight, q/k norms, a gate after attention, and, with experts, one after the shared
expert; rope turns a quarter of a head.

Models with a vision tower (`...ForConditionalGeneration`) hold the language model's configuration
in `text_config` and its tensors under another prefix. The language model is served; what the
vision tower has is left in its place. Their rope has three positions for each token
(`mrope_section`), which are the same for text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.huggingface_defaults import ALIASES, DEFAULTS, NEUTRAL, REQUIRED
from megatron_async.checkpoints.settings import Settings, dense_layers, read_choice, read_heads
from megatron_async.models.architecture import ATTENTION, DELTA, EXPERTS, MLP, ModelArchitecture
from megatron_async.models.sizes import CONV_KERNEL, DeltaSizes

_FIXED: dict[str, tuple[Any, ...]] = {
    "linear_conv_kernel_dim": (CONV_KERNEL,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "use_sliding_window": (False,),
}
DELTA_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen3_next": _FIXED,
    "qwen3_5": _FIXED,
    "qwen3_5_moe": _FIXED | {"norm_topk_prob": (True,)},
}
"""Settings that change the computation, and the values that are supported (None always is)."""
LAYER_NAMES = {"linear_attention": DELTA, "full_attention": ATTENTION}
COMPOSITES = {
    "Qwen3_5ForConditionalGeneration": ("Qwen3_5ForCausalLM", "qwen3_5"),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe"),
}
"""Classes with a vision tower, and the class and the family of the language model inside."""
OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config", "compression_config")
"""Keys that count for the language model where they stand beside it."""
OF_TOWERS = ("text_config", "vision_config", "architectures", "model_type")
ROPE = ("rope_scaling", "rope_parameters", "original_max_position_embeddings")
MODEL_TYPES = {
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""`model_type` in the `config.json` of a model without a vision tower."""
LEFT_OUT = {
    "model.visual.": "the vision tower",
    "visual.": "the vision tower",
}
"""Beginnings of names of tensors that a language model does without."""
INSIDE, ALONE = "model.language_model.", "model."
"""Prefix of the language model's tensors beside a vision tower, and without one."""


def language_model_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The configuration of the language model that a model with a vision tower has; every other
    configuration as it is."""
    names = config.get("architectures") or []
    inside = COMPOSITES.get(str(names[0])) if isinstance(names, list) and len(names) == 1 else None
    if not names and "text_config" in config:
        kinds = {family: (name, family) for name, family in COMPOSITES.values()}
        inside = kinds.get(str(config.get("model_type")))
    if inside is None:
        return config
    class_name, family = inside
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"{where}: text_config = {text!r} must describe the language model")
    if config.get("model_type") not in (None, family):
        raise CheckpointError(
            f"{where}: architectures = {names!r} and model_type = {config['model_type']!r:.200} "
            f"are two families: correct one of them (the former is model_type {family!r})"
        )
    known = {*DEFAULTS[family], *REQUIRED, *ALIASES.get(family, ()), *ROPE}
    found = {**text, "architectures": [class_name]}
    for key, value in config.items():
        is_checked = key in OF_THE_WHOLE or (key in NEUTRAL and key not in known)
        if is_checked and value is not None:
            found[key] = value
        elif key in known and value is not None and text.get(key) != value:
            raise CheckpointError(
                f"{where}: {key} = {value!r} stands outside of text_config, where it is not read: "
                "write it into text_config, or leave it out"
            )
        elif key not in OF_TOWERS:
            found.setdefault(key, value)
    return found


def language_model_tensors(
    names: Iterable[str], model_type: str
) -> tuple[dict[str, str], Counter[str]]:
    """Tensors of a language model in a folder: the name in a folder of the language model alone ->
    the name that is stored; and of how many tensors each thing is made that is left out."""
    if model_type not in MODEL_TYPES:
        return {name: name for name in names}, Counter()
    found, left_out = {}, Counter[str]()
    for name in names:
        for beginning, what in LEFT_OUT.items():
            if name.startswith(beginning):
                left_out[what] += 1
                break
        else:
            is_inside = name.startswith(INSIDE)
            found[ALONE + name.removeprefix(INSIDE) if is_inside else name] = name
    return found, left_out


def read_delta(config: Settings) -> dict[str, Any]:
    """The fields of `ModelArchitecture` that these families have their own words for, as
    `huggingface_hybrid.read_hybrid` gives them."""
    layers = config.size("num_hidden_layers")
    mixers = _mixers(config, layers)
    dense = tuple(range(layers)) if config.family == "qwen3_5" else ()
    if config.family == "qwen3_next":
        dense = dense_layers(config, layers)
    pattern = "".join(
        mixer + (MLP if layer in dense else EXPERTS) for layer, mixer in enumerate(mixers)
    )
    found: dict[str, Any] = {
        "num_layers": layers,
        "pattern": pattern,
        **read_heads(config),
        "ffn_hidden_size": config.size("intermediate_size") if dense else 0,
        "layernorm_epsilon": config.number("rms_norm_eps"),
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
        "attention_output_gate": True,
        **{name: config.size(name) for name in DeltaSizes.FIELDS},
    }
    keys, values = found["linear_num_key_heads"], found["linear_num_value_heads"]
    if values % keys:
        raise config.error(
            "linear_num_value_heads", f"is not a multiple of linear_num_key_heads = {keys}", values
        )
    if config.family == "qwen3_5":
        return found
    experts = _read_experts(config)
    return found | (experts if EXPERTS in pattern else {})


def _mixers(config: Settings, layers: int) -> str:
    listed = config.get("layer_types")
    # One of so many layers has attention, the last of them.
    every = config.size("full_attention_interval")
    if listed is None:
        return "".join(DELTA if (n + 1) % every else ATTENTION for n in range(layers))
    if not isinstance(listed, list) or set(map(str, listed)) - LAYER_NAMES.keys():
        raise config.error("layer_types", f"must be a list of {', '.join(LAYER_NAMES)}", listed)
    config.check_listed(len(listed), layers)
    return "".join(LAYER_NAMES[name] for name in listed)


def _read_experts(config: Settings) -> dict[str, Any]:
    return read_choice(config, "num_experts") | {
        "moe_ffn_hidden_size": config.size("moe_intermediate_size"),
        "moe_router_pre_softmax": config.family == "qwen3_next"
        and not config.flag("norm_topk_prob"),
        "moe_shared_expert_intermediate_size": config.size("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }


def write_delta(a: ModelArchitecture) -> dict[str, Any]:
    """Entries of a `config.json` that only these families have."""
    names = {kind: name for name, kind in LAYER_NAMES.items()}
    config: dict[str, Any] = {
        "model_type": MODEL_TYPES[a.model_type],
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": [names.get(kind, kind) for kind in a.pattern[::2]],
        "partial_rotary_factor": a.rotary_percent,
        "linear_conv_kernel_dim": CONV_KERNEL,
        **{name: getattr(a, name) for name in DeltaSizes.FIELDS},
    }
    if not a.num_moe_experts:
        return config
    config |= {
        "num_experts": a.num_moe_experts,
        "num_experts_per_tok": a.moe_router_topk,
        "moe_intermediate_size": a.moe_ffn_hidden_size,
        "shared_expert_intermediate_size": a.moe_shared_expert_intermediate_size,
        "output_router_logits": False,
    }
    if a.model_type == "qwen3_next":
        config |= {
            "norm_topk_prob": not a.moe_router_pre_softmax,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [n for n, kind in enumerate(a.pattern[1::2]) if kind == MLP],
        }
    return config
