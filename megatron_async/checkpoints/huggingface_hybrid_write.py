"""Hybrid models in Hugging Face's `config.json`, written; `huggingface_hybrid.py` reads them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.huggingface_delta import MODEL_TYPES, write_delta
from megatron_async.models.architecture import ATTENTION, EXPERTS, MAMBA, MLP, ModelArchitecture
from megatron_async.models.layer_sizes import CONV_KERNEL

NAMES_OF_KINDS = {
    MAMBA: "linear_attention",
    ATTENTION: "full_attention",
    MLP: "mlp",
    EXPERTS: "moe",
}
"""Names of the kinds of layers in transformers 5."""


def write_hybrid(a: ModelArchitecture) -> dict[str, Any]:
    """Entries of a `config.json` that only hybrid families have, for one of `FIXED`."""
    if a.model_type in MODEL_TYPES:
        return write_delta(a)
    writers = {
        "nemotron_h": _write_nemotron,
        "granitemoehybrid": _write_granite,
        "bamba": _write_bamba,
        "mamba2": _write_mamba2,
    }
    return writers[a.model_type](a)


def check_written(a: ModelArchitecture, read_back: ModelArchitecture) -> None:
    """Check that a written configuration says all that there is to say.

    Raises:
        CheckpointError: it does not; names what is lost.
    """
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
        "mamba_expand": a.mamba.inner // a.hidden_size,
    }


def _write_mamba2(a: ModelArchitecture) -> dict[str, Any]:
    return {
        "num_heads": a.mamba_num_heads,
        "head_dim": a.mamba_head_dim,
        "state_size": a.mamba_state_dim,
        "n_groups": a.mamba_num_groups,
        "expand": a.mamba.inner // a.hidden_size,
        "conv_kernel": CONV_KERNEL,
        "layer_norm_epsilon": a.layernorm_epsilon,
        "residual_in_fp32": False,
    }
