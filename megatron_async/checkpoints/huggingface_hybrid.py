"""Hybrid models in Hugging Face's `config.json`, read: Nemotron-H, Granite 4.0 H, Bamba, Mamba2;
and, in `huggingface_delta.py`, those with Gated DeltaNet.

Nemotron-H (also Nemotron Nano v2 and Nemotron 3 Nano) lists its layers one by one, either as
Megatron's pattern (`hybrid_override_pattern`) or by names (`layers_block_type`, transformers 5).
Layers of Granite and Bamba are two of the pattern: Mamba-2 or attention, and an MLP or experts.

The gated norm of Granite, Bamba and Mamba2 in transformers is over all heads, Megatron's over each
group, so these are read with one group alone, which all published ones have but Mamba-Codestral.
transformers' plain code raises small time steps of Nemotron-H to `time_step_min`; its kernels,
Megatron's and ours do not.
"""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.huggingface_delta import DELTA_FIXED, read_delta
from megatron_async.checkpoints.json_files import read_number, read_size
from megatron_async.models.architecture import ATTENTION, EXPERTS, MAMBA, MLP
from megatron_async.models.layer_sizes import CONV_KERNEL

LAYER_NAMES = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
}
"""Kinds of layers by their names, those of transformers 5 and those before it."""
NEMOTRON_KINDS = MAMBA + ATTENTION + MLP + EXPERTS
"""Kinds of Megatron's layers that Nemotron-H has."""
FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "nemotron_h": {
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
        "use_bias": (False,),
        "mamba_proj_bias": (False,),
        "use_conv_bias": (True,),
        "conv_kernel": (CONV_KERNEL,),
        "n_group": (1,),
        "topk_group": (1,),
        "norm_topk_prob": (True,),
        "moe_latent_size": (),
        "residual_in_fp32": (False,),
        "sliding_window": (),
    },
    "granitemoehybrid": {
        "mamba_conv_bias": (True,),
        "mamba_proj_bias": (False,),
        "mamba_d_conv": (CONV_KERNEL,),
        "mamba_n_groups": (1,),
        "position_embedding_type": ("nope", "none", "rope"),
    },
    "bamba": {
        "mamba_conv_bias": (True,),
        "mamba_proj_bias": (False,),
        "mamba_d_conv": (CONV_KERNEL,),
        "mamba_n_groups": (1,),
        "partial_rotary_factor": (0.5,),
    },
    "mamba2": {
        "use_bias": (False,),
        "use_conv_bias": (True,),
        "conv_kernel": (CONV_KERNEL,),
        "n_groups": (1,),
    },
    **DELTA_FIXED,
}
"""Settings that change the computation, and the values that are supported (None always is)."""
DEFAULTS = {"mamba2": {"n_groups": 8}}
"""What a missing setting means, where that is not supported."""
MAMBA2_MAX_POSITIONS = 32768
"""Mamba2's configuration has no longest sequence, and neither has the model."""

REFUSED = {
    "falcon_h1": "attention and Mamba-2 run beside each other in one layer and are added, which no "
    "pattern of layers can say",
    "zamba2": "one attention block is shared by several layers and takes the embeddings besides",
    "jamba": "its recurrent layers are Mamba-1, not Mamba-2",
}
"""Hybrid families that are not served, by `model_type`, and why."""


def refuse_family(config: dict[str, Any], where: str) -> None:
    """Raise `CheckpointError` for a hybrid family that is not served."""
    kind = config.get("model_type")
    if kind in REFUSED:
        raise CheckpointError(
            f"{where}: model_type = {kind!r} is not supported: {REFUSED[kind]}. Supported hybrid "
            f"families: {', '.join(FIXED)}"
        )


def read_hybrid(config: dict[str, Any], model_type: str, where: str) -> dict[str, Any]:
    """The fields of `ModelArchitecture` that a hybrid family has its own words for; positions,
    vocabulary and tokens are the caller's.

    Args:
        config: content of a `config.json`.
        model_type: one of `FIXED`.
        where: file name for error messages.

    Raises:
        CheckpointError: a setting that is not supported, a missing or malformed value.
    """
    for key, supported in FIXED[model_type].items():
        value = config.get(key, DEFAULTS.get(model_type, {}).get(key))
        if value is not None and value not in supported:
            allowed = " or ".join(map(repr, supported)) or "none"
            raise CheckpointError(f"{where}: {key} = {value!r} is not supported (only {allowed})")
    _check_time_steps(config, where)
    if model_type in DELTA_FIXED:
        return read_delta(config, model_type, where)
    readers = {
        "nemotron_h": _nemotron,
        "granitemoehybrid": _granite,
        "bamba": _bamba,
        "mamba2": _mamba2,
    }
    return readers[model_type](config, where)


def _check_time_steps(config: dict[str, Any], where: str) -> None:
    """No step may be cut off: (0, infinity), as transformers and Megatron's kernels have it."""
    limit = config.get("time_step_limit") or (0.0, float("inf"))
    ends = [float(end["__float__"]) if isinstance(end, dict) else end for end in limit]
    if ends[0] > 0 or ends[1] != float("inf"):
        raise CheckpointError(
            f"{where}: time_step_limit = {limit!r} is not supported (only 0 and infinity)"
        )


def _nemotron(config: dict[str, Any], where: str) -> dict[str, Any]:
    pattern = config.get("hybrid_override_pattern")
    listed = config.get("layers_block_type") or config.get("layer_types")
    if listed or not isinstance(pattern, str):
        pattern = _pattern(listed, where, "layers_block_type")
    elif set(pattern) - set(NEMOTRON_KINDS) or not pattern:
        raise CheckpointError(
            f"{where}: hybrid_override_pattern = {pattern!r} is not supported (only layers "
            f"{', '.join(map(repr, NEMOTRON_KINDS))})"
        )
    heads = read_size(config, "num_attention_heads", where, 32)
    head_dim = config.get("head_dim") or config.get("attention_head_dim")
    epsilon = read_number(config, "layer_norm_epsilon", where, 1e-5)
    found: dict[str, Any] = {
        "num_layers": len(pattern),
        "pattern": pattern,
        "num_attention_heads": heads,
        "num_query_groups": read_size(config, "num_key_value_heads", where, heads),
        "kv_channels": read_size({"head_dim": head_dim}, "head_dim", where, 128),
        "ffn_hidden_size": read_size(config, "intermediate_size", where, 21504),
        "layernorm_epsilon": epsilon,
        "activation": "squared_relu",
        "position_embedding_type": "none",
        "mamba_num_heads": read_size(config, "mamba_num_heads", where, 128),
        "mamba_head_dim": read_size(config, "mamba_head_dim", where, 64),
        "mamba_state_dim": read_size(config, "ssm_state_size", where, 128),
        "mamba_num_groups": read_size(config, "n_groups", where, 8),
        "mamba_norm_epsilon": epsilon,
    }
    if EXPERTS not in pattern:
        return found
    experts = read_size(config, "n_routed_experts", where)
    chosen = read_size(config, "num_experts_per_tok", where)
    if not 1 < chosen <= experts:
        raise CheckpointError(
            f"{where}: num_experts_per_tok = {chosen} must be 2 to n_routed_experts = {experts}"
        )
    scale = read_number(config, "routed_scaling_factor", where, 1.0)
    return found | {
        "num_moe_experts": experts,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": read_size(config, "moe_intermediate_size", where),
        "moe_shared_expert_intermediate_size": read_size(
            config, "moe_shared_expert_intermediate_size", where
        ),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": scale,
    }


def _granite(config: dict[str, Any], where: str) -> dict[str, Any]:
    layers = read_size(config, "num_hidden_layers", where)
    listed = config.get("layer_types") or config.get("layers_block_type")
    mixers = _pattern(listed or ["mamba"] * layers, where, "layer_types")
    experts = config.get("num_local_experts")
    experts = 8 if experts is None else experts
    shared = read_size(config, "shared_intermediate_size", where, 1024)
    found = _paired(config, where, layers, mixers, EXPERTS if experts else MLP) | {
        "ffn_hidden_size": 0 if experts else shared,
        "layernorm_epsilon": read_number(config, "rms_norm_eps", where, 1e-6),
        "mamba_norm_epsilon": read_number(config, "rms_norm_eps", where, 1e-6),
        "position_embedding_type": (
            "rope" if config.get("position_embedding_type") == "rope" else "none"
        ),
        "embedding_multiplier": read_number(config, "embedding_multiplier", where, 1.0),
        "logits_scaling": read_number(config, "logits_scaling", where, 1.0),
        "residual_multiplier": read_number(config, "residual_multiplier", where, 1.0),
        "attention_multiplier": read_number(config, "attention_multiplier", where, 1.0),
    }
    if not experts:
        return found
    return found | {
        "num_moe_experts": read_size({"num_local_experts": experts}, "num_local_experts", where),
        "moe_router_topk": read_size(config, "num_experts_per_tok", where, 2),
        "moe_ffn_hidden_size": read_size(config, "intermediate_size", where),
        "moe_shared_expert_intermediate_size": shared,
    }


def _bamba(config: dict[str, Any], where: str) -> dict[str, Any]:
    layers = read_size(config, "num_hidden_layers", where)
    attending = config.get("attn_layer_indices") or []
    mixers = "".join(ATTENTION if layer in attending else MAMBA for layer in range(layers))
    return _paired(config, where, layers, mixers, MLP) | {
        "ffn_hidden_size": read_size(config, "intermediate_size", where),
        "layernorm_epsilon": read_number(config, "rms_norm_eps", where, 1e-5),
        "mamba_norm_epsilon": read_number(config, "rms_norm_eps", where, 1e-5),
        # transformers has it fixed.
        "rotary_percent": 0.5,
    }


def _paired(
    config: dict[str, Any], where: str, layers: int, mixers: str, ffn: str
) -> dict[str, Any]:
    """What Granite and Bamba have in common: each layer a mixer and then `ffn`."""
    if len(mixers) != layers:
        raise CheckpointError(
            f"{where}: num_hidden_layers = {layers}, but {len(mixers)} layers are listed"
        )
    hidden = read_size(config, "hidden_size", where)
    heads = read_size(config, "num_attention_heads", where)
    mamba_heads = read_size(config, "mamba_n_heads", where, 128)
    inner = read_size(config, "mamba_expand", where, 2) * hidden
    head_dim = config.get("mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = inner // mamba_heads
    if head_dim * mamba_heads != inner:
        raise CheckpointError(
            f"{where}: mamba_n_heads = {mamba_heads} times mamba_d_head = {head_dim!r} must be "
            f"mamba_expand times hidden_size = {inner}"
        )
    return {
        "num_layers": layers,
        "pattern": "".join(mixer + ffn for mixer in mixers),
        "num_attention_heads": heads,
        "num_query_groups": read_size(config, "num_key_value_heads", where, heads),
        "kv_channels": read_size(config, "head_dim", where, hidden // heads),
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": head_dim,
        "mamba_state_dim": read_size(config, "mamba_d_state", where, 256),
        "mamba_num_groups": 1,
    }


def _mamba2(config: dict[str, Any], where: str) -> dict[str, Any]:
    layers = read_size(config, "num_hidden_layers", where)
    hidden = read_size(config, "hidden_size", where)
    heads = read_size(config, "num_heads", where)
    head_dim = read_size(config, "head_dim", where)
    if heads * head_dim != read_size(config, "expand", where, 2) * hidden:
        raise CheckpointError(
            f"{where}: num_heads = {heads} times head_dim = {head_dim} must be expand times "
            f"hidden_size = {hidden}"
        )
    epsilon = read_number(config, "layer_norm_epsilon", where, 1e-5)
    return {
        "num_layers": layers,
        "pattern": MAMBA * layers,
        # There is no attention; Megatron-Core wants to divide its heads over ranks all the same.
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": head_dim,
        "ffn_hidden_size": 0,
        "layernorm_epsilon": epsilon,
        "position_embedding_type": "none",
        "max_position_embeddings": MAMBA2_MAX_POSITIONS,
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "mamba_state_dim": read_size(config, "state_size", where, 128),
        "mamba_num_groups": 1,
        "mamba_norm_epsilon": epsilon,
    }


def _pattern(listed: Any, where: str, key: str) -> str:
    if not isinstance(listed, list) or not listed or set(map(str, listed)) - LAYER_NAMES.keys():
        raise CheckpointError(
            f"{where}: {key} = {listed!r} must be a list of {', '.join(LAYER_NAMES)}"
        )
    return "".join(LAYER_NAMES[name] for name in listed)
