"""Hugging Face's `config.json` to `ModelArchitecture` and back.

Read by hand rather than with transformers: that takes seconds to import and is not needed to run.
Every key is read, refused by name, or known to change nothing (`settings.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.huggingface_delta import MODEL_TYPES, language_model_config
from megatron_async.checkpoints.huggingface_experts import read_experts, write_experts
from megatron_async.checkpoints.huggingface_hybrid import read_hybrid, refuse_family
from megatron_async.checkpoints.huggingface_hybrid_write import check_written, write_hybrid
from megatron_async.checkpoints.huggingface_mtp import read_mtp, write_mtp
from megatron_async.checkpoints.huggingface_rope import ROPE_KEYS, read_rope, write_rope
from megatron_async.checkpoints.settings import FULL, Settings
from megatron_async.models.architecture import ModelArchitecture

SLIDING = "sliding_attention"
SHARES = {"bamba": 0.5}
"""Share of a head that rope turns, where a family knows one alone but all of it."""


@dataclass(frozen=True)
class Family:
    """What sets a model family apart; `huggingface_defaults.py` has what its files leave out."""

    model_type: str
    class_name: str
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    has_experts: bool = False
    is_hybrid: bool = False
    """Described by `checkpoints/huggingface_hybrid.py`."""


FAMILIES = {
    family.class_name: family
    for family in (
        Family("llama", "LlamaForCausalLM"),
        Family("mistral", "MistralForCausalLM"),
        Family("qwen2", "Qwen2ForCausalLM", add_qkv_bias=True),
        Family("qwen3", "Qwen3ForCausalLM", qk_layernorm=True),
        Family("mimo", "MiMoForCausalLM", add_qkv_bias=True),
        Family("mixtral", "MixtralForCausalLM", has_experts=True),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", qk_layernorm=True, has_experts=True),
        Family("nemotron_h", "NemotronHForCausalLM", is_hybrid=True),
        Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", is_hybrid=True),
        Family("bamba", "BambaForCausalLM", is_hybrid=True),
        Family("mamba2", "Mamba2ForCausalLM", is_hybrid=True),
        Family("qwen3_next", "Qwen3NextForCausalLM", is_hybrid=True),
        Family("qwen3_5", "Qwen3_5ForCausalLM", is_hybrid=True),
        Family("qwen3_5_moe", "Qwen3_5MoeForCausalLM", is_hybrid=True),
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
    settings = Settings(config, where, family.model_type)
    for key, supported in SUPPORTED.items():
        # Of q, k and v, as Qwen2 has them without a word.
        is_mimo = key == "attention_bias" and family.model_type == "mimo"
        settings.only(key, *((True,) if is_mimo else supported))
    found = read_hybrid(settings) if family.is_hybrid else _transformer(settings, family)
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
        share = SHARES.get(family.model_type, None if family.model_type in MODEL_TYPES else 1.0)
        base, scaling, share = read_rope(settings, found["kv_channels"], share)
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
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    layers = config.size("num_hidden_layers")
    return {
        "num_layers": layers,
        "num_attention_heads": heads,
        "num_query_groups": config.size("num_key_value_heads", heads),
        "kv_channels": config.size("head_dim", hidden // heads),
        "ffn_hidden_size": config.size("intermediate_size"),
        "layernorm_epsilon": config.number("rms_norm_eps"),
        "add_qkv_bias": family.add_qkv_bias,
        "qk_layernorm": family.qk_layernorm,
        "sliding_window": _sliding_window(config, layers),
        **(read_experts(config, layers) if family.has_experts else {}),
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
    if family.is_hybrid:
        rope = write_rope(a) if a.position_embedding_type == "rope" else {}
        config = common | {"rms_norm_eps": a.layernorm_epsilon} | rope | write_hybrid(a)
        where = f"a {a.model_type} model's config.json"
        config |= write_mtp(a)
        check_written(a, read_architecture(config, where, a.bos_token_id, a.eos_token_ids))
        return config
    _check_transformer(a)
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
    if a.model_type == "mimo":
        config["attention_bias"] = True
    if a.model_type.startswith("qwen") or a.model_type == "mimo":
        config["use_sliding_window"] = a.sliding_window is not None
        config["max_window_layers"] = 0 if a.sliding_window is not None else a.num_layers
    return config | write_experts(a) | write_mtp(a)


def _check_transformer(a: ModelArchitecture) -> None:
    """Check that a transformer has nothing of hybrid models, which its family cannot say.

    Raises:
        CheckpointError: it has; names what.
    """
    if not re.fullmatch(r"(\*[-E])+", a.pattern):
        raise CheckpointError(
            f"a {a.model_type} model with pattern = {a.pattern!r} has no Hugging Face form; "
            "convert to torch_dist instead"
        )
    plain = {f.name: f.default for f in fields(a) if f.name in BEYOND_TRANSFORMERS}
    check_written(a, ModelArchitecture.from_dict(a.to_dict() | plain))


def token_id_field(ids: tuple[int, ...]) -> int | list[int] | None:
    """Token ids as Hugging Face writes them: none, one or a list."""
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)


def check_family(config: dict[str, Any], where: str) -> None:
    """Check that a `config.json` is of a family that is served, before its weights are looked at.

    Raises:
        CheckpointError: it is not.
    """
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


def _sliding_window(config: Settings, layers: int) -> int | None:
    kind = config.family
    if kind == "llama":
        return None
    window = None
    if config.get("sliding_window") is not None:
        window = config.size("sliding_window")
    if kind in ("mistral", "mixtral"):
        return window
    if not config.flag("use_sliding_window"):
        window = None
    if kind == "qwen3_moe":
        return window
    full, listed = config.whole("max_window_layers"), config.get("layer_types")
    kinds = [FULL if window is None or n < full else SLIDING for n in range(layers)]
    if listed is not None:
        kinds = listed
        if not isinstance(kinds, list) or any(name not in (FULL, SLIDING) for name in kinds):
            raise config.error("layer_types", f"must be a list of {FULL!r} and {SLIDING!r}", kinds)
        if len(kinds) != layers:
            raise config.error(
                "num_hidden_layers", f", but {len(kinds)} layers are listed in layer_types", layers
            )
    if SLIDING not in kinds:
        return None
    if window is None:
        raise config.error("layer_types", "needs sliding_window and use_sliding_window", kinds)
    if FULL in kinds:
        raise CheckpointError(
            f"{config.where}: a mixture of full and sliding-window layers (layer_types or "
            "max_window_layers) is not supported; set use_sliding_window to false to serve the "
            "model with full attention"
        )
    return window
