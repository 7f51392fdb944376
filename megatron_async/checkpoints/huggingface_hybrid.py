"""Hybrid models in Hugging Face's `config.json`, read and written: Nemotron-H, Granite 4.0 H,
Bamba, Mamba2; and, in `huggingface_delta.py`, those with Gated DeltaNet.

Nemotron-H (also Nemotron Nano v2 and Nemotron 3 Nano) lists its layers one by one, either as
Megatron's pattern (`hybrid_override_pattern`) or by names (`layers_block_type`, transformers 5).
Layers of Granite and Bamba are two of the pattern: Mamba-2 or attention, and an MLP or experts.

The gated norm of Granite, Bamba and Mamba2 in transformers is over all heads; in the published
kernels (mamba-ssm) and Megatron-Core it is over each group. Mamba2 is served by the latter, since
it is what Mamba-Codestral, the one published model with more than one group, was trained with.
Granite and Bamba are read with one group alone, as all published ones have.
transformers raises time steps of Nemotron-H that are smaller than `time_step_min` to it (0.001 in
all published files); the models' own code, Megatron-Core and this package do not, so another value
is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.huggingface_delta import (
    DELTA_FIXED,
    read_delta,
    write_delta,
)
from megatron_async.checkpoints.settings import Settings, read_choice, read_heads
from megatron_async.models.architecture import ATTENTION, EXPERTS, MAMBA, MLP, ModelArchitecture
from megatron_async.models.sizes import CONV_KERNEL

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
    kind = str(config.get("model_type"))
    if kind in REFUSED:
        raise CheckpointError(
            f"{where}: model_type = {kind!r} is not supported: {REFUSED[kind]}. Supported hybrid "
            f"families: {', '.join(HYBRIDS)}"
        )


def read_hybrid(config: Settings) -> dict[str, Any]:
    """The fields of `ModelArchitecture` that a hybrid family of `HYBRIDS` has its own words for;
    positions, vocabulary and tokens are the caller's."""
    family = HYBRIDS[config.family]
    for key, supported in family.fixed.items():
        config.only(key, *supported)
    if config.knows("time_step_limit"):
        _check_time_steps(config)
    return family.read(config)


def _check_time_steps(config: Settings) -> None:
    """No step may be cut off: (0, infinity), as transformers and Megatron's kernels have it."""
    limit = config.get("time_step_limit")
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        raise config.error("time_step_limit", "must be a list of two numbers", limit)
    ends = [end.get("__float__") if isinstance(end, dict) else end for end in limit]
    if ends[0] not in (0, "0") or ends[1] not in (math.inf, "Infinity"):
        raise config.error("time_step_limit", "is not supported (only 0 and infinity)", limit)


def _nemotron(config: Settings) -> dict[str, Any]:
    pattern, listed = config.raw("hybrid_override_pattern"), config.get("layers_block_type")
    if listed is not None or not isinstance(pattern, str):
        pattern = _pattern(config, listed, "layers_block_type")
    elif set(pattern) - set(NEMOTRON_KINDS) or not pattern:
        kinds = ", ".join(map(repr, NEMOTRON_KINDS))
        raise config.error(
            "hybrid_override_pattern", f"is not supported (only layers {kinds})", pattern
        )
    epsilon = config.number("layer_norm_epsilon")
    found: dict[str, Any] = {
        "num_layers": len(pattern),
        "pattern": pattern,
        **read_heads(config),
        "ffn_hidden_size": config.size("intermediate_size"),
        "layernorm_epsilon": epsilon,
        "activation": "squared_relu",
        "position_embedding_type": "none",
        "mamba_num_heads": config.size("mamba_num_heads"),
        "mamba_head_dim": config.size("mamba_head_dim"),
        "mamba_state_dim": config.size("ssm_state_size"),
        "mamba_num_groups": _groups(config, "n_groups", "mamba_num_heads"),
        "mamba_norm_epsilon": epsilon,
    }
    experts = {
        "moe_ffn_hidden_size": config.size("moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": config.size("moe_shared_expert_intermediate_size"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.number("routed_scaling_factor"),
    }
    if EXPERTS not in pattern:
        config.pass_over("n_routed_experts", "num_experts_per_tok")
        return found
    # The score of a single expert would be divided by itself, which Megatron-Core does not.
    return found | experts | read_choice(config, "n_routed_experts", least=2)


def _granite(config: Settings) -> dict[str, Any]:
    layers = config.size("num_hidden_layers")
    listed = config.get("layer_types")
    mixers = MAMBA * layers if listed is None else _pattern(config, listed, "layer_types")
    has_experts = config.whole("num_local_experts") > 0
    shared = config.size("shared_intermediate_size")
    found = _paired(config, layers, mixers, EXPERTS if has_experts else MLP) | {
        "ffn_hidden_size": 0 if has_experts else shared,
        "position_embedding_type": (
            "rope" if config.get("position_embedding_type") == "rope" else "none"
        ),
        "embedding_multiplier": config.number("embedding_multiplier"),
        "logits_scaling": config.number("logits_scaling"),
        "residual_multiplier": config.number("residual_multiplier"),
        "attention_multiplier": config.number("attention_multiplier"),
    }
    if not has_experts:
        config.pass_over("num_experts_per_tok")
        return found
    return (
        found
        | read_choice(config, "num_local_experts")
        | {
            "moe_ffn_hidden_size": config.size("intermediate_size"),
            "moe_shared_expert_intermediate_size": shared,
        }
    )


def _bamba(config: Settings) -> dict[str, Any]:
    layers = config.size("num_hidden_layers")
    attending = set(config.integers("attn_layer_indices"))
    mixers = "".join(ATTENTION if layer in attending else MAMBA for layer in range(layers))
    found = _paired(config, layers, mixers, MLP)
    config.only("attn_rotary_emb", found["kv_channels"] // 2)
    return found | {"ffn_hidden_size": config.size("intermediate_size")}


def _paired(config: Settings, layers: int, mixers: str, ffn: str) -> dict[str, Any]:
    """What Granite and Bamba have in common: each layer a mixer and then `ffn`."""
    config.check_listed(len(mixers), layers)
    mamba_heads = config.size("mamba_n_heads")
    inner = config.size("mamba_expand") * config.size("hidden_size")
    is_auto = config.get("mamba_d_head") == "auto"
    head_dim = max(inner // mamba_heads, 1) if is_auto else config.size("mamba_d_head")
    if head_dim * mamba_heads != inner:
        raise config.error(
            "mamba_n_heads",
            f"times mamba_d_head = {head_dim} must be mamba_expand times hidden_size = {inner}",
            mamba_heads,
        )
    epsilon = config.number("rms_norm_eps")
    return {
        "num_layers": layers,
        "pattern": "".join(mixer + ffn for mixer in mixers),
        **read_heads(config),
        "layernorm_epsilon": epsilon,
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": head_dim,
        "mamba_state_dim": config.size("mamba_d_state"),
        "mamba_num_groups": 1,
        "mamba_norm_epsilon": epsilon,
    }


def _mamba2(config: Settings) -> dict[str, Any]:
    layers = config.size("num_hidden_layers")
    hidden = config.size("hidden_size")
    heads = config.size("num_heads")
    head_dim = config.size("head_dim")
    if heads * head_dim != config.size("expand") * hidden:
        raise config.error(
            "num_heads",
            f"times head_dim = {head_dim} must be expand times hidden_size = {hidden}",
            heads,
        )
    epsilon = config.number("layer_norm_epsilon")
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
        "mamba_state_dim": config.size("state_size"),
        "mamba_num_groups": _groups(config, "n_groups", "num_heads"),
        "mamba_norm_epsilon": epsilon,
    }


def _groups(config: Settings, key: str, heads_key: str) -> int:
    groups, heads = config.size(key), config.size(heads_key)
    if heads % groups:
        raise config.error(key, f"does not divide {config.name(heads_key)} = {heads}", groups)
    return groups


def _pattern(config: Settings, listed: Any, key: str) -> str:
    if not isinstance(listed, list) or not listed or set(map(str, listed)) - LAYER_NAMES.keys():
        raise config.error(key, f"must be a list of {', '.join(LAYER_NAMES)}", listed)
    return "".join(LAYER_NAMES[name] for name in listed)


NAMES_OF_KINDS = {
    MAMBA: "linear_attention",
    ATTENTION: "full_attention",
    MLP: "mlp",
    EXPERTS: "moe",
}
"""Names of the kinds of layers in transformers 5."""


def write_hybrid(a: ModelArchitecture) -> dict[str, Any]:
    """Entries of a `config.json` that only hybrid families have, for one of `HYBRIDS`."""
    return HYBRIDS[a.model_type].write(a)


def check_written(a: ModelArchitecture, read_back: ModelArchitecture) -> None:
    """Refuse an architecture of which a written configuration does not say all."""
    lost = [f.name for f in fields(a) if getattr(a, f.name) != getattr(read_back, f.name)]
    if lost:
        values = ", ".join(f"{name} = {getattr(a, name)!r}" for name in lost)
        raise CheckpointError(
            f"a {a.model_type} model with {values} has no Hugging Face form; convert to torch_dist "
            "instead"
        )


def _write_nemotron(a: ModelArchitecture) -> dict[str, Any]:
    config: dict[str, Any] = {
        # The one is read by transformers 5, the other by everybody else.
        "layers_block_type": [NAMES_OF_KINDS[kind] for kind in a.pattern],
        "hybrid_override_pattern": a.pattern,
        "layer_norm_epsilon": a.layernorm_epsilon,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": a.mamba_num_heads,
        "mamba_head_dim": a.mamba_head_dim,
        "ssm_state_size": a.mamba_state_dim,
        "n_groups": a.mamba_num_groups,
        "mamba_hidden_act": "silu",
    }
    if EXPERTS in a.pattern:
        config |= {
            "n_routed_experts": a.num_moe_experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": a.moe_router_topk,
            "moe_intermediate_size": a.moe_ffn_hidden_size,
            "moe_shared_expert_intermediate_size": a.moe_shared_expert_intermediate_size,
            "routed_scaling_factor": a.moe_router_topk_scaling_factor or 1.0,
            "norm_topk_prob": True,
        }
    return config


def _write_granite(a: ModelArchitecture) -> dict[str, Any]:
    experts = {
        "num_experts_per_tok": a.moe_router_topk,
        "intermediate_size": a.moe_ffn_hidden_size,
        "shared_intermediate_size": a.moe_shared_expert_intermediate_size,
    }
    dense = {
        "num_experts_per_tok": 0,
        "intermediate_size": a.ffn_hidden_size,
        "shared_intermediate_size": a.ffn_hidden_size,
    }
    scale = a.attention_multiplier
    return {
        "layer_types": [NAMES_OF_KINDS[kind] for kind in a.pattern[::2]],
        "num_local_experts": a.num_moe_experts,
        "position_embedding_type": "rope" if a.position_embedding_type == "rope" else None,
        "embedding_multiplier": a.embedding_multiplier,
        "logits_scaling": a.logits_scaling,
        "residual_multiplier": a.residual_multiplier,
        "attention_multiplier": a.kv_channels**-0.5 if scale is None else scale,
        **(experts if a.num_moe_experts else dense),
        **_write_paired(a),
    }


def _write_bamba(a: ModelArchitecture) -> dict[str, Any]:
    mixers = enumerate(a.pattern[::2])
    return {
        "attn_layer_indices": [layer for layer, kind in mixers if kind == ATTENTION],
        "partial_rotary_factor": 0.5,
        **_write_paired(a),
    }


def _write_paired(a: ModelArchitecture) -> dict[str, Any]:
    return {
        "mamba_n_heads": a.mamba_num_heads,
        "mamba_d_head": a.mamba_head_dim,
        "mamba_d_state": a.mamba_state_dim,
        "mamba_n_groups": a.mamba_num_groups,
        "mamba_d_conv": CONV_KERNEL,
        "mamba_expand": a.mamba.channels // a.hidden_size,
    }


def _write_mamba2(a: ModelArchitecture) -> dict[str, Any]:
    return {
        "num_heads": a.mamba_num_heads,
        "head_dim": a.mamba_head_dim,
        "state_size": a.mamba_state_dim,
        "n_groups": a.mamba_num_groups,
        "expand": a.mamba.channels // a.hidden_size,
        "conv_kernel": CONV_KERNEL,
        "layer_norm_epsilon": a.layernorm_epsilon,
        "residual_in_fp32": False,
    }


class Hybrid(NamedTuple):
    """A hybrid family: reader and writer of its own words, and the settings that change the
    computation, with the values that are supported (None always is)."""

    read: Callable[[Settings], dict[str, Any]]
    write: Callable[[ModelArchitecture], dict[str, Any]]
    fixed: dict[str, tuple[Any, ...]]


_MAMBA_LAYERS: dict[str, tuple[Any, ...]] = {
    "mamba_conv_bias": (True,),
    "mamba_proj_bias": (False,),
    "mamba_d_conv": (CONV_KERNEL,),
    "mamba_n_groups": (1,),
}
HYBRIDS = {
    "nemotron_h": Hybrid(
        _nemotron,
        _write_nemotron,
        {
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
            "time_step_min": (0.001, 0),
        },
    ),
    "granitemoehybrid": Hybrid(
        _granite,
        _write_granite,
        _MAMBA_LAYERS | {"position_embedding_type": ("nope", "none", "rope")},
    ),
    "bamba": Hybrid(
        _bamba,
        _write_bamba,
        _MAMBA_LAYERS | {"partial_rotary_factor": (0.5,), "layer_types": ()},
    ),
    "mamba2": Hybrid(
        _mamba2,
        _write_mamba2,
        {
            "use_bias": (False,),
            "use_conv_bias": (True,),
            "conv_kernel": (CONV_KERNEL,),
            "layer_types": (),
        },
    ),
    **{name: Hybrid(read_delta, write_delta, fixed) for name, fixed in DELTA_FIXED.items()},
}
"""By `ModelArchitecture.model_type`."""
