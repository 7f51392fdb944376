"""The layers that a model's configuration tells, before the model is known."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron_async import DynamicInferenceContext, InferenceConfig
from megatron_async.compat.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron_async.compat.models import serving_config
from megatron_async.errors import ConfigurationError
from megatron_async.models.parallel_state import ensure_process_groups
from tests.functional_tests.compat.test_compat_models import EXPERTS
from tests.support.compat_hybrids import MAMBA, hybrid_model
from tests.support.compat_models import config_of, gpt_model

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
