"""What a training run wrote is served as Megatron's own forward computes it, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints import open_model
from megatron_async.checkpoints.torch_dist import TorchDistSource
from megatron_async.checkpoints.torch_dist_reader import TorchDistReader
from tests.unit_tests.checkpoints.training_checkpoints import (
    megatron_log_probs,
    parsed_args,
    save_run,
    trained_model,
)

PROMPT = [3, 17, 42, 5, 88, 61, 9, 33, 70, 2, 54, 21, 90, 7, 12, 66, 38, 81, 29, 44]
NEW_TOKENS = 6
EXPERTS = {"num_experts": 4, "add_qkv_bias": False}
BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}
QWEN2_MOE = EXPERTS | {
    "add_qkv_bias": True,
    "moe_shared_expert_intermediate_size": 40,
    "moe_shared_expert_gate": True,
}

MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "llama"),
    "tied": ({"untie_embeddings_and_output_weights": False}, "llama"),
    "rope-percent": ({"rotary_percent": 0.5}, "llama"),
    "rope-scaling": ({"use_rope_scaling": True, "rotary_base": 500000}, "llama"),
    "qwen2": ({"add_qkv_bias": True}, "qwen2"),
    "bias-and-norm": ({"add_qkv_bias": True, "qk_layernorm": True}, "megatron"),
    "experts": (EXPERTS, "mixtral"),
    "some-experts": (EXPERTS | {"moe_layer_freq": [0, 1]}, "mixtral"),
    "expert-bias": (EXPERTS | BIASED, "mixtral"),
    "shared-expert": (EXPERTS | {"moe_shared_expert_intermediate_size": 40}, "megatron"),
    "qwen2-moe": (QWEN2_MOE, "megatron"),
    "qwen2-moe-mixed": (QWEN2_MOE | {"moe_layer_freq": [1, 0]}, "megatron"),
}
"""Changed arguments, and the family that the loader finds."""
METADATA: dict[str, dict[str, Any]] = {
    "by-layer": {"non_homogeneous_layers": True},
    "stacked": {"non_homogeneous_layers": False},
    "singleton": {"singleton_local_shards": True},
}
"""Of `sharded_state_dict`: the ways in which Megatron-Core stores the same weights."""
STORED = ("llama", "shared-expert", "qwen2-moe-mixed")
"""Models that are stored in all these ways."""


def check_served(folder: Path, model: GPTModel) -> None:
    """Greedy tokens and the log probs of every token are those of Megatron's forward."""
    llm = LLM(str(folder), device="cpu", dtype="float32", buffer_size_gb=0.01)
    asks = SamplingParams(
        temperature=0.0,
        num_tokens_to_generate=NEW_TOKENS,
        return_log_probs=True,
        skip_prompt_log_probs=False,
        termination_id=-1,
    )
    (request,) = llm.generate([PROMPT], asks)
    llm.close()
    assert request.prompt_log_probs is not None
    assert request.generated_log_probs is not None
    tokens = PROMPT + request.generated_tokens
    expected = megatron_log_probs(model, tokens)[:-1]
    assert tokens[len(PROMPT) :] == expected[len(PROMPT) - 1 :].argmax(-1).tolist()
    found = torch.tensor([*request.prompt_log_probs, *request.generated_log_probs])
    chosen = expected.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(found, chosen, atol=3e-4, rtol=1e-4)


CASES = [(name, "by-layer") for name in MODELS]
CASES += [(name, kind) for name in STORED for kind in ("stacked", "singleton")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_served_as_megatron_computes(name: str, kind: str, tmp_path: Path) -> None:
    changes, family = MODELS[name]
    args = parsed_args(**changes)
    model = trained_model(args)
    save_run(model, tmp_path, args, METADATA[kind])
    assert open_model(tmp_path).architecture.model_type == family
    check_served(tmp_path, model)


def test_names_of_transformer_engine(tmp_path: Path) -> None:
    """Of Megatron's TransformerEngine spec the norm before experts is a module of its own, which
    the local spec stores under the name of a norm in `linear_fc1`. All other keys, those of
    grouped experts too, are equal (`TEGroupedMLP.sharded_state_dict`)."""
    args = parsed_args(**QWEN2_MOE)
    model = trained_model(args)
    local, other = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
    save_run(model, tmp_path, args, METADATA["by-layer"], rename=lambda k: k.replace(local, other))
    found = open_model(tmp_path)
    assert isinstance(found, TorchDistSource)
    keys = TorchDistReader(found.folder).shapes
    assert f"decoder.layers.1.{other}" in keys
    assert not any(local in key for key in keys)
    assert TorchDistReader(found.folder).has_object(
        "decoder.layers.0.self_attention.linear_qkv._extra_state/shard_0_1"
    )
    check_served(tmp_path, model)
