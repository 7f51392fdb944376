"""Architectures of GGUF files: what their metadata say beyond the keys that all have.

Facts are llama.cpp's: its models (`src/models/`), and what its converter (`conversion/`) writes of
a Hugging Face model. Experts of a layer stand in one tensor for each matrix. A hybrid's layers are
told by lists with a number for each layer: one without key and value heads has a state instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_async.checkpoints.family_names import GGUF, GGUF_NEMOTRON_H, FamilyNames
from megatron_async.checkpoints.gguf_metadata import Metadata
from megatron_async.checkpoints.huggingface_config import family_of
from megatron_async.models.architecture import ATTENTION, EXPERTS, MAMBA, MLP
from megatron_async.models.sizes import CONV_KERNEL

SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""


class GGUFFamily(NamedTuple):
    """An architecture.

    Attributes:
        read: the fields of `ModelArchitecture` that are its own: of the metadata, and for each
            layer the number of key and value heads, and of units of an MLP or expert.
        names: of its tensors.
        is_permuted: llama.cpp rotates neighbours (2j, 2j + 1) of a head, we rotate (j, j + dim /
            2): for such architectures its converter reorders the rows of query and key heads.
    """

    read: Callable[[Metadata, tuple[int, ...], tuple[int, ...]], dict[str, Any]]
    names: FamilyNames = GGUF
    is_permuted: bool = True


def window_of(meta: Metadata) -> int | None:
    """Tokens that a token sees; None: all."""
    key = "attention.sliding_window"
    return None if meta.get(key, 0) == 0 else meta.size(key)


def _llama(meta: Metadata, kv: tuple[int, ...], ffn: tuple[int, ...]) -> dict[str, Any]:
    """Llama, Mistral and Mixtral, which llama.cpp calls by one name."""
    if meta.get("expert_count", 0):
        return {"model_type": "mixtral", "moe_ffn_hidden_size": ffn[0], **_experts(meta)}
    return {"model_type": "mistral" if window_of(meta) else "llama"}


def _qwen(meta: Metadata, kv: tuple[int, ...], ffn: tuple[int, ...]) -> dict[str, Any]:
    family = family_of(meta.kind)
    return {
        "model_type": family.model_type,
        "add_qkv_bias": family.add_qkv_bias,
        "qk_layernorm": family.qk_layernorm,
    }


def _qwen3moe(meta: Metadata, kv: tuple[int, ...], ffn: tuple[int, ...]) -> dict[str, Any]:
    found = _experts(meta)
    return found | {
        "model_type": "qwen3_moe",
        "qk_layernorm": True,
        "moe_ffn_hidden_size": _expert_units(meta, ffn, found),
    }


def _qwen2moe(meta: Metadata, kv: tuple[int, ...], ffn: tuple[int, ...]) -> dict[str, Any]:
    """Weights of the experts are not divided by their sum; a gate is before the shared one."""
    found = _experts(meta, is_divided=False)
    shared = meta.size("expert_shared_feed_forward_length", ffn[0])
    return found | {
        "model_type": "megatron",  # no family of ours has these features together
        "add_qkv_bias": True,
        "moe_ffn_hidden_size": _expert_units(meta, ffn, found),
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": True,
    }


def _granite(meta: Metadata, kv: tuple[int, ...], ffn: tuple[int, ...]) -> dict[str, Any]:
    """Granite 3 and 4, dense or of experts, with Mamba-2 layers or without: all are models of
    Hugging Face's `granitemoehybrid`."""
    scale = meta.get("attention.scale", 0)
    found: dict[str, Any] = {
        "model_type": "granitemoehybrid",
        "position_embedding_type": "rope" if _has_rope(meta) else "none",
        "embedding_multiplier": _factor(meta, "embedding_scale"),
        "logits_scaling": _factor(meta, "logit_scale"),
        "residual_multiplier": _factor(meta, "residual_scale"),
        "attention_multiplier": meta.number("attention.scale") if scale else None,
    }
    last = MLP
    if meta.get("expert_count", 0):
        shared = meta.get("expert_shared_feed_forward_length", 0)
        shared = meta.size("expert_shared_feed_forward_length") if shared else 0
        found |= _experts(meta) | {
            "ffn_hidden_size": 0,
            "moe_ffn_hidden_size": ffn[0],
            "moe_shared_expert_intermediate_size": shared,
        }
        last = EXPERTS
    elif meta.get("expert_used_count", 0):
        raise meta.error("expert_used_count", "is more than expert_count = 0")
    found["pattern"] = "".join((ATTENTION if heads else MAMBA) + last for heads in kv)
    if not all(kv):
        found |= _mamba(meta)
        meta.only("ssm.group_count", 1)
    return found


def _nemotron_h(meta: Metadata, kv: tuple[int, ...], ffn: tuple[int, ...]) -> dict[str, Any]:
    """A layer is a mixer, or an MLP, or experts."""
    has_experts = bool(meta.get("expert_count", 0))
    pattern = ""
    for heads, units in zip(kv, ffn, strict=True):
        if heads and units:
            raise meta.error("feed_forward_length", "has units in a layer of attention")
        pattern += (EXPERTS if has_experts else MLP) if units else ATTENTION if heads else MAMBA
    found: dict[str, Any] = {
        "model_type": "nemotron_h",
        "pattern": pattern,
        "activation": "squared_relu",
        "position_embedding_type": "none",
        **_mamba(meta),
    }
    if not has_experts:
        return found
    meta.only("expert_shared_count", 1, 0)
    return found | {
        **_experts(meta, SIGMOID),
        "ffn_hidden_size": 0,
        "moe_ffn_hidden_size": meta.size("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": meta.size("expert_shared_feed_forward_length"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": _factor(meta, "expert_weights_scale"),
    }


def _experts(meta: Metadata, gating: int = SOFTMAX, is_divided: bool = True) -> dict[str, Any]:
    """How many experts there are, and how many a token goes to. `is_divided`: the weights of the
    chosen ones by their sum, whatever the file says; llama.cpp does not ask it of softmax."""
    experts, chosen = meta.size("expert_count"), meta.size("expert_used_count")
    if chosen > experts:
        raise meta.error("expert_used_count", f"is more than expert_count = {experts}")
    meta.only("expert_gating_func", gating, 0)
    meta.only("expert_weights_norm", is_divided)
    return {"num_moe_experts": experts, "moe_router_topk": chosen}


def _expert_units(meta: Metadata, ffn: tuple[int, ...], found: dict[str, Any]) -> int:
    """Units of an expert, by a key of their own or as llama.cpp guesses them."""
    default = max(ffn[0] // int(found["moe_router_topk"]), 1)
    return meta.size("expert_feed_forward_length", default)


def _mamba(meta: Metadata) -> dict[str, Any]:
    heads, inner = meta.size("ssm.time_step_rank"), meta.size("ssm.inner_size")
    groups = meta.size("ssm.group_count")
    if inner % heads or heads % groups:
        raise meta.error(
            "ssm.time_step_rank",
            f"must divide ssm.inner_size = {inner} and be a multiple of ssm.group_count = {groups}",
        )
    meta.only("ssm.conv_kernel", CONV_KERNEL)
    return {
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "mamba_state_dim": meta.size("ssm.state_size"),
        "mamba_num_groups": groups,
        "mamba_norm_epsilon": meta.number("attention.layer_norm_rms_epsilon"),
    }


def _has_rope(meta: Metadata) -> bool:
    """Whether a Granite model has rope, for which llama.cpp uses this key."""
    return bool(meta.only("rope.scaling.finetuned", True, False))


def _factor(meta: Metadata, key: str) -> float:
    """A factor, which 0 switches off."""
    return meta.number(key) if meta.get(key, 0) else 1.0


QWEN, GRANITE = GGUFFamily(_qwen, is_permuted=False), GGUFFamily(_granite)
NEMOTRON_H = GGUFFamily(_nemotron_h, GGUF_NEMOTRON_H)
GGUF_FAMILIES = {
    "llama": GGUFFamily(_llama),
    "qwen2": QWEN,
    "qwen2moe": GGUFFamily(_qwen2moe, is_permuted=False),
    "qwen3": QWEN,
    "qwen3moe": GGUFFamily(_qwen3moe, is_permuted=False),
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "granitehybrid": GRANITE,
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
}
"""By `general.architecture`."""
