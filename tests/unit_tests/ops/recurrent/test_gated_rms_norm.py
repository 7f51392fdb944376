"""Gated RMSNorm against torch."""

import pytest
import torch
import torch.nn.functional as F

from megatron_async.ops.recurrent.gated_rms_norm import (
    MAX_GROUP,
    gated_rms_norm,
    gated_rms_norm_gpu,
)
from tests.unit_tests.ops.triton_interpreter import EXACT_16_BIT, assert_rounded_alike

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def check(tokens, channels, groups, dtype, device, stride=0):
    y = torch.randn(tokens, channels, device=device).to(dtype)
    # The gate is a strip of in_proj's output.
    z = (2 * torch.randn(tokens, channels + stride, device=device)).to(dtype)[:, :channels]
    weight = torch.randn(channels, device=device).to(dtype)
    out = gated_rms_norm_gpu(y, z, weight, groups, 1e-5)
    expected = gated_rms_norm.reference(y, z, weight, groups, 1e-5)
    assert out.is_contiguous()
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected)
    if dtype in EXACT_16_BIT:
        assert_rounded_alike(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "channels", "groups"), [(1, 64, 1), (5, 96, 8), (3, 1000, 2), (2, 7, 7), (0, 8, 2)]
)
def test_equals_torch(tokens, channels, groups, dtype, device):
    check(tokens, channels, groups, dtype, device)
    check(tokens, channels, groups, dtype, device, stride=5)


def test_reference_is_the_formula():
    """Each group alone, the gate before the norm: Megatron's norm_before_gate=False."""
    y, z = torch.randn(2, 3, 12, dtype=torch.float64)
    weight = torch.randn(12, dtype=torch.float64)
    found = gated_rms_norm.reference(y.float(), z.float(), weight.float(), 3, 1e-5)
    for group in range(3):
        own = slice(4 * group, 4 * group + 4)
        gated = y[:, own] * F.silu(z[:, own])
        gated *= (gated.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight[own]
        torch.testing.assert_close(found[:, own], gated.float())


def test_a_row_that_is_not_finite_stays_alone(device):
    y, z = torch.randn(2, 4, 32, device=device)
    y[1] = torch.nan
    out = gated_rms_norm_gpu(y, z, torch.ones(32, device=device), 2, 1e-5)
    assert out.isfinite().all(1).tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    ("y", "z", "weight", "groups", "message"),
    [
        (torch.ones(2, 8), torch.ones(2, 4), torch.ones(8), 1, r"z must be like it.*\(2, 4\)"),
        (torch.ones(2, 8), torch.ones(2, 8), torch.ones(4), 1, r"weight \(8,\)"),
        (torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), 3, "groups divide 8"),
        (torch.ones(8, 2).t(), torch.ones(2, 8), torch.ones(8), 1, "contiguous"),
        (*torch.ones(2, 1, 2 * MAX_GROUP), torch.ones(2 * MAX_GROUP), 1, "32768 channels"),
    ],
)
def test_bad_input(y, z, weight, groups, message):
    with pytest.raises(ValueError, match=message):
        gated_rms_norm_gpu(y, z, weight, groups, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("channels", "groups"), [(4096, 8), (10240, 8), (8192, 1)])
def test_real_sizes(channels, groups, dtype):
    for tokens in (1, 67, 2048):
        check(tokens, channels, groups, dtype, "cuda", stride=1000)
