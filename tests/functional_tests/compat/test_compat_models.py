"""A model that Megatron built gives Megatron's own tokens, and stays the user's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu

from tests.support.compat_models import VOCABULARY, engine_of, gpt_model, logits_of
from tests.support.harness import drain, greedy, random_prompts

TOKENS = 12
PROMPTS = random_prompts(4, (70, 3, 25), VOCABULARY)
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
}
GPT2 = {
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "gated_linear_unit": False,
    "activation_func": F.gelu,
    "num_query_groups": 4,
}
GPT_OSS = {
    "add_bias_linear": True,
    "softmax_type": "learnable",
    "window_size": (16, 0),
    "window_attn_skip_freq": 2,
    "activation_func": quick_gelu,
    "activation_func_clamp_value": 0.5,
    "glu_linear_offset": 1.0,
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 32,
    "yarn_beta_fast": 8.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": None,
    "yarn_mscale_all_dim": None,
    "yarn_correction_range_round_to_int": False,
}
LEARNED = {"position_embedding_type": "learned_absolute"}
UNTIED = {"share_embeddings_and_output_weights": False}
SHARED = {"moe_shared_expert_intermediate_size": 40}
OWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "q/k norm": ({"qk_layernorm": True}, {}),
    "Qwen2 biases": ({"add_qkv_bias": True}, {}),
    "untied": ({}, UNTIED),
    "heads that share nothing": ({"num_query_groups": 4}, UNTIED),
    "squared ReLU": (
        {"gated_linear_unit": False, "activation_func": "squared_relu"},
        UNTIED,
    ),
    "rope base": ({}, {"rotary_base": 500000}),
    "half of each head": ({}, {"rotary_percent": 0.5}),
    "rope scaling": ({}, {"rope_scaling": True, "rotary_base": 500000}),
    "interpolation": ({}, {"seq_len_interpolation_factor": 4.0}),
    "no positions": ({}, {"position_embedding_type": "none"}),
    "output gate": ({"attention_output_gate": True, "qk_layernorm": True}, {}),
    "mup": ({"use_mup": True, "mup_base_hidden_size": 8}, {}),
    "softmax scale": ({"softmax_scale": 0.6}, {}),
    "windows": ({"window_size": (16, 0), "window_attn_skip_freq": 2}, {}),
    "biases": ({"add_bias_linear": True, "softmax_type": "off-by-one"}, UNTIED),
    "gpt-oss": (EXPERTS | GPT_OSS, UNTIED | {"position_embedding_type": "yarn"}),
    "experts": (EXPERTS, {}),
    "experts, softmax before top-k": (EXPERTS | {"moe_router_pre_softmax": True}, UNTIED),
    "experts, scores by sigmoid with a bias": (
        EXPERTS
        | {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": 1.5,
            "moe_router_pre_softmax": True,
        },
        UNTIED,
    ),
    "shared expert": (EXPERTS | SHARED, UNTIED),
    "shared expert with a gate": (EXPERTS | SHARED | {"moe_shared_expert_gate": True}, UNTIED),
    "dense first": (EXPERTS | {"moe_layer_freq": [0, 1, 1], "num_layers": 3}, UNTIED),
    "every second has experts": (EXPERTS | {"moe_layer_freq": 2, "num_layers": 3}, UNTIED),
    "Qwen2-MoE": (
        EXPERTS | SHARED | {"moe_shared_expert_gate": True, "add_qkv_bias": True},
        UNTIED,
    ),
}
"""Models in the engine's own layers: changes of the configuration, and arguments of the model."""
THEIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GPT-2": (GPT2, LEARNED),
    "GPT-2 untied": (GPT2, LEARNED | UNTIED),
    "LayerNorm alone": ({"normalization": "LayerNorm"}, UNTIED),
    "biases with half of each head turned": (GPT2, UNTIED | {"rotary_percent": 0.5}),
    "GELU with a gate": ({"activation_func": F.gelu}, UNTIED),
    "learned positions": ({}, LEARNED),
}
"""Models in Megatron's modules, but for attention and the products."""


def build(name: str, seed: int = 0) -> Any:
    changes, options = {**OWN, **THEIRS}[name]
    if changes.get("activation_func") == "squared_relu":
        from megatron.core.activations import squared_relu

        changes = {**changes, "activation_func": squared_relu}
    return gpt_model(changes, options, seed=seed)


def check_tokens(engine: Any, model: Any) -> list[list[int]]:
    """Compare tokens and log probs with Megatron's own forward; return the tokens."""
    params = greedy(TOKENS, return_log_probs=True, skip_prompt_log_probs=False)
    found = []
    for request, prompt in zip(engine.generate(PROMPTS, params), PROMPTS, strict=True):
        assert request.error is None
        tokens = [*prompt, *request.generated_tokens]
        log_probs = torch.log_softmax(logits_of(model, tokens), -1)[:-1]
        # Each the likeliest behind those before it, so all are Megatron's.
        assert request.generated_tokens == log_probs.argmax(-1)[len(prompt) - 1 :].tolist()
        expected = log_probs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        found_probs = torch.tensor([*request.prompt_log_probs, *request.generated_log_probs])
        # Log probs reach -50 here, and Megatron's own are up to 3e-4 off what float64 gives.
        torch.testing.assert_close(found_probs, expected, rtol=2e-5, atol=1e-3)
        found.append(list(request.generated_tokens))
    assert len({token for tokens in found for token in tokens}) >= 5, "the tokens say too little"
    return found


@pytest.mark.parametrize("name", [*OWN, *THEIRS])
def test_tokens_and_log_probs_are_megatrons(name: str) -> None:
    model = build(name).eval()
    before = logits_of(model, PROMPTS[0])
    state = {key: id(value) for key, value in model.named_parameters()}
    engine = engine_of(model, lookahead=0)
    is_own = type(engine.controller.inference_wrapped_model.model).__name__ == "HybridModel"
    assert is_own == (name in OWN)
    tokens = check_tokens(engine, model)
    drain(engine)
    engine.close()
    # Ahead, and from a context that was told the layers.
    engine = engine_of(model, lookahead=1, with_serving_config=True)
    requests = engine.generate(PROMPTS, greedy(TOKENS))
    assert [list(request.generated_tokens) for request in requests] == tokens
    assert torch.equal(logits_of(model, PROMPTS[0]), before)
    assert {key: id(value) for key, value in model.named_parameters()} == state
