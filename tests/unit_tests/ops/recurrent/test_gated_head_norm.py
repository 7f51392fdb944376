"""Norm of heads, then a gate, against torch."""

import pytest
import torch
import torch.nn.functional as F

from megatron_async.ops.recurrent.gated_head_norm import (
    MAX_HEAD,
    gated_head_norm,
    gated_head_norm_gpu,
)
from tests.unit_tests.ops.triton_interpreter import EXACT_16_BIT, assert_rounded_alike

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def check(tokens, heads, size, dtype, device, stride=0):
    o = torch.randn(tokens, heads * size, device=device).to(dtype)
    # The gate is a strip of in_proj's output.
    z = (2 * torch.randn(tokens, heads * size + stride, device=device)).to(dtype)
    z = z[:, : heads * size]
    weight = torch.randn(size, device=device).to(dtype)
    out = gated_head_norm_gpu(o, z, weight, 1e-5)
    expected = gated_head_norm.reference(o, z, weight, 1e-5)
    assert out.is_contiguous()
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected)
    if dtype in EXACT_16_BIT:
        assert_rounded_alike(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "heads", "size"), [(1, 1, 64), (5, 3, 48), (3, 24, 128), (2, 5, 7), (0, 2, 8)]
)
def test_equals_torch(tokens, heads, size, dtype, device):
    check(tokens, heads, size, dtype, device)
    check(tokens, heads, size, dtype, device, stride=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reference_is_the_formula(dtype):
    """Each head alone, the norm before the gate: Megatron's GatedDeltaNet._apply_gated_norm."""
    o, z = torch.randn(2, 3, 12, dtype=torch.float64)
    weight = torch.randn(4, dtype=torch.float64)
    found = gated_head_norm.reference(o.to(dtype), z.to(dtype), weight.to(dtype), 1e-5)
    for head in range(3):
        own = slice(4 * head, 4 * head + 4)
        normed = o[:, own] * (o[:, own].square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight
        torch.testing.assert_close(found[:, own], (normed * F.silu(z[:, own])).to(dtype))


def test_a_row_that_is_not_finite_stays_alone(device):
    o, z = torch.randn(2, 4, 32, device=device)
    o[1] = torch.nan
    out = gated_head_norm_gpu(o, z, torch.ones(16, device=device), 1e-5)
    assert out.isfinite().all(1).tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    ("o", "z", "weight", "message"),
    [
        (torch.ones(2, 8), torch.ones(2, 4), torch.ones(4), r"z must be like it.*\(2, 4\)"),
        (torch.ones(2, 8), torch.ones(2, 8), torch.ones(3), r"one head of its.*\(3,\)"),
        (torch.ones(8, 2).t(), torch.ones(2, 8), torch.ones(4), "contiguous"),
        (*torch.ones(2, 1, 2 * MAX_HEAD), torch.ones(2 * MAX_HEAD), "32768 channels"),
    ],
)
def test_bad_input(o, z, weight, message):
    with pytest.raises(ValueError, match=message):
        gated_head_norm_gpu(o, z, weight, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [1, 8, 32, 48, 64])
def test_real_sizes(heads, dtype):
    for tokens in (1, 67, 2048):
        check(tokens, heads, 128, dtype, "cuda", stride=1000)
