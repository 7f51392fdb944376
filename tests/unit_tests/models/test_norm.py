"""Norms that multiply by 1 + weight."""

import pytest
import torch
from torch import nn

from megatron_async.models.norm import InferenceRMSNorm, factors_of, fold_norms
from megatron_async.ops.linear.rms_norm import add_rms_norm


def test_a_plain_norm_multiplies_by_its_weight() -> None:
    norm = InferenceRMSNorm(8, 1e-6, is_zero_centered=False)
    assert factors_of(norm) is norm.weight
    assert factors_of(other := nn.RMSNorm(8)) is other.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_is_added_in_float32_or_wider(dtype: torch.dtype) -> None:
    """A small weight would be lost in bfloat16: 1 + 2**-9 is 1 there."""
    norm = InferenceRMSNorm(8, 1e-6, is_zero_centered=True).to(dtype)
    norm.weight.data.fill_(2**-9)
    with pytest.raises(RuntimeError, match="before fold_norms"):
        factors_of(norm)
    fold_norms(nn.Sequential(norm))
    factors = factors_of(norm)
    assert factors.dtype == torch.promote_types(dtype, torch.float32)
    assert (factors == 1 + 2**-9).all()
    assert (norm.weight == 2**-9).all(), "what is saved is what was loaded"
    x = torch.randn(3, 8, dtype=torch.float64)
    expected = torch.rms_norm(x, (8,), None, 1e-6) * (1 + 2**-9)
    normed, _total = add_rms_norm.reference(x.to(dtype), None, factors, 1e-6)
    assert normed.dtype == dtype
    limits = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(normed.double(), expected, **limits)
    torch.testing.assert_close(norm(x.to(dtype)), normed)


def test_new_weights_are_folded_into_the_same_memory() -> None:
    """Captured steps keep its address."""
    norm = InferenceRMSNorm(4, 1e-6, is_zero_centered=True)
    norm.fold()
    before = factors_of(norm)
    norm.weight.data.fill_(3.0)
    norm.fold()
    assert factors_of(norm).data_ptr() == before.data_ptr()
    assert (before == 4).all()
