"""Fused SwiGLU against torch."""

import pytest
import torch

from megatron_async.ops.linear.activations import swiglu_gpu

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_large_gates_do_not_overflow(device):
    x = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 1.0, 1.0, 2.0, 3.0]], device=device)
    assert swiglu_gpu(x).tolist() == [[0.0, 0.0, 400.0, 3e4]]


@pytest.mark.parametrize("x", [torch.ones(2, 7), torch.ones(8, 2).t()])
def test_bad_input(x):
    with pytest.raises(ValueError, match=r"rows must be \[gate; up\]"):
        swiglu_gpu(x)
