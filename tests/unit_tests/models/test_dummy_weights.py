"""Random weights of `dummy:` models."""

import pytest
import torch

from megatron_async.models import hybrid
from megatron_async.models.hybrid import fill_dummy_weight

NAMES = {
    "decoder.layers.0.mixer.A_log": (16,),
    "decoder.layers.0.mixer.dt_bias": (16,),
    "decoder.layers.0.mixer.D": (16,),
    "decoder.layers.0.mixer.conv1d.weight": (40, 1, 4),
    "decoder.layers.0.mixer.conv1d.bias": (40,),
    "decoder.layers.0.input_layernorm.weight": (24,),
    "decoder.layers.1.mlp.linear_fc1.weight": (48, 24),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_a_16_bit_model_has_the_float32_models_weights_rounded(monkeypatch, name, dtype):
    """Else `check_parity.py` compares two models."""
    monkeypatch.setattr(hybrid, "PART", 500)
    whole = torch.full(NAMES[name], torch.nan)
    half = whole.to(dtype)
    fill_dummy_weight(name, whole)
    fill_dummy_weight(name, half)
    assert whole.isfinite().all()
    assert torch.equal(half, whole.to(dtype))
    if name.endswith("fc1.weight"):
        assert len(whole.unique()) > 0.99 * whole.numel()  # no part is another one's
