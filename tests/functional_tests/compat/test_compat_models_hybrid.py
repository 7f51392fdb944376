"""Megatron's `HybridModel`, with Megatron's own mixers, gives the same tokens in the engine."""

from typing import Any

import pytest
import torch
from megatron.core.activations import squared_relu
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.models.mamba.mamba_model import MambaModel

from tests.support.compat_hybrids import DELTA, MAMBA, hybrid_model, hybrids_on_a_cpu
from tests.support.compat_models import VOCABULARY, engine_of, logits_of
from tests.support.harness import greedy, random_prompts

TOKENS = 10
PROMPTS = random_prompts(5, (40, 3, 21), VOCABULARY)
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}
NEMOTRON = {"gated_linear_unit": False, "activation_func": squared_relu}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "attention and MLP": ("*-*-", {"options": {"position_embedding_type": "rope"}}),
    "Mamba-2": ("MM-", MAMBA),
    "Mamba-2 in one group": ("MM-", MAMBA | {"mamba_num_groups": 1}),
    "Nemotron-H": ("M-M*-", MAMBA | NEMOTRON),
    "Mamba-2 whose heads follow from the hidden size": ("M*-", MAMBA | {"mamba_num_heads": None}),
    "experts": ("M*E", MAMBA | EXPERTS),
    "Gated DeltaNet": ("G-*-", DELTA),
    "Gated DeltaNet with experts": ("GE*E", DELTA | EXPERTS | {"qk_layernorm": True}),
    "tied": ("M*-", MAMBA | {"options": {"share_embeddings_and_output_weights": True}}),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_megatrons(name: str) -> None:
    pattern, changes = CASES[name]
    kind = MambaModel if name == "Nemotron-H" else HybridModel
    model = hybrid_model(pattern, kind, **changes).eval()
    with hybrids_on_a_cpu():
        before = logits_of(model, PROMPTS[0])
    found = []
    for lookahead in (0, 1):
        # With a context that was told the layers, and one that was not.
        model.config.is_hybrid_model = bool(lookahead)
        engine = engine_of(model, lookahead=lookahead, with_serving_config=not lookahead)
        context = engine.context
        assert context.gpu_view.kv_cache.num_layers == pattern.count("*")
        assert context.model_config.hybrid_layer_pattern == pattern
        requests = engine.generate(PROMPTS, greedy(TOKENS))
        assert [request.error for request in requests] == [None] * len(PROMPTS)
        found.append([list(request.generated_tokens) for request in requests])
    assert found[0] == found[1]
    for prompt, tokens in zip(PROMPTS, found[0], strict=True):
        with hybrids_on_a_cpu():
            logits = logits_of(model, [*prompt, *tokens])
        assert tokens == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
    assert len({token for tokens in found[0] for token in tokens}) >= 5
    with hybrids_on_a_cpu():
        assert torch.equal(logits_of(model, PROMPTS[0]), before)
