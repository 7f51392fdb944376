"""Models whose experts take the op of a few tokens, with the norm before it, beside the grouped
products: the same tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megatron_async import LLM, SamplingParams
from megatron_async.models import moe
from megatron_async.ops.experts.expert_plan import FEW_TOKENS, FewTokenPlan, plan_few_tokens
from megatron_async.ops.experts.few_tokens import ExpertLayer, few_token_experts
from megatron_async.ops.linear.stream import Stream

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
    op = few_token_experts.on("torch")

    def planned(x: torch.Tensor, layer: ExpertLayer, major: int) -> FewTokenPlan | None:
        return plan_few_tokens(x.size(-2), layer.shape)

    def watched(x: torch.Tensor | Stream, *rest: Any) -> object:
        rows = x.value if isinstance(x, Stream) else x
        tokens[rows.size(-2)] += 1
        normed[isinstance(x, Stream)] += 1
        return op(x, *rest)

    monkeypatch.setattr(moe, "find_plan", planned)
    monkeypatch.setattr(few_token_experts, "on", lambda *_: watched)
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
