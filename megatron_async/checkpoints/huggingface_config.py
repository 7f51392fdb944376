"""Hugging Face's `config.json` to `ModelArchitecture` and back.

Read by hand rather than with transformers: that takes seconds to import and is not needed to run.
Both spellings are read: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.huggingface_delta import COMPOSITES, MODEL_TYPES
from megatron_async.checkpoints.huggingface_experts import read_experts, write_experts
from megatron_async.checkpoints.huggingface_hybrid import read_hybrid, refuse_family
from megatron_async.checkpoints.huggingface_hybrid_write import check_written, write_hybrid
from megatron_async.checkpoints.huggingface_mtp import read_mtp, write_mtp
from megatron_async.checkpoints.huggingface_rope import read_rope, write_rope
from megatron_async.checkpoints.json_files import read_number, read_size
from megatron_async.models.architecture import ModelArchitecture


@dataclass(frozen=True)
class Family:
    """What sets a model family apart, and what its configuration means where it is silent."""

    model_type: str
    class_name: str
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    default_head_dim: int | None = None
    default_max_positions: int = 32768
    default_sliding_window: int | None = None
    has_experts: bool = False
    is_hybrid: bool = False
    """Described by `checkpoints/huggingface_hybrid.py`."""


FAMILIES = {
    family.class_name: family
    for family in (
        Family("llama", "LlamaForCausalLM", default_max_positions=2048),
        Family(
            "mistral",
            "MistralForCausalLM",
            default_max_positions=131072,
            default_sliding_window=4096,
        ),
        Family("qwen2", "Qwen2ForCausalLM", add_qkv_bias=True, default_sliding_window=4096),
        Family("qwen3", "Qwen3ForCausalLM", False, True, 128, default_sliding_window=4096),
        Family("mimo", "MiMoForCausalLM", add_qkv_bias=True, default_sliding_window=4096),
        Family("mixtral", "MixtralForCausalLM", default_max_positions=131072, has_experts=True),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            qk_layernorm=True,
            default_sliding_window=4096,
            has_experts=True,
        ),
        Family("nemotron_h", "NemotronHForCausalLM", default_max_positions=4096, is_hybrid=True),
        Family(
            "granitemoehybrid",
            "GraniteMoeHybridForCausalLM",
            default_max_positions=2048,
            is_hybrid=True,
        ),
        Family("bamba", "BambaForCausalLM", default_max_positions=262144, is_hybrid=True),
        Family("mamba2", "Mamba2ForCausalLM", is_hybrid=True),
        Family("qwen3_next", "Qwen3NextForCausalLM", is_hybrid=True),
        Family("qwen3_5", "Qwen3_5ForCausalLM", is_hybrid=True),
        Family("qwen3_5_moe", "Qwen3_5MoeForCausalLM", is_hybrid=True),
    )
}
"""Supported families by Hugging Face class name."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (),
}
"""Settings that change the computation, and the values that are supported (None always is)."""

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
    found = _read(config, family, where, bos_token_id, eos_token_ids)
    return replace(found, **read_mtp(found, config, where, names))


def _read(
    config: dict[str, Any],
    family: Family,
    where: str,
    bos_token_id: int | None,
    eos_token_ids: tuple[int, ...],
) -> ModelArchitecture:
    """The architecture of the trunk, without multi-token prediction."""
    for key, supported in UNSUPPORTED.items():
        if key == "partial_rotary_factor" and family.is_hybrid:
            continue
        if key == "attention_bias" and family.model_type == "mimo":
            supported = (True,)  # of q, k and v, as Qwen2 has them without a word
        value = config.get(key)
        if value is not None and value not in supported:
            allowed = " or ".join(map(repr, supported)) or "none"
            raise CheckpointError(f"{where}: {key} = {value!r} is not supported (only {allowed})")
    if family.is_hybrid:
        return _read_hybrid(config, family, where, bos_token_id, eos_token_ids)
    heads = read_size(config, "num_attention_heads", where)
    hidden = read_size(config, "hidden_size", where)
    groups = read_size(config, "num_key_value_heads", where, heads)
    if heads % groups:
        raise CheckpointError(
            f"{where}: num_attention_heads = {heads} is not a multiple of num_key_value_heads = "
            f"{groups}"
        )
    layers = read_size(config, "num_hidden_layers", where)
    base, scaling = read_rope(config, where)
    return ModelArchitecture(
        model_type=family.model_type,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=read_size(
            config, "head_dim", where, family.default_head_dim or hidden // heads
        ),
        ffn_hidden_size=read_size(config, "intermediate_size", where),
        vocab_size=read_size(config, "vocab_size", where),
        layernorm_epsilon=read_number(config, "rms_norm_eps", where, 1e-6),
        rotary_base=base,
        rope_scaling=scaling,
        add_qkv_bias=family.add_qkv_bias,
        qk_layernorm=family.qk_layernorm,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position_embeddings=read_size(
            config, "max_position_embeddings", where, family.default_max_positions
        ),
        sliding_window=_sliding_window(config, family, layers, where),
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        **(read_experts(config, family.model_type, layers, where) if family.has_experts else {}),
    )


def _read_hybrid(
    config: dict[str, Any],
    family: Family,
    where: str,
    bos_token_id: int | None,
    eos_token_ids: tuple[int, ...],
) -> ModelArchitecture:
    found = read_hybrid(config, family.model_type, where)
    if found.get("position_embedding_type", "rope") == "rope":
        percent = found.get("rotary_percent", 1.0)
        found["rotary_base"], found["rope_scaling"] = read_rope(config, where, percent)
    if found["num_attention_heads"] % found["num_query_groups"]:
        raise CheckpointError(
            f"{where}: num_attention_heads = {found['num_attention_heads']} is not a multiple of "
            f"num_key_value_heads = {found['num_query_groups']}"
        )
    common = {
        "hidden_size": read_size(config, "hidden_size", where),
        "vocab_size": read_size(config, "vocab_size", where),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "max_position_embeddings": read_size(
            config, "max_position_embeddings", where, family.default_max_positions
        ),
    }
    return ModelArchitecture(
        model_type=family.model_type,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        **(common | found),
    )


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


def _family(config: dict[str, Any], where: str) -> Family:
    names = config.get("architectures") or []
    if len(names) == 1 and names[0] in FAMILIES:
        return FAMILIES[names[0]]
    if not names:
        for family in FAMILIES.values():
            own = MODEL_TYPES.get(family.model_type, family.model_type)
            if config.get("model_type") in (own, family.model_type):
                return family
    refuse_family(config, where)
    value = f"architectures = {names!r}" if names else f"model_type = {config.get('model_type')!r}"
    supported = ", ".join((*FAMILIES, *COMPOSITES))
    raise CheckpointError(f"{where}: {value} is not supported; supported: {supported}")


def _sliding_window(config: dict[str, Any], family: Family, layers: int, where: str) -> int | None:
    if family.model_type == "llama":
        return None
    if config.get("sliding_window", family.default_sliding_window) is None:
        return None
    window = read_size(config, "sliding_window", where, family.default_sliding_window)
    if family.model_type in ("mistral", "mixtral"):
        return window
    if not config.get("use_sliding_window", False):
        return None
    full_layers = min(config.get("max_window_layers", 28), layers)
    kinds = config.get("layer_types") or (
        ["full_attention"] * full_layers + ["sliding_attention"] * (layers - full_layers)
    )
    if "sliding_attention" not in kinds:
        return None
    if set(kinds) != {"sliding_attention"}:
        raise CheckpointError(
            f"{where}: a mixture of full and sliding-window layers (layer_types or "
            "max_window_layers) is not supported; set use_sliding_window to false to serve the "
            "model with full attention"
        )
    return window
