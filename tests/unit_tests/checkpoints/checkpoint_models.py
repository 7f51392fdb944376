"""Families of tiny models, and how the tests of checkpoints compare weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_async.checkpoints.mapping import weights
from megatron_async.models.architecture import ModelArchitecture

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"head_dim": 24, "sliding_window": None}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3-tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "qwen3-bf16": ("Qwen3", {"head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
}


def huggingface_state(model: nn.Module, architecture: ModelArchitecture) -> dict[str, Tensor]:
    """Our model's weights under their Hugging Face names."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state: dict[str, Tensor] = {}
    for weight in weights(architecture):
        state |= weight.split(parameters.pop(weight.name))
    assert not parameters
    return state


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
