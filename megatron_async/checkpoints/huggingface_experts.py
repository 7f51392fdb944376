"""Experts in Hugging Face's `config.json`, in Mixtral's spelling and in Qwen3-MoE's."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.json_files import read_size
from megatron_async.models.architecture import MLP, ModelArchitecture, moe_pattern


def read_experts(
    config: dict[str, Any], model_type: str, layers: int, where: str
) -> dict[str, Any]:
    """The fields of `ModelArchitecture` that describe experts.

    Args:
        config: content of a `config.json`.
        model_type: a family with experts.
        layers: of the model.
        where: file name for error messages.

    Raises:
        CheckpointError: a missing or malformed value.
    """
    qwen = model_type == "qwen3_moe"
    # transformers 5 writes num_local_experts for both.
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    experts = read_size(config, name, where)
    chosen = read_size(config, "num_experts_per_tok", where)
    if chosen > experts:
        raise CheckpointError(
            f"{where}: num_experts_per_tok = {chosen} is more than {name} = {experts}"
        )
    size = "moe_intermediate_size" if qwen else "intermediate_size"
    return {
        "num_moe_experts": experts,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": read_size(config, size, where),
        "moe_router_pre_softmax": qwen and not config.get("norm_topk_prob", False),
        "pattern": moe_pattern(layers, dense_layers(config, layers, where) if qwen else ()),
    }


def write_experts(architecture: ModelArchitecture) -> dict[str, Any]:
    """Entries of a `config.json` that describe the experts; none for a dense model.

    Raises:
        CheckpointError: the family has no way to say it.
    """
    a = architecture
    if not a.num_moe_experts:
        return {}
    config: dict[str, Any] = {
        "num_experts_per_tok": a.moe_router_topk,
        "output_router_logits": False,
    }
    if a.model_type == "mixtral":
        if a.moe_router_pre_softmax or MLP in a.pattern:
            raise CheckpointError(
                f"a mixtral model with moe_router_pre_softmax = {a.moe_router_pre_softmax} and "
                f"pattern = {a.pattern!r} has no Hugging Face form; convert to torch_dist instead"
            )
        return config | {
            "num_local_experts": a.num_moe_experts,
            "intermediate_size": a.moe_ffn_hidden_size,
        }
    return config | {
        "num_experts": a.num_moe_experts,
        "moe_intermediate_size": a.moe_ffn_hidden_size,
        "norm_topk_prob": not a.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [n for n, kind in enumerate(a.pattern[1::2]) if kind == MLP],
    }


def dense_layers(config: dict[str, Any], layers: int, where: str) -> tuple[int, ...]:
    """Layers without experts, of so many: those that are listed, and all but every n-th.

    Args:
        config: content of a `config.json`.
        layers: of the model.
        where: file name for error messages.

    Raises:
        CheckpointError: a malformed value.
    """
    step = read_size(config, "decoder_sparse_step", where, 1)
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise CheckpointError(f"{where}: mlp_only_layers = {listed!r} must be a list of integers")
    return tuple(n for n in range(layers) if n in listed or (n + 1) % step)
