"""Several ranks, by `LLM` as users call it, give one rank's tokens.

What each kind of parallelism does at other lookaheads, under pressure and in chunks is in the tests
of each: test_tensor_parallel, test_pipeline_parallel, test_moe, test_expert_consensus.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.ranks import run_ranks

PROMPTS = [[1, 2, 3], list(range(40, 90)), [7], list(range(30))]


def _llm(model: str = "dummy:tiny", **options: Any) -> Any:
    from megatron_async import LLM

    settings = {"num_kv_blocks": 64, "block_size_tokens": 16, "max_sequence_length": 256, **options}
    return LLM(model, dtype="float32", **settings)


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


@cache
def one_rank(device: str, model: str = "dummy:tiny") -> list[list[int]]:
    """Dummy weights are others on another device."""
    tokens = generate(model=model, device=device)
    assert tokens is not None
    return tokens


def on_devices(ranks: int) -> pytest.MarkDecorator:
    """On the CPU, and on as many GPUs as there are ranks."""
    return pytest.mark.parametrize(
        "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpus(ranks))]
    )


@on_devices(2)
def test_data_parallel_replicas(device):
    tokens = one_rank(device)
    assert run_ranks(2, _call, {"device": device}) == [tokens[0::2], tokens[1::2]]


@on_devices(2)
def test_pipeline_stages(device):
    options = {"device": device, "pipeline_model_parallel_size": 2, "check_ranks_agree": True}
    assert run_ranks(2, _call, options) == [one_rank(device), None]


@on_devices(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks(device, sequence_parallel):
    options = {
        "device": device,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": sequence_parallel,
        "check_ranks_agree": True,
    }
    assert run_ranks(2, _call, options) == [one_rank(device), None]


@on_devices(4)
def test_tensor_parallel_replicas(device):
    options, tokens = {"device": device, "tensor_model_parallel_size": 2}, one_rank(device)
    assert run_ranks(4, _call, options) == [tokens[0::2], None, tokens[1::2], None]


@on_devices(4)
def test_tensor_parallel_stages(device):
    options = {
        "device": device,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "check_ranks_agree": True,
    }
    assert run_ranks(4, _call, options) == [one_rank(device), None, None, None]


SCARCE = {"num_kv_blocks": 9, "block_size_tokens": 8, "max_tokens": 11, "max_requests": 3}
"""Prompts come in chunks, and two requests of a rank evict each other."""
EXPERTS: dict[str, Any] = {"model": "dummy:tiny-moe", "expert_model_parallel_size": 2}


@on_devices(2)
@pytest.mark.parametrize(
    "settings", [{"lookahead": 0}, {"lookahead": 1}, {"lookahead": 2, **SCARCE}], ids=str
)
def test_expert_parallel_replicas(device, settings):
    tokens = one_rank(device, EXPERTS["model"])
    options = {"device": device, **EXPERTS, **settings}
    assert run_ranks(2, _call, options) == [tokens[0::2], tokens[1::2]]


@on_devices(4)
def test_tensor_and_expert_parallel_ranks(device):
    tokens = one_rank(device, EXPERTS["model"])
    options = {
        "device": device, **EXPERTS, "tensor_model_parallel_size": 2, "check_ranks_agree": True,
    }  # fmt: skip
    assert run_ranks(4, _call, options) == [tokens[0::2], None, tokens[1::2], None]
