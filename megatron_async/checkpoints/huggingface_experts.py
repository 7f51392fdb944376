"""Experts in Hugging Face's `config.json`, in Mixtral's spelling and in Qwen3-MoE's."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.settings import Settings
from megatron_async.models.architecture import MLP, ModelArchitecture, moe_pattern


def read_experts(config: Settings, layers: int) -> dict[str, Any]:
    """The fields of `ModelArchitecture` that describe experts.

    Args:
        config: of a family with experts.
        layers: of the model.

    Raises:
        CheckpointError: a missing or malformed value.
    """
    qwen = config.family == "qwen3_moe"
    size = "moe_intermediate_size" if qwen else "intermediate_size"
    return read_choice(config, "num_experts" if qwen else "num_local_experts") | {
        "moe_ffn_hidden_size": config.size(size),
        "moe_router_pre_softmax": qwen and not config.flag("norm_topk_prob"),
        "pattern": moe_pattern(layers, dense_layers(config, layers) if qwen else ()),
    }


def read_choice(config: Settings, name: str, least: int = 1) -> dict[str, Any]:
    """How many experts there are, and how many a token goes to.

    Args:
        config: of a family with experts.
        name: key of the number of experts.
        least: experts that a token goes to, at least.

    Raises:
        CheckpointError: a missing or malformed value, more chosen ones than there are.
    """
    experts, chosen = config.size(name), config.size("num_experts_per_tok")
    if not least <= chosen <= experts:
        has = f"{config.name(name)} = {experts}"
        problem = f"must be {least} to {has}" if least > 1 else f"is more than {has}"
        raise config.error("num_experts_per_tok", problem, chosen)
    return {"num_moe_experts": experts, "moe_router_topk": chosen}


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


def dense_layers(config: Settings, layers: int) -> tuple[int, ...]:
    """Layers without experts, of so many: those that are listed, and all but every n-th.

    Args:
        config: of a family with such keys.
        layers: of the model.

    Raises:
        CheckpointError: a malformed value.
    """
    step, listed = config.size("decoder_sparse_step"), set(config.integers("mlp_only_layers"))
    return tuple(n for n in range(layers) if n in listed or (n + 1) % step)
