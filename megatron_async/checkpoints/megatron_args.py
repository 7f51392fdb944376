"""Arguments of a Megatron-LM training run, as its checkpoints hold them, to `ModelArchitecture`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.files import check_number, check_size
from megatron_async.checkpoints.huggingface_config import FAMILIES
from megatron_async.checkpoints.huggingface_defaults import NEUTRAL
from megatron_async.checkpoints.megatron_defaults import (
    IS_HARMLESS,
    MEGATRON_DEFAULTS,
    ONLY_IN_SOME,
    RENAMED,
    SIZE_DEFAULTS,
    SUPPORTED,
)
from megatron_async.checkpoints.settings import POSITIONS, is_one_of, listed, tell_unknown
from megatron_async.models.architecture import (
    ATTENTION,
    DELTA,
    EXPERTS,
    KINDS,
    MAMBA,
    YARN,
    ModelArchitecture,
    RopeScaling,
    moe_pattern,
    yarn_factor,
)
from megatron_async.models.sizes import SIZES_OF

BALANCED = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
"""Ways of `moe_router_load_balancing_type` that do nothing but add to the loss: "sinkhorn" and
"quantile_balancing" choose other experts."""

ACTIVATIONS = {"swiglu": "silu", "quick_geglu": "quick_gelu", "squared_relu": "squared_relu"}
"""Arguments of activations, and the name of each in `ModelArchitecture`."""
PLAIN: dict[str, Any] = {
    "activation": "silu",
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "add_bias_linear": False,
    "softmax_type": "vanilla",
}
"""Fields in which families of transformers differ (`Family.own`), and what most have."""
GENERIC = "megatron"
"""`model_type` of a transformer whose features no family of transformers has together."""

LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192
"""Fixed in Megatron-Core; only the factor is an argument (`rope_scaling_factor`)."""


def architecture_from_args(
    args: Mapping[str, Any], vocab_size: int, eos_token_ids: tuple[int, ...], where: str
) -> ModelArchitecture:
    """The architecture that a training run's arguments describe.

    Args:
        args: name -> value, as Megatron-LM's argument parser leaves them.
        vocab_size: rows of the stored embedding (Megatron pads it).
        eos_token_ids: from the tokenizer, if there is one.
        where: for error messages.

    Raises:
        CheckpointError: an argument is missing, or its value is not supported.
    """
    args = _Taken(args)
    for name, supported in SUPPORTED.items():
        value = args.get(name, MEGATRON_DEFAULTS.get(name, supported[0]))
        _check_value(name, value, supported, where)
    _check_spec(args, where)
    heads = _size(args, "num_attention_heads", where)
    hidden = _size(args, "hidden_size", where)
    grouped = _flag(args, "group_query_attention", where)
    layers, pattern, mtp_pattern = _layers(args, where)
    activation = _activation(args, where)
    position = args.get("position_embedding_type", "rope")
    new, old = "layernorm_zero_centered_gamma", RENAMED["layernorm_zero_centered_gamma"]
    is_centered = _flag(args, old if args.get(new) is None else new, where)
    is_gated = _flag(args, "attention_output_gate", where)
    experts = _size(args, "num_experts", where) if args.get("num_experts") else 0
    # Whatever no family of transformers has is a hybrid, even without Mamba-2, if it was one.
    plain = re.fullmatch(r"(\*[-E])+", pattern) and position in ("rope", "yarn")
    is_plain = plain and not (
        is_centered or is_gated or (experts and args.get("moe_shared_expert_intermediate_size"))
    )
    has_biases = bool(args.get("add_bias_linear", True))
    biases = _flag(args, "add_qkv_bias", where) or has_biases
    norms = _flag(args, "qk_layernorm", where)
    features = (biases, norms, experts > 0)
    own = {"activation": activation, **_units(args, activation, where)}
    own["add_bias_linear"] = has_biases
    own["softmax_type"] = args.get("softmax_type") or "vanilla"
    shared = args.get("moe_shared_expert_intermediate_size")
    if has_biases and (shared or {MAMBA, DELTA} & set(pattern)):
        raise CheckpointError(
            f"{where}: add_bias_linear = True is not supported with a shared expert, or with "
            "Mamba-2 or Gated DeltaNet layers (only False)"
        )
    families = [
        family.model_type
        for family in FAMILIES.values()
        if (family.add_qkv_bias, family.qk_layernorm, family.has_experts) == features
        and {**PLAIN, **family.own} == own
    ]
    if DELTA in pattern:
        model_type = "qwen3_next"
    elif is_plain:
        model_type = families[0] if families else GENERIC
    elif _hybrid_pattern(args):
        model_type, layers = "nemotron_h", len(pattern)
    else:
        model_type = GENERIC
    scaling = None
    if _flag(args, "use_rope_scaling", where):
        factor = _number(args, "rope_scaling_factor", 8.0, where)
        scaling = RopeScaling(factor, LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL)
    if position == "yarn":
        position, scaling = "rope", _yarn(args, where)
    percent = _number(args, "rotary_percent", 1.0, where)
    if percent > 1:
        raise CheckpointError(f"{where}: rotary_percent = {percent} must be at most 1")
    architecture = ModelArchitecture(
        model_type=model_type,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=_size(args, "num_query_groups", where) if grouped else heads,
        kv_channels=_size_or(args, "kv_channels", hidden // heads, where),
        ffn_hidden_size=_size(args, "ffn_hidden_size", where),
        vocab_size=vocab_size,
        layernorm_epsilon=check_number(
            _renamed(args, "layernorm_epsilon", 1e-5), "layernorm_epsilon", where
        ),
        rotary_base=_number(args, "rotary_base", 10000.0, where),
        rope_scaling=scaling,
        add_qkv_bias=biases,
        qk_layernorm=norms,
        attention_output_gate=is_gated,
        layernorm_zero_centered_gamma=is_centered,
        tie_word_embeddings=not _flag(args, "untie_embeddings_and_output_weights", where),
        max_position_embeddings=_size(args, "max_position_embeddings", where),
        **_windows(args, layers, where),
        eos_token_ids=eos_token_ids,
        pattern=pattern,
        **own,
        position_embedding_type=position,
        rotary_percent=percent,
        **_mtp(args, mtp_pattern, where),
        **(_experts(args, where) if experts else {}),
        **_recurrent_sizes(args, pattern, hidden, where),
    )
    args.account_for_others(model_type, where)
    return architecture


class _Taken(Mapping[str, Any]):
    """Arguments, and the names of those that somebody has asked for."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self._args = args
        self._names = set(ONLY_IN_SOME)

    def __getitem__(self, name: str) -> Any:
        self._names.add(name)
        return self._args[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._args)

    def __len__(self) -> int:
        return len(self._args)

    def account_for_others(self, family: str, where: str) -> None:
        """Refuse arguments that may change positions, or that change the computation in
        configurations of other programs, and tell once of those that nobody knows."""
        unknown = []
        for name in sorted(self._args.keys() - self._names):
            if IS_HARMLESS(name) or not self._is_set(name):
                continue
            if name in NEUTRAL:  # models of other programs have it
                _check_value(name, self._args[name], NEUTRAL[name], where)
            elif POSITIONS.search(name):
                raise CheckpointError(
                    f"{where}: {name} = {self._args[name]!r:.200} is not known, and may change "
                    "positions (only None, which is not set)"
                )
            else:
                unknown.append(name)
        if unknown:
            tell_unknown(where, family, tuple(unknown))

    def _is_set(self, name: str) -> bool:
        try:
            return self._args[name] is not None
        except CheckpointError:  # an object of a class that is not read
            return True


def _check_value(name: str, value: Any, supported: tuple[Any, ...], where: str) -> None:
    if not is_one_of(value, supported):
        raise CheckpointError(
            f"{where}: {name} = {value!r:.200} is not supported (only {listed(supported)})"
        )


def _check_spec(args: Mapping[str, Any], where: str) -> None:
    """Layers of Megatron's own are known by their other arguments, those of a user are not."""
    spec = args.get("spec") or ["local"]
    module = str(spec[0] if isinstance(spec, list | tuple) else spec)
    if module != "local" and not module.startswith("megatron."):
        raise CheckpointError(
            f"{where}: spec = {spec!r:.200} is not supported (only of Megatron's own modules): "
            "what such layers compute is not known; build the model in your own script, and serve "
            "it from there"
        )


def _size(args: Mapping[str, Any], name: str, where: str) -> int:
    return check_size(args.get(name), name, where)


def _size_or(args: Mapping[str, Any], name: str, otherwise: int, where: str) -> int:
    """A size that an absent argument, or None, leaves to others."""
    return otherwise if args.get(name) is None else _size(args, name, where)


def _flag(args: Mapping[str, Any], name: str, where: str) -> bool:
    """True or false; an absent argument and None are false."""
    value = args.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{where}: {name} = {value!r:.200} must be True or False")
    return bool(value)


def _number(args: Mapping[str, Any], name: str, default: float, where: str) -> float:
    return check_number(args.get(name, default), name, where)


def _renamed(args: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of an argument that has had another name before (`RENAMED`)."""
    value = args.get(name)
    return args.get(RENAMED[name], default) if value is None else value


def _windows(args: Mapping[str, Any], layers: int, where: str) -> dict[str, Any]:
    """Tokens that a token sees, itself among them (Megatron counts those before it), and the layers
    in which it sees no others."""
    window, skips = args.get("window_size"), args.get("window_attn_skip_freq")
    window = tuple(window) if isinstance(window, list) else window
    if window is None or window == (-1, -1):
        return {}
    if not (isinstance(window, tuple) and len(window) == 2 and window[0] > 0 and window[1] == 0):
        raise CheckpointError(
            f"{where}: window_size = {window!r} is not supported (only None, (-1, -1), or (n, 0) "
            "with n > 0)"
        )
    skips = tuple(skips) if isinstance(skips, list) else skips
    if isinstance(skips, tuple):
        is_right = len(skips) == layers and set(map(type, skips)) <= {int, bool}
    else:
        is_right = skips is None or (type(skips) is int and skips > 0)
    if not is_right:
        raise CheckpointError(
            f"{where}: window_attn_skip_freq = {skips!r:.200} must be None, a whole number of 1 or "
            f"more, or a list of 0 and 1 for the {layers} layers"
        )
    return {"sliding_window": int(window[0]) + 1, "window_attn_skip_freq": skips}


def _experts(args: Mapping[str, Any], where: str) -> dict[str, Any]:
    ffn = _size_or(args, "moe_ffn_hidden_size", _size(args, "ffn_hidden_size", where), where)
    shared = args.get("moe_shared_expert_intermediate_size") or 0
    shared = _size(args, "moe_shared_expert_intermediate_size", where) if shared else 0
    factor = args.get("moe_router_topk_scaling_factor") or None  # as Megatron-Core's router has it
    if factor is not None:
        factor = check_number(factor, "moe_router_topk_scaling_factor", where)
    balancing = args.get("moe_router_load_balancing_type") or "none"
    kinds = balancing if isinstance(balancing, list | tuple) else [balancing]
    if not all(kind in BALANCED for kind in kinds):
        raise CheckpointError(
            f"{where}: moe_router_load_balancing_type = {balancing!r} is not supported (only "
            f"{', '.join(map(repr, BALANCED))})"
        )
    return {
        "num_moe_experts": _size(args, "num_experts", where),
        "moe_router_topk": check_size(args.get("moe_router_topk", 2), "moe_router_topk", where),
        "moe_ffn_hidden_size": ffn,
        "moe_router_pre_softmax": _flag(args, "moe_router_pre_softmax", where),
        "moe_router_score_function": args.get("moe_router_score_function", "softmax"),
        "moe_router_enable_expert_bias": _flag(args, "moe_router_enable_expert_bias", where),
        "moe_router_topk_scaling_factor": factor,
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": _flag(args, "moe_shared_expert_gate", where) and shared > 0,
    }


def _activation(args: Mapping[str, Any], where: str) -> str:
    found = {name: _flag(args, name, where) for name in ACTIVATIONS}
    if sum(found.values()) != 1:
        said = ", ".join(f"{name} = {value}" for name, value in found.items())
        raise CheckpointError(f"{where}: {said} is not supported (only one of them True)")
    return next(ACTIVATIONS[name] for name, value in found.items() if value)


def _units(args: Mapping[str, Any], activation: str, where: str) -> dict[str, Any]:
    """Bounds and offset of a gated unit."""
    clamp, offset = args.get("activation_func_clamp_value"), args.get("glu_linear_offset") or 0.0
    if clamp is not None:
        clamp = check_number(clamp, "activation_func_clamp_value", where)
    if offset:
        offset = check_number(offset, "glu_linear_offset", where)
    if activation == "squared_relu" and (clamp or offset):
        raise CheckpointError(
            f"{where}: activation_func_clamp_value = {clamp} with glu_linear_offset = {offset} is "
            "not supported (only of a gate)"
        )
    return {"activation_func_clamp_value": clamp, "glu_linear_offset": float(offset)}


def _yarn(args: Mapping[str, Any], where: str) -> RopeScaling:
    """YaRN by the names that Megatron's models read of a configuration."""
    numbers = {
        name: check_number(args.get(f"yarn_{name}"), f"yarn_{name}", where)
        for name in ("rotary_scaling_factor", "beta_fast", "beta_slow")
    }
    mscale, of_all = args.get("yarn_mscale"), args.get("yarn_mscale_all_dim")
    for name, value in (("yarn_mscale", mscale), ("yarn_mscale_all_dim", of_all)):
        if value:
            check_number(value, name, where)
    factor = numbers.pop("rotary_scaling_factor")
    return RopeScaling(
        factor,
        original_max_position_embeddings=check_size(
            args.get("yarn_original_max_position_embeddings"),
            "yarn_original_max_position_embeddings",
            where,
        ),
        kind=YARN,
        truncate=_flag(args, "yarn_correction_range_round_to_int", where),
        attention_factor=yarn_factor(factor, mscale, of_all),
        **numbers,
    )


def _recurrent_sizes(
    args: Mapping[str, Any], pattern: str, hidden: int, where: str
) -> dict[str, Any]:
    fields = [sizes.FIELDS for kind, sizes in SIZES_OF.items() if kind in pattern]
    names = [name for name in chain.from_iterable(fields) if name in SIZE_DEFAULTS]
    found = {name: _size_or(args, name, SIZE_DEFAULTS[name], where) for name in names}
    if MAMBA in pattern:
        heads = 2 * hidden // found["mamba_head_dim"]
        found["mamba_num_heads"] = _size_or(args, "mamba_num_heads", heads, where)
    return found


def _mixers(args: Mapping[str, Any], layers: int, where: str) -> str:
    """Kinds of the mixers of a `GPTModel`: attention, or Gated DeltaNet in all layers but each
    n-th."""
    if args.get("experimental_attention_variant") is None:
        return ATTENTION * layers
    frequency = args.get("linear_attention_freq")
    if isinstance(frequency, int) and frequency > 0:
        frequency = [(layer + 1) % frequency for layer in range(layers)]
    if not isinstance(frequency, list) or len(frequency) != layers:
        raise CheckpointError(
            f"{where}: linear_attention_freq = {frequency!r} must be a positive integer or a list "
            f"of {layers}"
        )
    return "".join(DELTA if linear else ATTENTION for linear in frequency)


def _hybrid_pattern(args: Mapping[str, Any]) -> str:
    return args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern") or ""


def _layers(args: Mapping[str, Any], where: str) -> tuple[int, str, str]:
    """Number of layers as families count them; the pattern; the pattern of a depth of multi-token
    prediction, if there are any. A `HybridModel` counts attention and MLP apart."""
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern"):
        if not isinstance(args.get(name), str | None):
            raise CheckpointError(f"{where}: {name} = {args[name]!r:.200} must be a text")
    pattern = _hybrid_pattern(args)
    has_experts = bool(args.get("num_experts"))
    if not pattern:
        if _flag(args, "is_hybrid_model", where):
            raise CheckpointError(
                f"{where}: is_hybrid_model = True without hybrid_layer_pattern or "
                "hybrid_override_pattern is not supported"
            )
        layers = _size(args, "num_layers", where)
        dense = tuple(range(layers))
        if has_experts:
            frequency = args.get("moe_layer_freq", 1)
            if isinstance(frequency, int) and frequency > 0:
                frequency = [int(layer % frequency == 0) for layer in range(layers)]
            if not isinstance(frequency, list) or len(frequency) != layers:
                raise CheckpointError(
                    f"{where}: moe_layer_freq = {frequency!r} must be a positive integer or a list "
                    f"of {layers}"
                )
            dense = tuple(layer for layer in range(layers) if not frequency[layer])
        mixers = _mixers(args, layers, where)
        ffns = moe_pattern(layers, dense)[1::2]
        pattern = "".join(map("".join, zip(mixers, ffns, strict=True)))
        return layers, pattern, pattern[-2:]  # a depth is built as the last layer is
    # Behind "/" the depths, all alike; "|" is between pipeline stages.
    pattern, *depths = pattern.replace("|", "").split("/")
    mtp_pattern = depths[0] if depths else args.get("mtp_hybrid_override_pattern") or ""
    kinds = set(pattern + "".join(depths) + mtp_pattern)
    if not pattern or not kinds <= KINDS.keys() or (EXPERTS in kinds and not has_experts):
        whole = "/".join(part for part in (pattern, *(depths or [mtp_pattern])) if part)
        raise CheckpointError(
            f"{where}: hybrid layer pattern {whole!r} is not supported (only layers "
            f"{', '.join(map(repr, KINDS))}, and 'E' where num_experts says how many)"
        )
    is_paired = re.fullmatch(r"([*G][-E])+", pattern)
    return len(pattern) // 2 if is_paired else len(pattern), pattern, mtp_pattern


def _mtp(args: Mapping[str, Any], pattern: str, where: str) -> dict[str, Any]:
    written = (args.get("hybrid_layer_pattern") or "").count("/")
    depths = args.get("mtp_num_layers") or written
    if not depths:
        return {}
    depths = _size({"mtp_num_layers": depths}, "mtp_num_layers", where)
    if not pattern:
        raise CheckpointError(
            f"{where}: mtp_num_layers = {depths} of a hybrid model without a pattern behind '/' in "
            "hybrid_layer_pattern, or mtp_hybrid_override_pattern"
        )
    is_repeated = _flag(args, "mtp_use_repeated_layer", where)
    return {
        "mtp_pattern": pattern,
        "mtp_num_depths": 1 if is_repeated else depths,
        "mtp_use_repeated_layer": is_repeated,
    }
