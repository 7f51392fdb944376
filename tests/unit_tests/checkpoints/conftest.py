"""Tiny models of every family, made by transformers, and the demo model read once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron_async.checkpoints import LoadedModel, load_model
from tests.unit_tests.checkpoints.hybrid_families import FAMILIES, save_hybrid


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
def hybrid_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a hybrid -> folder of a random model as transformers saves it."""
    return cache(lambda name: save_hybrid(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return load_model("smollm2", torch.float32, torch.device("cpu"))
