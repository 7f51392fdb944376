"""Parameters under the names of TransformerEngine's spec are found.

Its modules are stand-ins (`te_stand_ins.py`); `gpu/test_gpu_transformer_engine.py` has its own.
"""

from typing import Any

import pytest
import torch

from megatron_async.compat.models import serve_model
from megatron_async.errors import ConfigurationError
from tests.functional_tests.compat.test_compat_models import EXPERTS, SHARED, UNTIED, check_tokens
from tests.support.compat_models import engine_of, gpt_model
from tests.support.harness import drain
from tests.support.te_stand_ins import as_transformer_engine

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({"qk_layernorm": True}, {}),
    "Qwen2 biases": ({"add_qkv_bias": True}, UNTIED),
    "grouped experts": (EXPERTS | SHARED, UNTIED),
    "dense first": (EXPERTS | {"moe_layer_freq": [0, 1]}, UNTIED),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_megatrons(name: str) -> None:
    changes, options = CASES[name]
    model = as_transformer_engine(gpt_model(changes, options)).eval()
    assert any("linear_qkv.layer_norm_weight" in name for name, _ in model.named_parameters())
    engine = engine_of(model, lookahead=1)
    check_tokens(engine, model)


def test_norms_that_multiply_by_one_plus_weight() -> None:
    """Factors of norms are made from the weights, and again when these have changed."""
    model = as_transformer_engine(gpt_model({"qk_layernorm": True}), centered=True).eval()
    engine = engine_of(model, lookahead=1)
    before = check_tokens(engine, model)
    drain(engine)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(0.3)
    engine.context.reset_prefix_cache()
    engine.controller.inference_wrapped_model.refresh_weights()
    assert check_tokens(engine, model) != before


def test_a_norm_that_is_not_what_the_configuration_says() -> None:
    model = as_transformer_engine(gpt_model())
    model.decoder.layers[1].self_attention.linear_qkv.zero_centered_gamma = True
    with pytest.raises(ConfigurationError, match=r"zero_centered_gamma=True of decoder\.layers\.1"):
        serve_model(model)
