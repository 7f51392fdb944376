"""A user's own model gives Megatron's tokens, or is refused by the name of what is not served."""

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.fusions import fused_softmax
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import L2Norm

from megatron_async import DynamicInferenceContext, GPTInferenceWrapper, InferenceConfig
from megatron_async.errors import ConfigurationError
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid_stack import hybrid_stack_spec
from megatron_async.models.model_config import transformer_config
from megatron_async.models.parallel_state import ensure_process_groups
from tests.support.compat_models import (
    VOCABULARY,
    gpt_config,
    logits_of,
    make_gpt,
    window_mask,
)
from tests.support.harness import TINY, greedy, make_engine, make_model, random_prompts

TOKENS = 12
PROMPTS = random_prompts(4, (70, 3, 25), VOCABULARY)
YARN = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 64,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.5,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
SERVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "base": ({}, {"rotary_base": 500000}),
    "half of each head": ({}, {"rotary_percent": 0.5}),
    "a share that is rounded up": ({}, {"rotary_percent": 0.6}),
    "scaling": ({}, {"rope_scaling": True, "rotary_base": 500000}),
    "scaling by 32, half": (
        {},
        {"rope_scaling": True, "rope_scaling_factor": 32.0, "rotary_percent": 0.5},
    ),
    "interpolation": ({}, {"seq_len_interpolation_factor": 4.0}),
    "learned positions": ({}, {"position_embedding_type": "learned_absolute"}),
    "no positions": ({}, {"position_embedding_type": "none"}),
    "q/k norm": ({"qk_layernorm": True}, {"rotary_percent": 0.25}),
    "softmax scale": ({"softmax_scale": 0.6}, {}),
    "output gate": ({"attention_output_gate": True, "qk_layernorm": True}, {}),
    "layer scaling": ({"apply_query_key_layer_scaling": True}, {}),
    "tied": ({}, {"share_embeddings_and_output_weights": True, "parallel_output": False}),
    "LayerNorm, biases, GELU": (
        {
            "normalization": "LayerNorm",
            "add_bias_linear": True,
            "gated_linear_unit": False,
            "activation_func": F.gelu,
        },
        {"position_embedding_type": "learned_absolute"},
    ),
    "mup": ({"use_mup": True, "mup_base_hidden_size": 8}, {}),
    "layers without rope": ({"no_rope_freq": [0, 1]}, {}),
    "windows": ({"window_size": (16, 0), "window_attn_skip_freq": 2}, {}),
    "YaRN": (YARN, {"position_embedding_type": "yarn", "rotary_base": 500000}),
    "learned sinks": ({"softmax_type": "learnable"}, {}),
    "sinks of zero": ({"softmax_type": "off-by-one"}, {}),
    "bounded quick GELU, biases": (
        {
            "add_bias_linear": True,
            "activation_func": quick_gelu,
            "activation_func_clamp_value": 0.5,
            "glu_linear_offset": 1.0,
        },
        {},
    ),
}
"""Changes of the configuration, and arguments of the model."""


@pytest.fixture
def megatron_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's rope and attention ask for the current GPU and its random numbers."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(fused_softmax, "get_sliding_window_causal_mask", window_mask)
    no_tracker = SimpleNamespace(fork=nullcontext)
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: no_tracker)


@pytest.mark.usefixtures("megatron_on_a_cpu")
@pytest.mark.parametrize("name", SERVED)
def test_tokens_and_log_probs_are_megatrons(name: str, lookahead: int) -> None:
    changes, options = SERVED[name]
    theirs = make_gpt(gpt_config(**changes), paged=False, **options)
    engine = make_engine(
        make_gpt(gpt_config(**changes), **options),
        lookahead=lookahead,
        max_sequence_length=128,
        max_tokens=48,
        max_requests=4,
    )
    params = greedy(TOKENS, return_log_probs=True, skip_prompt_log_probs=False)
    for request, prompt in zip(engine.generate(PROMPTS, params), PROMPTS, strict=True):
        assert request.error is None
        tokens = [*prompt, *request.generated_tokens]
        log_probs = torch.log_softmax(logits_of(theirs, tokens), -1)[:-1]
        # Each the likeliest behind those before it, so all are Megatron's.
        assert request.generated_tokens == log_probs.argmax(-1)[len(prompt) - 1 :].tolist()
        expected = log_probs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert request.prompt_log_probs
        assert request.generated_log_probs
        found = torch.tensor(request.prompt_log_probs + request.generated_log_probs)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


@pytest.mark.usefixtures("megatron_on_a_cpu")
def test_the_cases_differ() -> None:
    """A case whose property changed nothing would prove nothing."""
    plain = logits_of(make_gpt(gpt_config(), paged=False), PROMPTS[0])
    names = "base", "half of each head", "interpolation", "no positions", "softmax scale"
    for name in (*names, "layers without rope"):
        changes, options = SERVED[name]
        other = logits_of(make_gpt(gpt_config(**changes), paged=False, **options), PROMPTS[0])
        assert (other.argmax(-1) != plain.argmax(-1)).sum() > 3, name


def wrap(model: torch.nn.Module, **settings: Any) -> GPTInferenceWrapper:
    defaults = {"device": "cpu", "num_kv_blocks": 4, "max_requests": 4, "max_sequence_length": 64}
    context = DynamicInferenceContext(model.config, InferenceConfig(**{**defaults, **settings}))
    try:
        return GPTInferenceWrapper(model, context)
    finally:
        context.device.close()


def test_a_second_engine_on_the_same_model() -> None:
    model = make_gpt(gpt_config(), rotary_base=500000)
    tables = [wrap(model).inference_context.gpu_view.rotary.cos for _ in range(2)]
    assert torch.equal(*tables)
    assert tables[0].shape == (64, 16)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("rotary_interleaved=True", {"rotary_interleaved": True}, {}),
    (
        "position_embedding_type='mrope' (MultimodalRotaryEmbedding)",
        {"mrope_section": [2, 3, 3]},
        {"position_embedding_type": "mrope"},
    ),
    (
        "max_sequence_length=64, as it has learnt 32 positions",
        {},
        {"position_embedding_type": "learned_absolute", "max_sequence_length": 32},
    ),
    (
        "window_size=(20, 5), where (keys before a token, 0) is served",
        {"window_size": (20, 5)},
        {},
    ),
    ("flash_decode=True", {"flash_decode": True}, {}),
    ("attn_mask_type=no_mask", {}, {"mask": AttnMaskType.no_mask}),
    (
        "a LayerNorm of query and key heads",
        {"qk_layernorm": True, "normalization": "LayerNorm"},
        {},
    ),
    (
        "a L2Norm of query and key heads",
        {"qk_layernorm": True},
        {"q_norm": L2Norm, "k_norm": L2Norm},
    ),
]


@pytest.mark.usefixtures("megatron_on_a_cpu")
@pytest.mark.parametrize(("message", "changes", "options"), REFUSED)
def test_what_is_not_served(message: str, changes: dict[str, Any], options: dict[str, Any]) -> None:
    config = gpt_config()
    known = {name: value for name, value in changes.items() if hasattr(config, name)}
    config = gpt_config(**known)
    for name in changes.keys() - known.keys():
        setattr(config, name, changes[name])
    model = make_gpt(config, **options)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        wrap(model)


LATER: list[tuple[str, dict[str, Any]]] = [
    ("fp8='e4m3'", {"fp8": "e4m3"}),
    ("fp4='e2m1'", {"fp4": "e2m1"}),
    ("context_parallel_size=2", {"context_parallel_size": 2}),
    ("multi_latent_attention=True", {"multi_latent_attention": True}),
    ("sequence_parallel=True with other layers", {"sequence_parallel": True}),
]


@pytest.mark.parametrize(("message", "changes"), LATER)
def test_what_is_not_served_and_takes_a_gpu(message: str, changes: dict[str, Any]) -> None:
    model = make_gpt(gpt_config())
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        wrap(model)


def test_norms_of_heads_must_be_alike() -> None:
    model = make_gpt(gpt_config(qk_layernorm=True))
    attention = model.decoder.layers[1].self_attention
    attention.q_layernorm.eps = 1e-3
    with pytest.raises(ConfigurationError, match=r"an epsilon of 0\.001 for query and key heads"):
        wrap(model)
    attention.q_layernorm.zero_centered_gamma = True
    with pytest.raises(ConfigurationError, match="layernorm_zero_centered_gamma=True for query"):
        wrap(model)
    attention.q_layernorm = None
    with pytest.raises(ConfigurationError, match="a norm of queries or keys"):
        wrap(model)


def test_all_reasons_are_told_at_once() -> None:
    config = gpt_config(rotary_interleaved=True, window_size=(20, 5))
    with pytest.raises(ConfigurationError, match=r"rotary_interleaved=True; window_size=\(20, 5\)"):
        wrap(make_gpt(config))


EXPERTS = DUMMY_SHAPES["tiny-moe"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_router_score_function": "sqrtsoftplus"}, "score_function='sqrtsoftplus'"),
        ({"moe_router_enable_expert_bias": True}, "expert_bias=True with moe_router_score_funct"),
        ({"moe_shared_expert_gate": True}, "moe_shared_expert_gate=True without"),
        ({"moe_router_num_groups": 2}, "moe_router_num_groups=2"),
        ({"normalization": "LayerNorm"}, "normalization='LayerNorm'"),
        ({"fp32_residual_connection": True}, "fp32_residual_connection=True"),
        ({"activation_func": F.gelu}, "activation_func=gelu"),
        (
            {"gated_linear_unit": False, "activation_func": squared_relu, "glu_linear_offset": 1.0},
            "glu_linear_offset=1.0 without a gate",
        ),
    ],
)
def test_our_layers_with_a_configuration_that_they_do_not_serve(
    changes: dict[str, Any], message: str
) -> None:
    has_experts = any(name.startswith("moe") for name in changes)
    shape = EXPERTS if has_experts else TINY
    config = transformer_config(shape, torch.float32)
    for name, value in changes.items():
        setattr(config, name, value)
    model = HybridModel(
        config=config,
        hybrid_stack_spec=hybrid_stack_spec(config),
        vocab_size=shape.vocab_size,
        max_sequence_length=64,
        hybrid_layer_pattern=config.hybrid_layer_pattern,
        pg_collection=ensure_process_groups(),
    )
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        wrap(model)


def test_layers_that_the_context_has_no_room_for() -> None:
    model = make_model()
    context_of = make_gpt(gpt_config(kv_channels=8, num_query_groups=4))
    context = DynamicInferenceContext(
        context_of.config, InferenceConfig(device="cpu", num_kv_blocks=4, max_requests=4)
    )
    with pytest.raises(ConfigurationError, match=r"KV heads and their size \(4, 2, 8\), where"):
        GPTInferenceWrapper(model, context)
    context.device.close()


def test_a_model_that_does_not_tell_its_positions() -> None:
    class Silent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_gpt(gpt_config()).decoder
            self.config = gpt_config()

    with pytest.raises(ConfigurationError, match="position_embedding_type that neither"):
        wrap(Silent())


def test_a_hybrid_model_with_rope_of_its_own() -> None:
    """What its constructor says goes before what its configuration describes."""
    ours, other = make_model(), transformer_config(TINY, torch.float32)
    described: Any = ours.config
    model = HybridModel(
        config=other,
        hybrid_stack_spec=hybrid_stack_spec(other),
        vocab_size=TINY.vocab_size,
        max_sequence_length=64,
        hybrid_layer_pattern=other.hybrid_layer_pattern,
        position_embedding_type="rope",
        rotary_base=123.0,
        pg_collection=ensure_process_groups(),
    )
    model.load_state_dict(dict(ours.named_parameters()), strict=False)
    described.rotary_base = 123.0
    prompt = random_prompts(1, (30,))
    tokens = []
    for one in (model, ours):
        engine = make_engine(one, max_sequence_length=64)
        tokens.append(engine.generate(prompt, greedy(8))[0].generated_tokens)
    assert tokens[0] == tokens[1]
