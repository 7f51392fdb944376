"""Squared ReLU against plain torch."""

from __future__ import annotations

import pytest
import torch

from megatron_async.ops.linear.squared_relu import squared_relu, squared_relu_gpu
from tests.unit_tests.ops.triton_interpreter import EXACT_16_BIT

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.float32, *EXACT_16_BIT])
@pytest.mark.parametrize(("tokens", "ffn"), [(0, 8), (1, 1856), (5, 17)])
def test_rows_equal_torch(tokens, ffn, dtype, device):
    x = torch.randn(tokens, ffn + 8, device=device).to(dtype)[:, :ffn]
    found = squared_relu_gpu(x)
    assert found.is_contiguous()
    assert torch.equal(found, squared_relu.reference(x))
    assert torch.equal(found, (x.float().clamp(min=0) ** 2).to(dtype))


def test_strided_elements_are_refused():
    with pytest.raises(ValueError, match="elements of a row must be adjacent"):
        squared_relu_gpu(torch.randn(8, 4).t())
