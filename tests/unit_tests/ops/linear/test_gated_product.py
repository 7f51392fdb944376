"""Products that take Mamba-2's gate and norm along, against torch."""

import pytest
import torch
import torch.nn.functional as F
from test_skinny_linear import BRAIN, WHOLE, assert_close, expected_product, random, weight_of

from megatron_async.ops.linear import skinny_linear as ops
from megatron_async.ops.linear.skinny_plan import takes_gated
from megatron_async.ops.linear.unnormed import Unnormed

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def gated_product(rows, k, dtype, device, product):
    """Found and expected of a product behind Mamba-2's gate and norm."""
    x, gate = random(2, rows, k, dtype=dtype, device=device)
    scale, weight = random(k, dtype=dtype, device=device), weight_of(24, k, dtype, device)
    values = x.double() * F.silu(gate.double())
    normed = F.rms_norm(values, (k,), scale.double(), 1e-5)
    found = product(Unnormed(x, None, scale, 1e-5, gate), weight)
    return found, expected_product(normed, weight)


def test_reference_of_a_gate():
    found, expected = gated_product(3, 32, WHOLE, "cpu", ops.linear_reference)
    assert_close(found, expected, WHOLE)
    assert not takes_gated(torch.ones(2, 8, dtype=BRAIN), torch.ones(4, 8, dtype=BRAIN))  # no GPU


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 16, 33, 100])
@pytest.mark.parametrize("k", [1536, 2048])
def test_a_gate_whatever_the_plan(rows, k, dtype):
    """Taken along by resident weights, and by a kernel of its own otherwise."""
    found, expected = gated_product(rows, k, dtype, "cuda", ops.linear)
    assert_close(found, expected, dtype)


@pytest.mark.gpu
@needs_gpu
def test_which_product_takes_the_gate():
    weight = torch.ones(768, 1536, dtype=BRAIN, device="cuda")
    wide = torch.ones(768, 4096, dtype=BRAIN, device="cuda")
    for rows, taken in ((1, False), (2, True), (16, True), (17, False)):
        assert takes_gated(weight[:rows], weight) is taken
        assert not takes_gated(wide[:rows], wide)
