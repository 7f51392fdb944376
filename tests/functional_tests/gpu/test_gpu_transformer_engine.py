"""Models that Megatron built from its TransformerEngine spec, by TransformerEngine's own modules.

Skipped where there is no GPU or no TransformerEngine. `test_compat_models_te.py` has the same
models in modules with its names, for a CPU.
"""

import os
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_async.devices import make_device
from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups
from tests.support.compat_models import LENGTH, VOCABULARY, config_of, engine_of, fill
from tests.support.harness import drain, greedy, random_prompts

pytestmark = pytest.mark.gpu

TOKENS = 12
PROMPTS = random_prompts(4, (70, 3, 25), VOCABULARY)
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_grouped_gemm": True,
}
SHARED = {"moe_shared_expert_intermediate_size": 48}
UNTIED = {"share_embeddings_and_output_weights": False}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({"qk_layernorm": True}, {}),
    "Qwen2 biases": ({"add_qkv_bias": True}, UNTIED),
    "grouped experts": (EXPERTS | SHARED, UNTIED),
    "dense first": (EXPERTS | {"moe_layer_freq": [0, 1]}, UNTIED),
    "norms that multiply by 1 + weight": ({"layernorm_zero_centered_gamma": True}, {}),
}
TOLERANCE = 0.01
"""Distance of log probs."""
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
"""TransformerEngine multiplies float32 in TF32, which has 10 bits of mantissa. cuBLAS reads this
when it is first used, so run this file in a process of its own."""


def transformer_engine_model(changes: dict[str, Any], options: dict[str, Any]) -> GPTModel:
    """A float32 model on the GPU of Megatron's TransformerEngine spec."""
    config = config_of(
        transformer_impl="transformer_engine", use_cpu_initialization=False, **changes
    )
    groups = ensure_process_groups(ParallelSizes())
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=True),
        vocab_size=VOCABULARY,
        pg_collection=groups,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        **{"share_embeddings_and_output_weights": True, **options},
    )
    fill(model)
    return model.cuda()


@torch.no_grad()
def log_probs_of(model: GPTModel, tokens: list[int]) -> torch.Tensor:
    """float32 `[tokens, vocabulary]` on the CPU, by TransformerEngine's forward."""
    ids = torch.tensor([tokens], device="cuda")
    positions = torch.arange(len(tokens), device="cuda")[None]
    logits = model(ids, positions, None, runtime_gather_output=True)[0]
    return logits.float().log_softmax(-1).cpu()


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_megatrons(name: str) -> None:
    pytest.importorskip("transformer_engine.pytorch", reason="TransformerEngine is not installed")
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    model = transformer_engine_model(*CASES[name]).eval()
    assert type(model.decoder.layers[0].self_attention.linear_proj).__name__.startswith("TE")
    before = log_probs_of(model, PROMPTS[0])
    engine = engine_of(model, lookahead=1, device=make_device("cuda"))
    params = greedy(TOKENS, return_log_probs=True, skip_prompt_log_probs=False)
    chosen = set()
    for request, prompt in zip(engine.generate(PROMPTS, params), PROMPTS, strict=True):
        assert request.error is None
        tokens = [*prompt, *request.generated_tokens]
        log_probs = log_probs_of(model, tokens)[:-1]
        taken = log_probs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        # Likeliest, or a near tie of the two arithmetics.
        best = log_probs.max(-1).values
        assert bool((best - taken)[len(prompt) - 1 :].max() < TOLERANCE)
        found = torch.tensor([*request.prompt_log_probs, *request.generated_log_probs])
        torch.testing.assert_close(found, taken, rtol=1e-3, atol=TOLERANCE)
        chosen.update(request.generated_tokens)
    assert len(chosen) >= 5, "the tokens say too little"
    drain(engine)
    engine.close()
    assert torch.equal(log_probs_of(model, PROMPTS[0]), before)
