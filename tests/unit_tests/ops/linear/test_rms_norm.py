"""Fused residual add and RMSNorm against torch and against Megatron's order of roundings."""

import pytest
import torch

from megatron_async.ops.linear import rms_norm
from megatron_async.ops.linear.activations import swiglu_gpu
from megatron_async.ops.linear.rms_norm import MAX_HIDDEN, add_rms_norm_gpu
from tests.unit_tests.ops.triton_interpreter import EXACT_16_BIT, assert_rounded_alike

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_equals_megatrons_modules(device):
    """bias_dropout_add, then the norm module, in 16 bits."""
    dtype = EXACT_16_BIT[-1]
    fused_bias_dropout = pytest.importorskip("megatron.core.fusions.fused_bias_dropout")
    x, residual = torch.randn(2, 4, 576, device=device).to(dtype)
    norm = torch.nn.RMSNorm(576, eps=1e-5, device=device, dtype=dtype)
    bias_dropout_add = fused_bias_dropout.get_bias_dropout_add(training=False, fused=False)
    normed, total = add_rms_norm_gpu(x, residual, norm.weight.detach(), 1e-5)
    with torch.inference_mode():
        expected_total = bias_dropout_add((x.clone(), None), residual, 0.0)
        expected = norm(expected_total)
    assert torch.equal(total, expected_total)
    assert_rounded_alike(normed, expected)
    torch.testing.assert_close(normed, expected)


def test_without_residual_x_is_the_stream():
    x = torch.empty(0, 8)
    assert add_rms_norm_gpu(x, None, torch.ones(8), 1e-5)[1] is x


@pytest.mark.parametrize(
    ("x", "residual", "weight", "message"),
    [
        (torch.ones(2, 8), None, torch.ones(4), r"weight must be \(8,\)"),
        (torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), r"residual like x.*\(1, 8\)"),
        (torch.ones(8, 2).t(), None, torch.ones(8), "contiguous"),
        (torch.ones(1, 2 * MAX_HIDDEN), None, torch.ones(2 * MAX_HIDDEN), "32768 is over 16384"),
    ],
)
def test_bad_input(x, residual, weight, message):
    with pytest.raises(ValueError, match=message):
        add_rms_norm_gpu(x, residual, weight, 1e-5)


@pytest.mark.parametrize(
    ("tokens", "hidden", "is_early"),
    [
        (1, 8192, True),  # one row
        (500, 1024, True),  # short rows
        (16, 4096, True),  # of a streamed product
        (64, 8192, True),
        (8, 4096, False),
        (65, 4096, False),
        (16, 2048, False),
    ],
)
def test_when_the_next_kernel_may_start_early(tokens, hidden, is_early, monkeypatch):
    found = {}

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, **constants: found.update(constants)

    monkeypatch.setattr(rms_norm, "_add_rms_norm_kernel", Kernel())
    add_rms_norm_gpu(torch.ones(tokens, hidden), None, torch.ones(hidden), 1e-5)
    assert found["early"] == is_early


def test_large_gates_do_not_overflow(device):
    x = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 1.0, 1.0, 2.0, 3.0]], device=device)
    assert swiglu_gpu(x).tolist() == [[0.0, 0.0, 400.0, 3e4]]


@pytest.mark.parametrize("x", [torch.ones(2, 7), torch.ones(8, 2).t()])
def test_swiglu_of_bad_rows(x):
    with pytest.raises(ValueError, match=r"rows must be \[gate; up\]"):
        swiglu_gpu(x)
