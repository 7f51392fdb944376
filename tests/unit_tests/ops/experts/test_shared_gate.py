"""The shared expert behind its gate against plain torch."""

from __future__ import annotations

import pytest
import torch

from megatron_async.ops.experts.shared_gate import add_shared_expert, add_shared_expert_gpu

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "hidden"), [(3, 2048), (5, 72), (1, 16), (0, 8)])
def test_equals_torch(tokens, hidden, dtype, device):
    sums, shared, x = torch.randn(3, tokens, hidden, device=device).to(dtype)
    weight = (torch.randn(1, hidden, device=device) / hidden**0.5).to(dtype)
    expected = sums.double() + (x.double() @ weight.double().t()).sigmoid() * shared.double()
    for op in (add_shared_expert_gpu, add_shared_expert.reference):
        found = op(sums, shared, x, weight)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, **LIMITS[dtype])


LIMITS = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 1e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 8e-3, "atol": 8e-3},
}


def test_bad_input():
    sums, weight = torch.ones(2, 8), torch.ones(1, 8)
    for op in (add_shared_expert_gpu, add_shared_expert.reference):
        with pytest.raises(ValueError, match=r"weight \(1, 8\); found"):
            op(sums, sums, sums, weight[0])
        with pytest.raises(ValueError, match="sums, shared and x must be alike"):
            op(sums, sums[:1], sums, weight)
        with pytest.raises(ValueError, match="must be contiguous"):
            op(sums, torch.ones(8, 2).t(), sums, weight)
