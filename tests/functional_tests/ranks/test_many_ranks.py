"""Several ranks, by `LLM` as users call it, give one rank's tokens.

What each kind of parallelism does at other lookaheads, under pressure and in chunks is in the tests
of each: test_tensor_parallel, test_pipeline_parallel, test_moe, test_expert_consensus.
"""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks

PROMPTS = [[1, 2, 3], list(range(40, 90)), [7], list(range(30))]


def _llm(model: str = "dummy:tiny", **options: Any) -> Any:
    from megatron_async import LLM

    settings = {"num_kv_blocks": 64, "block_size_tokens": 16, "max_sequence_length": 256, **options}
    return LLM(model, device="cpu", **settings)


def _params(count: int) -> Any:
    from megatron_async import SamplingParams

    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 40, "seed": 3},
        {"temperature": 0.7, "top_p": 0.9, "seed": 4, "repetition_penalty": 1.2},
        {"temperature": 0.0, "return_log_probs": True},
    ]
    return [SamplingParams(num_tokens_to_generate=12, termination_id=-1, **kind) for kind in kinds]


def generate(**options: Any) -> list[list[int]] | None:
    """What a rank returns from its `generate`."""
    with _llm(**options) as llm:
        share = slice(llm.data_parallel_rank, None, llm.data_parallel_size)
        outputs = llm.generate(PROMPTS[share], _params(4)[share])
        assert bool(outputs) == llm.is_primary_rank
        assert all(output.error is None for output in outputs)
        again = llm.generate(PROMPTS[:1], _params(4)[:1])
        assert len(again) == len(outputs[:1])
        return [output.generated_tokens for output in outputs] if outputs else None


def _call(options: dict[str, Any]) -> Any:
    return generate(**options)


@pytest.fixture(scope="module")
def one_rank() -> list[list[int]]:
    tokens = generate()
    assert tokens is not None
    return tokens


def test_data_parallel_replicas(one_rank):
    assert run_ranks(2, _call, {}) == [one_rank[0::2], one_rank[1::2]]


def test_pipeline_stages(one_rank):
    options = {"pipeline_model_parallel_size": 2, "check_ranks_agree": True}
    assert run_ranks(2, _call, options) == [one_rank, None]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks(one_rank, sequence_parallel):
    options = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": sequence_parallel,
        "check_ranks_agree": True,
    }
    assert run_ranks(2, _call, options) == [one_rank, None]


def test_tensor_parallel_replicas(one_rank):
    options = {"tensor_model_parallel_size": 2}
    assert run_ranks(4, _call, options) == [one_rank[0::2], None, one_rank[1::2], None]


def test_tensor_parallel_stages(one_rank):
    options = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assert run_ranks(4, _call, options) == [one_rank, None, None, None]


@pytest.fixture(scope="module")
def one_rank_of_experts() -> list[list[int]]:
    tokens = generate(model="dummy:tiny-moe")
    assert tokens is not None
    return tokens


SCARCE = {"num_kv_blocks": 9, "block_size_tokens": 8, "max_tokens": 11, "max_requests": 3}
"""Prompts come in chunks, and two requests of a rank evict each other."""


@pytest.mark.parametrize(
    "settings", [{"lookahead": 0}, {"lookahead": 1}, {"lookahead": 2, **SCARCE}], ids=str
)
def test_expert_parallel_replicas(one_rank_of_experts, settings):
    options = {"expert_model_parallel_size": 2, "model": "dummy:tiny-moe", **settings}
    tokens = one_rank_of_experts
    assert run_ranks(2, _call, options) == [tokens[0::2], tokens[1::2]]


def test_tensor_and_expert_parallel_ranks(one_rank_of_experts):
    options = {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "model": "dummy:tiny-moe",
        "check_ranks_agree": True,
    }
    tokens = one_rank_of_experts
    assert run_ranks(4, _call, options) == [tokens[0::2], None, tokens[1::2], None]
