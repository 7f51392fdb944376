"""The shared expert behind its gate against plain torch."""

from __future__ import annotations

import pytest
import torch

from megatron_async.ops.experts.shared_gate import add_shared_expert, add_shared_expert_gpu


def test_reference_is_the_formula():
    sums, shared, x = torch.randn(3, 5, 72)
    weight = torch.randn(1, 72) / 72**0.5
    expected = sums.double() + (x.double() @ weight.double().t()).sigmoid() * shared.double()
    found = add_shared_expert.reference(sums, shared, x, weight)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_bad_input():
    sums, weight = torch.ones(2, 8), torch.ones(1, 8)
    for op in (add_shared_expert_gpu, add_shared_expert.reference):
        with pytest.raises(ValueError, match=r"weight \(1, 8\); found"):
            op(sums, sums, sums, weight[0])
        with pytest.raises(ValueError, match="sums, shared and x must be alike"):
            op(sums, sums[:1], sums, weight)
        with pytest.raises(ValueError, match="must be contiguous"):
            op(sums, torch.ones(8, 2).t(), sums, weight)
