"""Rollback and suspend on a GPU: with captured graphs, and memory that really goes back."""

from __future__ import annotations

import pytest
import torch

from megatron_async import DynamicInferenceEngine
from megatron_async.devices import make_device
from megatron_async.models.architecture import ModelArchitecture
from tests.support.harness import (
    Job,
    assert_all_is_back,
    drain,
    greedy,
    make_engine,
    make_model,
    random_prompts,
    run_at,
)

pytestmark = pytest.mark.gpu

SMALL = ModelArchitecture("llama", 4, 256, 8, 4, 32, 512, 1024, max_position_embeddings=1024)
PROMPTS = random_prompts(3, (5, 33, 1, 64, 17, 90), SMALL.vocab_size)
TOKENS = 40


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model(SMALL, torch.device("cuda"))


def engine_of(model: torch.nn.Module, **config: object) -> DynamicInferenceEngine:
    sizes = {"num_kv_blocks": 2000, "max_requests": 8, "max_tokens": 256}
    return make_engine(model, device=make_device("cuda"), **{**sizes, **config})


@pytest.fixture(scope="module")
def whole(model: torch.nn.Module) -> list[list[int]]:
    jobs = [Job(prompt, greedy(TOKENS)) for prompt in PROMPTS]
    return run_at(engine_of(model, lookahead=0), {0: jobs[:4], 5: jobs[4:]})


@pytest.mark.parametrize("graphs", [None, 0], ids=["captured", "eager"])
@pytest.mark.parametrize("lookahead", [1, 2])
def test_rollback(
    model: torch.nn.Module, whole: list[list[int]], lookahead: int, graphs: int | None
) -> None:
    cut = [tokens[: tokens.index(tokens[4 + 5 * n]) + 1] for n, tokens in enumerate(whole)]
    jobs = [
        Job(prompt, greedy(TOKENS, termination_id=tokens[-1]))
        for prompt, tokens in zip(PROMPTS, cut, strict=True)
    ]
    engine = engine_of(model, lookahead=lookahead, invalidation="rollback", num_cuda_graphs=graphs)
    assert run_at(engine, {0: jobs[:4], 5: jobs[4:]}) == cut
    assert_all_is_back(engine)
    stats = engine.stats()
    assert stats["discarded_steps"] > 0
    assert stats["zombie_rows"] == 0
    assert (stats["captured_steps"] > 0) == (graphs is None)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_suspend_gives_memory_back(
    model: torch.nn.Module, whole: list[list[int]], lookahead: int
) -> None:
    engine = engine_of(model, lookahead=lookahead)
    graphs, cache = engine.controller.graphs, engine.context.gpu_view.kv_cache
    count = graphs.count
    futures = [engine.add_request(i, prompt, greedy(TOKENS)) for i, prompt in enumerate(PROMPTS)]
    told, seen = [], []
    for _ in range(3):
        for _ in range(6):
            engine.step_modern()
        before = torch.cuda.mem_get_info()[0]
        told.append(engine.suspend(free_kv_cache=True))
        seen.append(torch.cuda.mem_get_info()[0] - before)
        assert graphs.count == 0
        engine.resume()
        assert graphs.count == count > 0
    # As the driver counts: what other processes on the GPU take at that moment is missing.
    assert max(told) >= 0.9 * cache.num_bytes
    assert max(seen) >= 0.9 * cache.num_bytes
    captured = engine.stats()["captured_steps"]
    drain(engine)
    assert engine.stats()["captured_steps"] > captured
    assert [future.result().generated_tokens for future in futures] == whole
    assert_all_is_back(engine)
