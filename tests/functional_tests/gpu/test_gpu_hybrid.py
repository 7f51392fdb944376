"""Hybrid models on a GPU: the CPU's tokens, whatever happens meanwhile; steps captured."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine, SamplingParams
from megatron_async.devices import CudaDevice
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from tests.support.harness import (
    Job,
    drain,
    greedy,
    make_engine,
    make_model,
    random_prompts,
    run_at,
)
from tests.support.poison import poison_states
from tests.support.tiny_launches import watch_state_plans

pytestmark = pytest.mark.gpu
MAMBA = replace(DUMMY_SHAPES["tiny-hybrid"], kv_channels=32, mamba_head_dim=32, mamba_state_dim=64)
SHAPES = {
    "Mamba-2": MAMBA,
    "Gated DeltaNet": replace(
        DUMMY_SHAPES["tiny-gated-delta"],
        kv_channels=32,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
    ),
}
VOCABULARY = MAMBA.vocab_size
"""Vocabulary of both."""
LENGTHS = (1, 5, 33, 64, 17, 100, 2, 48, 300, 128, 129, 3)
TOKENS = 48
ROOM = {"num_kv_blocks": 128, "max_requests": 12, "block_size_tokens": 16}
CASES: dict[str, dict[str, Any]] = {
    "serial": {"lookahead": 0, "num_cuda_graphs": 0},
    "captured": {"lookahead": 1},
    "two ahead": {"lookahead": 2, "max_tokens": 96},
    "small chunks": {"lookahead": 1, "max_tokens": 13},
    "few slots": {"lookahead": 2, "max_requests": 3},
    "evictions": {"lookahead": 1, "num_kv_blocks": 40, "paused_buffer_size_gb": 1e-9},
    "rollback": {"lookahead": 2, "invalidation": "rollback"},
}


def jobs(params: SamplingParams | None = None) -> list[Job]:
    prompts = random_prompts(0, LENGTHS, VOCABULARY)
    return [Job(prompt, params or greedy(TOKENS)) for prompt in prompts]


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> ModelArchitecture:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def cpu_tokens(shape: ModelArchitecture) -> list[list[int]]:
    engine = make_engine(make_model(shape), lookahead=0, max_tokens=512, **ROOM)
    tokens = run_at(engine, {0: jobs()})
    engine.close()
    return tokens


@pytest.fixture(scope="module")
def gpu_model(shape: ModelArchitecture) -> torch.nn.Module:
    torch.backends.cuda.matmul.allow_tf32 = False
    return make_model(shape, torch.device("cuda"))


@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_the_cpus(gpu_model: torch.nn.Module, cpu_tokens: list[list[int]], name: str):
    engine = make_engine(gpu_model, device=CudaDevice(), **{**ROOM, **CASES[name]})
    poison_states(engine)
    found = run_at(engine, {0: jobs()[:5], 4: jobs()[5:]})
    stats = engine.stats()
    drain(engine)
    engine.close()
    assert found == cpu_tokens
    assert (stats["captured_steps"] > 0) == (name != "serial")
    assert stats["evictions"] > 0 or name != "evictions"


def test_requests_beside_one_that_ends_unforeseen(gpu_model, cpu_tokens, invalidation):
    engine = make_engine(
        gpu_model, device=CudaDevice(), lookahead=2, invalidation=invalidation, **ROOM
    )
    poison_states(engine)
    mine, wanted = [], []
    for number, (job, tokens) in enumerate(zip(jobs(), cpu_tokens, strict=True)):
        at = tokens.index(tokens[2 + 3 * number])
        mine.append(Job(job.prompt, greedy(TOKENS, stop_token_ids=[tokens[at]])))
        wanted.append(tokens[: at + 1])
    assert run_at(engine, {0: mine[:5], 4: mine[5:]}) == wanted
    assert (engine.stats()["discarded_steps"] > 0) == (invalidation == "rollback")


def test_steps_wait_for_nothing(gpu_model: torch.nn.Module) -> None:
    engine = make_engine(gpu_model, device=CudaDevice(), lookahead=1, **ROOM)
    for number, job in enumerate(jobs()):
        engine.add_request(number, job.prompt, greedy(90))
    for _ in range(12):
        engine.step_modern()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step_modern()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    drain(engine)


TEXT = random_prompts(4, (400,), VOCABULARY)[0]


def two_turns(engine: DynamicInferenceEngine) -> list[list[int]]:
    """Prompts that begin alike, one at each third step; then each goes on with what it was told."""
    first = [Job([*TEXT[: 140 + 30 * n], n], greedy(TOKENS)) for n in range(6)]
    told = run_at(engine, {3 * n: [job] for n, job in enumerate(first)})
    second = [
        Job([*job.prompt, *tokens, 7], greedy(TOKENS))
        for job, tokens in zip(first, told, strict=True)
    ]
    return told + run_at(engine, {3 * n: [job] for n, job in enumerate(second)}, first_id=6)


@pytest.mark.parametrize("changes", [{}, {"num_state_snapshots": 3}, {"lookahead": 2}], ids=str)
def test_shared_states(shape, gpu_model, changes: dict[str, Any]):
    """Requests begin from snapshots, which scans and decode rows of captured steps have left."""
    plain = make_engine(make_model(shape), lookahead=0, max_tokens=512, **ROOM)
    expected = two_turns(plain)
    plain.close()
    settings = {**ROOM, "lookahead": 1, "enable_prefix_caching": True, **changes}
    engine = make_engine(gpu_model, device=CudaDevice(), **settings)
    poison_states(engine)
    watch_state_plans(engine)
    assert two_turns(engine) == expected
    stats = engine.stats()
    engine.close()
    assert stats["captured_steps"] > stats["steps"] / 2
    assert stats["prefix_cache_snapshot_hits"] >= 6
