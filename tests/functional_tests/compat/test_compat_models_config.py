"""The layers that a model's configuration tells, before the model is known.

What cannot be served is refused by its name and its place, when the wrapper is made.
"""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import L2Norm
from torch import nn

from megatron_async import DynamicInferenceContext, InferenceConfig
from megatron_async.compat.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron_async.compat.models import serve_model, serving_config
from megatron_async.errors import ConfigurationError
from megatron_async.models.parallel_state import ensure_process_groups
from tests.functional_tests.compat.test_compat_models import EXPERTS, GPT2, LEARNED, UNTIED
from tests.support.compat_hybrids import MAMBA, hybrid_model
from tests.support.compat_models import config_of, engine_of, gpt_model

DELTA = {"experimental_attention_variant": "gated_delta_net"}


@pytest.fixture(autouse=True)
def groups() -> None:
    """Which pipeline stage this is, Megatron's groups say."""
    ensure_process_groups()


def changed(**changes: Any) -> Any:
    """A configuration, some fields of which are set afterwards: Megatron checks them by ranks."""
    config = config_of(**{name: changes.pop(name) for name in EXPERTS if name in changes})
    for name, value in changes.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({}, "*-*-"),
        (EXPERTS, "*E*E"),
        (EXPERTS | {"num_layers": 5, "moe_layer_freq": 2}, "*E*-*E*-*E"),
        (EXPERTS | {"num_layers": 3, "moe_layer_freq": [0, 1, 1]}, "*-*E*E"),
        (DELTA | {"num_layers": 4, "linear_attention_freq": 2}, "G-*-G-*-"),
        (DELTA | {"num_layers": 3, "linear_attention_freq": [1, 0, 1]}, "G-*-G-"),
        ({"num_layers": 4, "pipeline_model_parallel_size": 2}, "*-*-|*-*-"),
        (
            {
                "num_layers": 4,
                "pipeline_model_parallel_size": 2,
                "num_layers_in_first_pipeline_stage": 1,
            },
            "*-|*-*-*-",
        ),
    ],
)
def test_patterns_of_gpt_models(changes: dict[str, Any], pattern: str) -> None:
    config = changed(**changes)
    before = dict(vars(config))
    found = serving_config(config)
    assert found.hybrid_layer_pattern == pattern
    assert found.num_layers == len(pattern.replace("|", ""))
    assert vars(config) == before
    assert serving_config(found) is found


def test_patterns_of_hybrid_models() -> None:
    config = changed(num_layers=4)
    assert serving_config(config, ["M", "-", "*", "-"]).hybrid_layer_pattern == "M-*-"
    assert serving_config(config, "M-*-/*-/*-").hybrid_layer_pattern == "M-*-"
    config.pipeline_model_parallel_size = 2
    assert serving_config(config, "M-*-").hybrid_layer_pattern == "M-|*-"
    assert serving_config(config, "M-*|-").hybrid_layer_pattern == "M-*|-"
    config.is_hybrid_model = True
    assert serving_config(config).hybrid_layer_pattern is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (EXPERTS | {"moe_layer_freq": [1]}, "moe_layer_freq=[1] must be a positive integer, or"),
        (DELTA, "linear_attention_freq=None must be"),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "virtual_pipeline_model_parallel_size=2 is not served",
        ),
        (
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tL"},
            "pipeline_model_parallel_layout is not served",
        ),
    ],
)
def test_what_cannot_be_read(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        serving_config(changed(**changes))


def test_a_hybrid_pattern_that_does_not_say_where_stages_begin() -> None:
    config = changed(pipeline_model_parallel_size=2)
    with pytest.raises(ConfigurationError, match="'M-\\*' does not say where its 2 pipeline"):
        serving_config(config, "M-*")


@pytest.mark.parametrize("told", [False, True])
def test_a_context_for_other_layers_is_made_again(told: bool) -> None:
    """A hybrid model's configuration that nothing marks as one reads like a `GPTModel`'s."""
    model = hybrid_model("M*-", **MAMBA)
    guess = serving_config(model.config)
    assert guess.hybrid_layer_pattern == "*-*-*-"
    settings = InferenceConfig(device="cpu", num_kv_blocks=4, max_requests=4)
    context = DynamicInferenceContext(guess if told else model.config, settings)
    assert context.gpu_view.kv_cache.num_layers == 3
    wrapper = GPTInferenceWrapper(model, context)
    assert wrapper.inference_context is context
    assert context.config is settings
    assert context.gpu_view.kv_cache.num_layers == 1
    assert context.model_config.hybrid_layer_pattern == "M*-"
    context.device.close()


def test_a_context_that_fits_is_kept() -> None:
    model = gpt_model()
    settings = InferenceConfig(device="cpu", num_kv_blocks=4, max_requests=4)
    context = DynamicInferenceContext(model.config, settings)
    view = context.gpu_view
    GPTInferenceWrapper(model, context)
    assert context.gpu_view is view
    context.device.close()


FIELDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("rotary_interleaved=True", {"rotary_interleaved": True}, {}),
    ("window_size=(20, 5)", {"window_size": (20, 5)}, {}),
    ("fp32_residual_connection=True", {"fp32_residual_connection": True}, {}),
    (
        "a LayerNorm of query and key heads",
        {"qk_layernorm": True, "normalization": "LayerNorm"},
        {},
    ),
    (
        "normalization='LayerNorm'; layers of other kinds beside that (E)",
        EXPERTS | {"normalization": "LayerNorm"},
        UNTIED,
    ),
    (
        "activation_func=gelu with gated_linear_unit=True; layers of other",
        EXPERTS | {"activation_func": F.gelu},
        UNTIED,
    ),
    (
        "position_embedding_type='mrope' (MultimodalRotaryEmbedding)",
        {"mrope_section": [2, 3, 3]},
        {"position_embedding_type": "mrope"},
    ),
    (
        "max_sequence_length=128, as it has learnt 64 positions",
        GPT2,
        LEARNED | {"max_sequence_length": 64},
    ),
]
LATER: list[tuple[str, dict[str, Any]]] = [
    ("multi_latent_attention=True", {"multi_latent_attention": True}),
    ("fp8='e4m3'", {"fp8": "e4m3"}),
    ("fp4='e2m1'", {"fp4": "e2m1"}),
    ("context_parallel_size=2", {"context_parallel_size": 2}),
    ("heterogeneous_block_specs=True", {"heterogeneous_block_specs": True}),
    ("moe_router_load_balancing_type='sinkhorn'", {"moe_router_load_balancing_type": "sinkhorn"}),
    ("moe_router_num_groups=2", {"moe_router_num_groups": 2}),
    ("moe_expert_capacity_factor=1.0", {"moe_expert_capacity_factor": 1.0}),
    ("experimental_attention_variant='dsa'", {"experimental_attention_variant": "dsa"}),
    ("moe_mlp_glu_interleave_size=32", {"moe_mlp_glu_interleave_size": 32}),
    (
        "expert_tensor_parallel_size=2, where",
        {"expert_tensor_parallel_size": 2, "num_moe_experts": 4},
    ),
]
"""What Megatron's configuration takes only with a GPU, or with more ranks: set afterwards."""


def refused(model: Any, message: str) -> None:
    state = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        engine_of(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == state


@pytest.mark.parametrize(("message", "changes", "options"), FIELDS)
def test_fields(message: str, changes: dict[str, Any], options: dict[str, Any]) -> None:
    refused(gpt_model(changes, options), message)


@pytest.mark.parametrize(("message", "changes"), LATER)
def test_fields_that_take_more_than_a_cpu(message: str, changes: dict[str, Any]) -> None:
    model = gpt_model()
    for name, value in changes.items():
        assert hasattr(model.config, name)
        setattr(model.config, name, value)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        serve_model(model)


class LowRank(nn.Module):
    """An adapter (LoRA) beside a product, as libraries put it there."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.to_wrap = linear
        self.adapter = nn.Linear(4, 4)


class Mine(nn.Module):
    """Anything."""


def a_gelu_module(model: Any) -> None:
    model.decoder.layers[1].mlp = Mine()


def an_adapter(model: Any) -> None:
    attention = model.decoder.layers[0].self_attention
    attention.linear_qkv = LowRank(attention.linear_qkv)


def a_strange_layer(model: Any) -> None:
    model.decoder.layers[1] = Mine()


def cross_attention(model: Any) -> None:
    model.decoder.layers[0].cross_attention = Mine()


def a_hook(model: Any) -> None:
    model.decoder.layers[0].register_forward_hook(lambda *_: None)


def a_parameter(model: Any) -> None:
    model.decoder.layers[1].mlp.linear_fc1.scale = nn.Parameter(torch.ones(1))


def a_bias(model: Any) -> None:
    linear = model.decoder.layers[0].self_attention.linear_proj
    linear.register_parameter("bias", nn.Parameter(torch.ones(32)))


def a_missing_norm(model: Any) -> None:
    model.decoder.layers[0].pre_mlp_layernorm = IdentityOp()


def another_shape(model: Any) -> None:
    linear = model.decoder.layers[0].mlp.linear_fc2
    linear.weight = nn.Parameter(torch.ones(32, 40))


def a_mask(model: Any) -> None:
    model.decoder.layers[1].self_attention.attn_mask_type = AttnMaskType.no_mask


def an_epsilon(model: Any) -> None:
    model.decoder.layers[1].input_layernorm.eps = 1e-3


def l2_norms(model: Any) -> None:
    model.decoder.layers[0].self_attention.q_layernorm = L2Norm(16)


def a_yarn_of_ones_own(model: Any) -> None:
    model.position_embedding_type = "yarn"
    model.rotary_pos_emb.__class__ = type("StretchedYarn", (YarnRotaryEmbedding,), {})


def a_patched_forward(model: Any) -> None:
    model.embedding.forward = lambda **_: None


def a_wide_weight(model: Any) -> None:
    linear = model.decoder.layers[0].mlp.linear_fc2
    linear.weight = nn.Parameter(linear.weight.data.double())


def other_experts(model: Any) -> None:
    model.config.num_moe_experts = 4
    model.config.moe_layer_freq = [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (a_gelu_module, f"decoder.layers.1.mlp is a {__name__}.Mine"),
        (an_adapter, f"self_attention.linear_qkv is a {__name__}.LowRank"),
        (a_strange_layer, f"decoder.layers.1 is a {__name__}.Mine"),
        (cross_attention, "decoder.layers.0.cross_attention is a"),
        (a_hook, "decoder.layers.0 has a forward hook"),
        (a_parameter, "its parameter 'decoder.layers.1.mlp.linear_fc1.scale'"),
        (a_bias, "its parameter 'decoder.layers.0.self_attention.linear_proj.bias'"),
        (a_missing_norm, "it has none of 'decoder.layers.0.pre_mlp_layernorm.weight'"),
        (another_shape, "'decoder.layers.0.mlp.linear_fc2.weight' is [32, 40]"),
        (a_mask, "attn_mask_type=no_mask of decoder.layers.1.self_attention"),
        (an_epsilon, "an epsilon of 0.001 of decoder.layers.1.input_layernorm"),
        (l2_norms, "self_attention.q_layernorm is a L2Norm"),
        (a_yarn_of_ones_own, "position_embedding_type='yarn' (StretchedYarn)"),
        (a_patched_forward, "embedding has a forward of its own"),
        (a_wide_weight, "linear_fc2.weight' is torch.float64"),
        (other_experts, "the model's layers are '*-*-', where its configuration says '*-*E'"),
    ],
)
def test_what_a_module_is_or_has(change: Any, message: str) -> None:
    model = gpt_model({"qk_layernorm": True})
    change(model)
    refused(model, message)


def test_a_mask_in_megatrons_modules() -> None:
    model = gpt_model(GPT2, LEARNED)
    model.decoder.layers[1].self_attention.attn_mask_type = AttnMaskType.no_mask
    refused(model, "attn_mask_type=no_mask")


def test_no_model() -> None:
    with pytest.raises(ConfigurationError, match="a Linear is not served"):
        serve_model(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="a list of 2 model chunks"):
        serve_model([nn.Linear(2, 2)] * 2)


def test_a_class_with_a_forward_of_its_own() -> None:
    class Scaled(GPTModel):
        def forward(self, *_: Any, **__: Any) -> None:
            """Anything."""

    model = gpt_model()
    model.__class__ = Scaled
    refused(model, "a Scaled is not served: its forward differs from Megatron-Core's")


def test_a_used_context_is_not_made_again() -> None:
    model = hybrid_model("M*-", **MAMBA)
    settings = InferenceConfig(device="cpu", num_kv_blocks=4, max_requests=4)
    context = DynamicInferenceContext(model.config, settings)
    context.expect_step(1)
    context._plan_builder.next_step = 1
    with pytest.raises(ConfigurationError, match="has been used: make a context for each model"):
        GPTInferenceWrapper(model, context)
    context.device.close()


def test_weights_of_another_dtype_than_the_configurations() -> None:
    refused(gpt_model().bfloat16(), "params_dtype is torch.float32")
