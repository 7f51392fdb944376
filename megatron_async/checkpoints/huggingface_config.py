"""Hugging Face's `config.json` to `ModelArchitecture` and back.

Read by hand rather than with transformers: that takes seconds to import and is not needed to run.
Every key is read, refused by name, or known to change nothing (`settings.py`).

Rope is read in the spelling of transformers 5 and in the one before it. transformers 5 takes
`rope_scaling`, where a file has it, in place of `rope_parameters`. What that set lacks is taken
from the top of the file, and then from the family's defaults. A value that two places give
differently is refused, since one of them would be passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.files import check_number, check_size
from megatron_async.checkpoints.huggingface_defaults import DEFAULTS
from megatron_async.checkpoints.huggingface_delta import MODEL_TYPES, language_model_config
from megatron_async.checkpoints.huggingface_hybrid import (
    HYBRIDS,
    check_written,
    read_hybrid,
    refuse_family,
    write_hybrid,
)
from megatron_async.checkpoints.huggingface_mtp import read_mtp, write_mtp
from megatron_async.checkpoints.settings import (
    FULL,
    Settings,
    read_experts,
    read_heads,
    write_experts,
)
from megatron_async.models.architecture import (
    LINEAR,
    LLAMA3,
    YARN,
    ModelArchitecture,
    RopeScaling,
    yarn_factor,
)

LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
YARN_KEYS = ("factor", LLAMA3_KEYS[3], "beta_fast", "beta_slow", "truncate", "attention_factor")
DERIVED = ("mscale", "mscale_all_dim")
"""Keys of YaRN from which its `attention_factor` follows."""
KEYS = {"default": (), LLAMA3: LLAMA3_KEYS, LINEAR: LLAMA3_KEYS[:1], YARN: YARN_KEYS}
"""Kinds of rope that are served, and the keys of each beside `GENERAL`."""
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
"""Keys at the top of a file."""
GENERAL = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
FOR_IMAGES = ("mrope_section", "mrope_interleaved")
"""How positions of images are spread. A text's three positions are one, so it is the same."""
HAS_IMAGES = ("qwen3_5", "qwen3_5_moe")
ORIGINAL = "original_max_position_embeddings"


def read_rope(
    config: Settings, head_dim: int, percent: float | None = None
) -> tuple[float, RopeScaling | None, float]:
    """Base, scaling and the share of a head that rope turns (`percent`: of a family that knows one
    alone).

    Raises:
        CheckpointError: another kind of rope or share, an unknown key, two values for one.
    """
    new, old = _set(config, "rope_parameters"), _set(config, "rope_scaling")
    if not (new or old):
        new = config.default("rope_parameters") or {}
    place, rope = ("rope_scaling", old) if old else ("rope_parameters", new)
    kind = _kind(config, place, rope)
    if old and new and _kind(config, "rope_parameters", new) not in ("default", kind):
        raise CheckpointError(
            f"{config.where}: rope_scaling = {old!r} and rope_parameters = {new!r} are two kinds "
            "of rope: leave one of them out"
        )
    if kind not in KEYS:
        raise CheckpointError(
            f"{config.where}: rope_type = {kind!r} is not supported in {place} (only "
            f"{', '.join(map(repr, KEYS))})"
        )
    known = {
        *GENERAL,
        *KEYS[kind],
        *(DERIVED if kind == YARN else ()),
        *(FOR_IMAGES if config.family in HAS_IMAGES else ()),
    }
    # The other set is passed over, but what it says must not be another thing.
    for name, entries in (("rope_parameters", new), ("rope_scaling", old)):
        unknown = [key for key, value in entries.items() if value is not None and key not in known]
        if unknown:
            raise CheckpointError(
                f"{config.where}: {unknown[0]} = {entries[unknown[0]]!r} in {name} is not known to "
                f"rope of type {kind!r}: leave it out"
            )
    values = {key: _value(config, key, rope) for key in ("rope_theta", "partial_rotary_factor")}
    if kind == LINEAR:
        values["factor"] = rope.get("factor")
    if kind == LLAMA3:
        values |= {key: rope.get(key) for key in LLAMA3_KEYS[:3]}
    if kind == YARN:
        values |= {key: rope.get(key) for key in (*YARN_KEYS[0:1], *YARN_KEYS[2:], *DERIVED)}
    if kind in (LLAMA3, YARN):
        values[ORIGINAL] = _value(config, ORIGINAL, rope) or config.size("max_position_embeddings")
    for key, value in new.items() if old else ():
        if key in values and value != values[key]:
            raise CheckpointError(
                f"{config.where}: {key} = {value!r} in rope_parameters, but {values[key]!r} in "
                "rope_scaling or by default: rope_scaling counts, so write it there"
            )
    base = check_number(values["rope_theta"], "rope_theta", config.where)
    share = _share(config, values["partial_rotary_factor"], head_dim, percent)
    if kind == "default":
        return base, None, share
    if kind == LINEAR:
        factor = check_number(values["factor"], "factor", config.where)
        return base, RopeScaling(factor, kind=kind), share
    if kind == YARN:
        return base, _yarn(config, values), share
    factor, low, high = (check_number(values[key], key, config.where) for key in LLAMA3_KEYS[:3])
    if low >= high:
        raise config.error("low_freq_factor", f"must be less than high_freq_factor = {high}", low)
    original = check_size(values[ORIGINAL], ORIGINAL, config.where)
    return base, RopeScaling(factor, low, high, original), share


def _yarn(config: Settings, values: dict[str, Any]) -> RopeScaling:
    """Scaling by YaRN, with the defaults of transformers."""
    original = check_size(values[ORIGINAL], ORIGINAL, config.where)
    if values["factor"] is None:
        values["factor"] = config.size("max_position_embeddings") / original
    numbers = {"factor": values["factor"], "beta_fast": 32.0, "beta_slow": 1.0}
    keys = (*numbers, "attention_factor")
    numbers |= {key: values[key] for key in keys if values[key] is not None}
    found = {key: check_number(value, key, config.where) for key, value in numbers.items()}
    truncate = True if values["truncate"] is None else values["truncate"]
    if not isinstance(truncate, bool):
        raise config.error("truncate", "must be true or false", truncate)
    # transformers takes a 0 of one of them as if both were missing.
    given = all(values[key] for key in DERIVED)
    mscale, of_all = (
        check_number(values[key], key, config.where) if given else None for key in DERIVED
    )
    found.setdefault("attention_factor", yarn_factor(found["factor"], mscale, of_all))
    return RopeScaling(
        original_max_position_embeddings=original, kind=YARN, truncate=truncate, **found
    )


def _set(config: Settings, key: str) -> dict[str, Any]:
    """A set of values of rope; empty where there is none."""
    rope = config.raw(key)
    rope = {} if rope is None else rope
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise config.error(key, "is not supported (only one set for all layers)", rope)
    return rope


def _kind(config: Settings, place: str, rope: dict[str, Any]) -> str:
    kinds = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise CheckpointError(
            f"{config.where}: rope_type = {kinds[0]!r} and type = {kinds[1]!r} in {place} are the "
            "same setting: leave one of them out"
        )
    return str(kinds[0]) if kinds else "default"


def _value(config: Settings, key: str, rope: dict[str, Any]) -> Any:
    """A value that stands in a set of rope, or else at the top of the file."""
    if key not in rope:
        return config.get(key)
    inner, outer = rope[key], config.raw(key)
    if inner is None:
        raise config.error(f"{key} of rope", "must not be null: leave it out")
    # transformers writes a family's default share there, whatever is inside.
    if outer not in (None, inner, config.default("partial_rotary_factor")):
        raise config.error(key, f"is {inner!r} among the values of rope: leave one out", outer)
    return inner


def _share(config: Settings, value: Any, head_dim: int, percent: float | None) -> float:
    """The share of a head that rope turns: null and a missing one are all of it, or `percent`."""
    key = "partial_rotary_factor"
    share = (percent or 1.0) if value is None else check_number(value, key, config.where)
    if share > 1 or (percent is not None and share != percent):
        only = "at most 1" if percent is None else percent
        raise config.error(key, f"is not supported (only {only})", value)
    if int(head_dim * share) % 2 or int(head_dim * share) == 0:
        raise config.error(
            key, f"of head_dim = {head_dim} must be an even number of elements", share
        )
    return share


def write_rope(a: ModelArchitecture) -> dict[str, Any]:
    """Entries of a `config.json` that describe rope, in both spellings."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": a.rotary_base}
    if a.rope_scaling is not None:
        kind = a.rope_scaling.kind
        rope["rope_type"] = kind
        rope |= {key: getattr(a.rope_scaling, key) for key in KEYS[kind]}
    if a.rotary_percent != 1:
        rope["partial_rotary_factor"] = a.rotary_percent
    # Older readers (transformers 4, llama.cpp, Megatron-Bridge) look for the second.
    config: dict[str, Any] = {"rope_parameters": rope, "rope_theta": a.rotary_base}
    if a.rope_scaling is not None:
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return config


SLIDING = "sliding_attention"


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
        Family("qwen2", "Qwen2ForCausalLM", add_qkv_bias=True),
        Family("qwen3", "Qwen3ForCausalLM", qk_layernorm=True),
        Family("mimo", "MiMoForCausalLM", add_qkv_bias=True),
        Family("mixtral", "MixtralForCausalLM", has_experts=True),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", qk_layernorm=True, has_experts=True),
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
        **_windows(config, layers, family.full_every),
        **(read_experts(config, layers) if family.has_experts else {}),
        **family.own,
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
    if family.full_every:
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
    return config | write_experts(a) | write_mtp(a)


def _check_transformer(a: ModelArchitecture, family: Family) -> None:
    """Check that a transformer has nothing of hybrid models, which its family cannot say."""
    if not re.fullmatch(r"(\*[-E])+", a.pattern):
        raise CheckpointError(
            f"a {a.model_type} model with pattern = {a.pattern!r} has no Hugging Face form; "
            "convert to torch_dist instead"
        )
    plain = {f.name: f.default for f in fields(a) if f.name in BEYOND_TRANSFORMERS}
    plain |= family.own
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
    if full_every:
        kinds = [FULL if n % full_every == 0 else SLIDING for n in range(1, layers + 1)]
    else:
        full = config.whole("max_window_layers")
        kinds = [FULL if window is None or n < full else SLIDING for n in range(layers)]
    if listed is not None:
        kinds = listed
        if not isinstance(kinds, list) or any(name not in (FULL, SLIDING) for name in kinds):
            raise config.error("layer_types", f"must be a list of {FULL!r} and {SLIDING!r}", kinds)
        config.check_listed(len(kinds), layers)
    if SLIDING not in kinds:
        return {}
    if window is None:
        needed = "sliding_window" if full_every else "sliding_window and use_sliding_window"
        raise config.error("layer_types", f"needs {needed}", kinds)
    listed = tuple(int(kind == SLIDING) for kind in kinds)
    return {"sliding_window": window, "window_attn_skip_freq": None if all(listed) else listed}
