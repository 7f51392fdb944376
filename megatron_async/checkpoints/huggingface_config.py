"""Hugging Face's `config.json` to `ModelArchitecture` and back.

Read by hand rather than with transformers: that takes seconds to import and is not needed to run.
Every key is read, refused by name, or known to change nothing (`settings.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.huggingface_defaults import DEFAULTS
from megatron_async.checkpoints.huggingface_delta import MODEL_TYPES, language_model_config
from megatron_async.checkpoints.huggingface_gemma import (
    GEMMA,
    flat_rope,
    of_gemma,
    read_gemma,
    write_gemma,
)
from megatron_async.checkpoints.huggingface_hybrid import (
    HYBRIDS,
    check_written,
    read_hybrid,
    refuse_family,
    write_hybrid,
)
from megatron_async.checkpoints.huggingface_mtp import read_mtp, write_mtp
from megatron_async.checkpoints.huggingface_rope import ROPE_KEYS, read_rope, write_rope
from megatron_async.checkpoints.settings import (
    FULL,
    SLIDING,
    Settings,
    read_experts,
    read_heads,
    write_experts,
)
from megatron_async.models.architecture import (
    ModelArchitecture,
)


@dataclass(frozen=True)
class Family:
    """What sets a model family apart; `huggingface_defaults.py` has what its files leave out."""

    model_type: str
    class_name: str
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    has_experts: bool = False
    rotary_percent: float | None = 1.0
    """Share of a head that rope turns; None: the file tells it."""
    full_every: int = 0
    """Where no list tells it, each so-many-th layer has no window; 0: the file tells it."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelArchitecture` that are the same in all of its models."""


GPT_OSS = {
    "add_bias_linear": True,
    "softmax_type": "learnable",
    "activation": "quick_gelu",
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
}
FAMILIES = {
    family.class_name: family
    for family in (
        Family("llama", "LlamaForCausalLM"),
        Family("mistral", "MistralForCausalLM"),
        Family("ministral", "MinistralForCausalLM"),
        Family("qwen2", "Qwen2ForCausalLM", add_qkv_bias=True),
        Family("qwen3", "Qwen3ForCausalLM", qk_layernorm=True),
        Family("mimo", "MiMoForCausalLM", add_qkv_bias=True),
        Family("mixtral", "MixtralForCausalLM", has_experts=True),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", qk_layernorm=True, has_experts=True),
        Family("gemma2", "Gemma2ForCausalLM", full_every=2, own=GEMMA),
        Family("gemma3_text", "Gemma3ForCausalLM", qk_layernorm=True, full_every=6, own=GEMMA),
        Family(
            "gpt_oss",
            "GptOssForCausalLM",
            add_qkv_bias=True,
            has_experts=True,
            full_every=2,
            own=GPT_OSS,
        ),
        Family("nemotron_h", "NemotronHForCausalLM"),
        Family("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
        Family("bamba", "BambaForCausalLM", rotary_percent=0.5),
        Family("mamba2", "Mamba2ForCausalLM"),
        Family("qwen3_next", "Qwen3NextForCausalLM", rotary_percent=None),
        Family("qwen3_5", "Qwen3_5ForCausalLM", rotary_percent=None),
        Family("qwen3_5_moe", "Qwen3_5MoeForCausalLM", rotary_percent=None),
    )
}
"""Supported families by Hugging Face class name."""

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu", "swish"),
}
"""Settings of all families that change the computation, and the values that are supported."""

BEYOND_TRANSFORMERS = (
    "activation",
    "add_bias_linear",
    "softmax_type",
    "activation_func_clamp_value",
    "glu_linear_offset",
    "has_post_norms",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "window_rotary_base",
    "no_rope_freq",
    "attention_output_gate",
    "layernorm_zero_centered_gamma",
    "moe_shared_expert_gate",
    "position_embedding_type",
    "rotary_percent",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor",
    "moe_shared_expert_intermediate_size",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
    "attention_multiplier",
)
"""Fields that families other than hybrids have no words for."""


def family_of(model_type: str) -> Family:
    """The family of a `ModelArchitecture.model_type`."""
    for family in FAMILIES.values():
        if family.model_type == model_type:
            return family
    supported = ", ".join(family.model_type for family in FAMILIES.values())
    raise CheckpointError(f"model_type {model_type!r} is not supported; supported: {supported}")


def read_architecture(
    config: dict[str, Any],
    where: str,
    bos_token_id: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
    names: Iterable[str] = (),
) -> ModelArchitecture:
    """The architecture that a `config.json` describes.

    Args:
        config: its content.
        where: file name for error messages.
        bos_token_id, eos_token_ids: as the caller found them (they may be in other files).
        names: of the stored tensors, as far as they are known; see `read_mtp`.

    Raises:
        CheckpointError: unsupported architecture or setting, missing or malformed value.
    """
    family = _family(config, where)
    if family.own is GEMMA:
        config = flat_rope(config, where)
    settings = Settings(config, where, family.model_type)
    for key, supported in SUPPORTED.items():
        if key == "hidden_act" and family.own is GEMMA:  # they read another one
            settings.pass_over(key)
            continue
        # MiMo's are of q, k and v alone, as Qwen2 has them without a word.
        is_fixed = key == "attention_bias" and settings.default(key)
        settings.only(key, *((True,) if is_fixed else supported))
    found = (
        read_hybrid(settings) if family.model_type in HYBRIDS else _transformer(settings, family)
    )
    found |= {
        "hidden_size": settings.size("hidden_size"),
        "vocab_size": settings.size("vocab_size"),
        "tie_word_embeddings": settings.flag("tie_word_embeddings"),
    }
    if "max_position_embeddings" not in found:
        found["max_position_embeddings"] = settings.size("max_position_embeddings")
    heads, groups = found["num_attention_heads"], found["num_query_groups"]
    if heads % groups:
        raise settings.error(
            "num_attention_heads", f"is not a multiple of num_key_value_heads = {groups}", heads
        )
    if found.get("position_embedding_type", "rope") == "rope":
        percent = family.rotary_percent
        base, scaling, share = read_rope(settings, found["kv_channels"], percent)
        found |= {"rotary_base": base, "rope_scaling": scaling, "rotary_percent": share}
    else:
        settings.pass_over(*ROPE_KEYS)
    architecture = ModelArchitecture(
        model_type=family.model_type,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        **found,
    )
    architecture = replace(architecture, **read_mtp(architecture, settings, names))
    settings.finish(architecture.layernorm_epsilon)
    return architecture


def _transformer(config: Settings, family: Family) -> dict[str, Any]:
    layers = config.size("num_hidden_layers")
    return {
        "num_layers": layers,
        **read_heads(config),
        "ffn_hidden_size": config.size("intermediate_size"),
        "layernorm_epsilon": config.number("rms_norm_eps"),
        "add_qkv_bias": family.add_qkv_bias,
        "qk_layernorm": family.qk_layernorm,
        **_windows(config, layers, _full_every(config, family)),
        **(read_experts(config, layers) if family.has_experts else {}),
        **family.own,
        **(read_gemma(config) if family.own is GEMMA else {}),
    }


def write_config(architecture: ModelArchitecture, dtype: str) -> dict[str, Any]:
    """The `config.json` of an architecture; `dtype` is the weights', for example "bfloat16".

    Raises:
        CheckpointError: no Hugging Face family has this combination of features.
    """
    a = architecture
    family = family_of(a.model_type)
    common: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": a.model_type,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.ffn_hidden_size,
        "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.num_query_groups,
        "head_dim": a.kv_channels,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_position_embeddings,
        "tie_word_embeddings": a.tie_word_embeddings,
        "bos_token_id": a.bos_token_id,
        "eos_token_id": token_id_field(a.eos_token_ids),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if a.model_type in HYBRIDS:
        rope = write_rope(a) if a.position_embedding_type == "rope" else {}
        config = common | {"rms_norm_eps": a.layernorm_epsilon} | rope | write_hybrid(a)
        where = f"a {a.model_type} model's config.json"
        config |= write_mtp(a)
        check_written(a, read_architecture(config, where, a.bos_token_id, a.eos_token_ids))
        return config
    _check_transformer(a, family)
    features = (a.add_qkv_bias, a.qk_layernorm, a.num_moe_experts > 0)
    if features != (family.add_qkv_bias, family.qk_layernorm, family.has_experts):
        raise CheckpointError(
            f"a {a.model_type} model with add_qkv_bias = {a.add_qkv_bias}, qk_layernorm = "
            f"{a.qk_layernorm} and {a.num_moe_experts} experts has no Hugging Face form; convert "
            "to torch_dist instead"
        )
    config = common | {
        "hidden_act": "silu",
        "rms_norm_eps": a.layernorm_epsilon,
        "sliding_window": a.sliding_window,
        **write_rope(a),
    }
    defaults = DEFAULTS[a.model_type]
    if defaults["attention_bias"]:
        config["attention_bias"] = True
    windows = a.attention_windows
    if "layer_types" in defaults and "use_sliding_window" not in defaults:
        config["layer_types"] = [SLIDING if window else FULL for window in windows]
    elif "use_sliding_window" in defaults:
        config["use_sliding_window"] = any(windows)
        config["max_window_layers"] = windows.count(0)
        if "layer_types" in defaults:
            config["layer_types"] = [SLIDING if window else FULL for window in windows]
        elif any(windows[: windows.count(0)]):
            raise CheckpointError(
                f"a {a.model_type} model with window_attn_skip_freq = {a.window_attn_skip_freq} "
                "has no Hugging Face form, which has full layers first; convert to torch_dist "
                "instead"
            )
    elif a.window_attn_skip_freq is not None and 0 in a.attention_windows:
        raise CheckpointError(
            f"a {a.model_type} model with window_attn_skip_freq = {a.window_attn_skip_freq} has "
            "no Hugging Face form, whose layers are alike; convert to torch_dist instead"
        )
    config |= write_experts(a) | write_mtp(a)
    return write_gemma(a, config) if family.own is GEMMA else config


def _check_transformer(a: ModelArchitecture, family: Family) -> None:
    """Check that a transformer has nothing of hybrid models, which its family cannot say."""
    if not re.fullmatch(r"(\*[-E])+", a.pattern):
        raise CheckpointError(
            f"a {a.model_type} model with pattern = {a.pattern!r} has no Hugging Face form; "
            "convert to torch_dist instead"
        )
    plain = {f.name: f.default for f in fields(a) if f.name in BEYOND_TRANSFORMERS}
    plain |= {**family.own, **(of_gemma(a) if family.own is GEMMA else {})}
    check_written(a, ModelArchitecture.from_dict(a.to_dict() | plain))


def token_id_field(ids: tuple[int, ...]) -> int | list[int] | None:
    """Token ids as Hugging Face writes them: none, one or a list."""
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)


def check_family(config: dict[str, Any], where: str) -> None:
    """Check that a `config.json` is of a family that is served, before its weights are looked
    at."""
    _family(language_model_config(config, where), where)


def _family(config: dict[str, Any], where: str) -> Family:
    names = config.get("architectures") or []
    if isinstance(names, list) and len(names) == 1 and str(names[0]) in FAMILIES:
        found = FAMILIES[str(names[0])]
        # transformers goes by the latter, so a file that contradicts itself has two meanings.
        kind, own = config.get("model_type"), MODEL_TYPES.get(found.model_type, found.model_type)
        if kind not in (None, own, found.model_type):
            raise CheckpointError(
                f"{where}: architectures = {names!r} and model_type = {kind!r:.200} are two "
                f"families: correct one of them (the former is model_type {own!r})"
            )
        return found
    if not names:
        for family in FAMILIES.values():
            own = MODEL_TYPES.get(family.model_type, family.model_type)
            if config.get("model_type") in (own, family.model_type):
                return family
    refuse_family(config, where)
    value = f"architectures = {names!r}" if names else f"model_type = {config.get('model_type')!r}"
    supported = ", ".join(sorted({family.model_type for family in FAMILIES.values()}))
    raise CheckpointError(f"{where}: {value} is not supported; families that are: {supported}")


def _full_every(config: Settings, family: Family) -> int:
    """`Family.full_every`, where a file does not tell another number."""
    pattern = "sliding_window_pattern"
    return config.size(pattern) if config.knows(pattern) else family.full_every


def _windows(config: Settings, layers: int, full_every: int = 0) -> dict[str, Any]:
    """The window, and which layers have it."""
    window = None
    if not config.knows("sliding_window"):
        return {}
    if config.get("sliding_window") is not None:
        window = config.size("sliding_window")
    if config.knows("use_sliding_window") and not config.flag("use_sliding_window"):
        window = None
    if not config.knows("layer_types"):
        return {"sliding_window": window}
    listed = config.get("layer_types")
    full = config.whole("max_window_layers") if config.knows("max_window_layers") else 0
    every = full_every or layers + 1
    kinds = [
        FULL if window is None or n <= full or n % every == 0 else SLIDING
        for n in range(1, layers + 1)
    ]
    if listed is not None:
        kinds = listed
        if not isinstance(kinds, list) or any(name not in (FULL, SLIDING) for name in kinds):
            raise config.error("layer_types", f"must be a list of {FULL!r} and {SLIDING!r}", kinds)
        config.check_listed(len(kinds), layers)
    if SLIDING not in kinds:
        return {}
    if window is None:
        has_flag = config.knows("use_sliding_window")
        needed = "sliding_window and use_sliding_window" if has_flag else "sliding_window"
        raise config.error("layer_types", f"needs {needed}", kinds)
    listed = tuple(int(kind == SLIDING) for kind in kinds)
    return {"sliding_window": window, "window_attn_skip_freq": None if all(listed) else listed}
