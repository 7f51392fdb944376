"""Models with layers that see a window of keys: tokens are those of transformers, whatever the
scheduling, and of full layers where no sequence leaves the window."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.checkpoints import load_model
from tests.support.harness import CPU, Job, greedy, make_engine, random_prompts, run_at

TOKENS = 12
LENGTHS = (1, 3, 4, 5, 9, 16, 33)
FULL, SLIDING = "full_attention", "sliding_attention"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "all layers": ("Mistral", {"sliding_window": 8}),
    "beside a block's border": ("Mistral", {"sliding_window": 9}),
    "one key": ("Mistral", {"sliding_window": 1}),
    "two kinds": (
        "Qwen2",
        {
            "sliding_window": 7,
            "use_sliding_window": True,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
    ),
}


GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 6,
    "tie_word_embeddings": True,
}
MODELS |= {
    "Ministral": (
        "Ministral",
        {"head_dim": 8, "sliding_window": 6, "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    "Gemma 2": (
        "Gemma2",
        GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "Gemma 3": (
        "Gemma3",
        GEMMA
        | {
            "layer_types": [SLIDING, SLIDING, FULL],
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 50.0},
                FULL: {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
            },
        },
    ),
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Name of a model -> its folder, and transformers' model."""
    import transformers

    def make(model_name: str) -> tuple[Path, Any]:
        kind, changes = MODELS[model_name]
        torch.manual_seed(0)
        sizes = {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "vocab_size": 96,
            "max_position_embeddings": 256,
            "initializer_range": 0.3,
        }
        name = CONFIGS.get(kind, f"{kind}Config")
        config = getattr(transformers, name)(**sizes, **changes, attn_implementation="eager")
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        for key, weight in model.named_parameters():
            if "norm" in key and kind in ("Gemma2", "Gemma3"):  # zeros, from which 1 is taken away
                torch.nn.init.normal_(weight.data, std=0.5)
        folder = tmp_path_factory.mktemp("windowed")
        model.save_pretrained(folder)
        return folder, model

    return make


@torch.no_grad()
def theirs(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens, each by a pass over the whole sequence."""
    tokens = list(prompt)
    for _ in range(TOKENS):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name: str, windowed) -> None:
    folder, model = windowed(name)
    loaded = load_model(folder, torch.float32, CPU)
    prompts = random_prompts(5, LENGTHS, 96)
    expected = [theirs(model, prompt) for prompt in prompts]
    jobs = [Job(prompt, greedy(TOKENS)) for prompt in prompts]
    for lookahead, budget, block in ((0, 64, 4), (1, 7, 16), (2, 5, 4)):
        engine = make_engine(
            loaded.model,
            lookahead=lookahead,
            max_tokens=budget,
            block_size_tokens=block,
            max_requests=4,
            max_sequence_length=64,
        )
        assert run_at(engine, {0: jobs[:4], 3: jobs[4:]}) == expected, (lookahead, budget)
