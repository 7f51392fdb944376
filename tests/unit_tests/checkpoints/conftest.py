"""Tiny models of every family, made by transformers, and the demo model read once."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_async.checkpoints import LoadedModel, load_model
from megatron_async.checkpoints.mapping import weights
from megatron_async.checkpoints.registry import demo_file
from megatron_async.models.architecture import ModelArchitecture

os.environ.setdefault("HF_HUB_OFFLINE", "1")

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
}


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family name -> folder of a random model as transformers saves it."""
    import transformers

    @cache
    def make(name: str) -> Path:
        kind, changes = FAMILIES[name]
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(
            **{
                "hidden_size": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 96,
                "vocab_size": 128,
                "max_position_embeddings": 512,
                "initializer_range": 0.3,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
            | changes
        )
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases begin as ones and zeros: equal by chance
                parameter.data.normal_(1.0 if "norm" in parameter_name else 0.0, 0.2)
        if name.endswith("bf16"):
            model = model.to(torch.bfloat16)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return load_model("smollm2", torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def transformers_smollm2() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_file().parent, gguf_file=demo_file().name)


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
