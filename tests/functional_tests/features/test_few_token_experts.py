"""Models whose experts take the op of a few tokens, with the norm before it, beside the grouped
products: the same tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron_async import LLM, SamplingParams
from megatron_async.models import moe
from megatron_async.ops.experts.expert_plan import FEW_TOKENS, FewTokenPlan, plan_few_tokens
from megatron_async.ops.experts.few_tokens import ExpertLayer

MODELS = ["tiny-moe", "tiny-hybrid", "tiny-gated-delta"]
"""Softmax; sigmoids with a bias and a shared expert without a gate; a shared expert behind one."""
PROMPTS = [[3, 1, 4], list(range(40, 60)), [7] * 5]


def generate(model: str, device: str) -> list[list[int]]:
    """Prompts of more tokens than `FEW_TOKENS`, then decode steps of 3, 2 and 1 rows;
    random tokens, which depend on all bits of the logits that matter."""
    params = [
        SamplingParams(num_tokens_to_generate=count, temperature=1.0, seed=3)
        for count in (24, 16, 8)
    ]
    room = {"max_requests": 4, "num_kv_blocks": 64}
    with LLM(f"dummy:{model}", device=device, dtype="float32", **room) as llm:
        return [request.generated_tokens for request in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("model", MODELS)
def test_same_tokens(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(model, "cpu")
    tokens: Counter[int] = Counter()
    normed: Counter[bool] = Counter()
    op = moe.kernels_for(torch.empty(0)).few_token_experts

    def planned(x: torch.Tensor, layer: ExpertLayer) -> FewTokenPlan | None:
        return plan_few_tokens(x.size(-2), layer.shape)

    class Kernels:
        """The CPU's, which tell what they were given."""

        def __getattr__(self, name: str) -> object:
            return getattr(kernels, name) if name != "few_token_experts" else self.watched

        @staticmethod
        def watched(x: object, *rest: object) -> object:
            rows = x.x if isinstance(x, moe.Unnormed) else x
            assert isinstance(rows, torch.Tensor)
            tokens[rows.size(-2)] += 1
            normed[isinstance(x, moe.Unnormed)] += 1
            return op(x, *rest)

    kernels, watching = moe.kernels_for(torch.empty(0)), Kernels()
    monkeypatch.setattr(moe, "find_plan", planned)
    monkeypatch.setattr(moe, "kernels_for", lambda _: watching)
    assert generate(model, "cpu") == expected
    assert set(tokens) <= set(range(1, FEW_TOKENS + 1))
    assert tokens[1] > 0
    assert set(normed) == {True}, "the norm goes along wherever this op does"


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_same_tokens_on_a_gpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = generate(model, "cuda")
    monkeypatch.setattr(moe, "find_plan", lambda *_: None)
    assert generate(model, "cuda") == found
