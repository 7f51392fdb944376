"""Pipelines of GPUs: stages captured, messages between the graphs, and one rank's tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megatron_async.devices import CpuDevice, Device, make_device
from megatron_async.models.architecture import ModelArchitecture
from tests.support.cards import on_cards
from tests.support.harness import Job, drain, greedy, make_engine, random_prompts
from tests.support.pipeline_scenarios import JOBS, Result, everything, stage_model
from tests.support.ranks import run_ranks

# Heads that the kernels serve, and a number of layers that neither two nor four divides.
SHAPE = ModelArchitecture(
    "llama", 5, 128, 4, 2, 32, 256, 128, tie_word_embeddings=True, max_position_embeddings=1024
)
ROOM = {"num_kv_blocks": 64, "block_size_tokens": 16, "max_tokens": 64, "max_requests": 6}
PRESSURE = {**ROOM, "num_kv_blocks": 12}
LONG = [Job(prompt, greedy(80)) for prompt in random_prompts(4, [5, 19, 1, 40, 33, 8], 127)]
CASES = [
    (0, 4, ROOM, JOBS),
    (1, 4, ROOM, JOBS),
    (3, 4, ROOM, JOBS),
    (2, 0, ROOM, JOBS),
    (2, 4, PRESSURE, LONG),
]
"""Lookahead, graphs, settings, requests."""


def run(
    stages: int, cases: list[Any], device_of: Callable[[], Device]
) -> list[tuple[list[Result], dict[str, float | int]]]:
    """Outcomes and counters of cases."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = stage_model(stages, SHAPE, device_of().torch_device)
    found = []
    for lookahead, graphs, settings, jobs in cases:
        engine = make_engine(
            model, device=device_of(), lookahead=lookahead, num_cuda_graphs=graphs, **settings
        )
        done = everything(engine.generate(*zip(*((job.prompt, job.params) for job in jobs))))
        drain(engine)
        found.append((done, dict(engine.stats())))
        engine.close()
    return found


@pytest.fixture(scope="module", params=on_cards([2, 4]))
def all_stages(request: pytest.FixtureRequest) -> list[list[Any]]:
    count = request.param
    return run_ranks(count, run, count, CASES, partial(make_device, "cuda"), timeout_s=300)


def test_stages_say_what_the_cpu_says(all_stages: list[list[Any]]) -> None:
    alone = run(1, [(0, 0, ROOM, jobs) for jobs in (JOBS, LONG)], CpuDevice)
    for rank in all_stages:
        for case, (requests, _) in zip(CASES, rank, strict=True):
            wanted, _ = alone[case[3] is LONG]
            for got, expected in zip(requests, wanted, strict=True):
                assert got["tokens"] == expected["tokens"], case
                for key in ("log probs", "prompt log probs"):
                    if expected[key] is not None:
                        assert got[key] == pytest.approx(expected[key], abs=1e-3), case


def test_steps_were_captured_and_requests_evicted(all_stages: list[list[Any]]) -> None:
    for rank in all_stages:
        counters = [stats for _, stats in rank]
        assert all(stats["captured_steps"] > 0 for stats in counters[:3])
        assert counters[3]["captured_steps"] == 0
        assert counters[4]["pauses"] > 0
        assert all(stats["failed_steps"] == 0 for stats in counters)


def no_hidden_wait(stages: int) -> None:
    """Steady decode with synchronisation forbidden on the host."""
    model = stage_model(stages, SHAPE, make_device("cuda").torch_device)
    engine = make_engine(model, device=make_device("cuda"), lookahead=2, **ROOM)
    for number, prompt in enumerate(random_prompts(1, [5, 9, 3, 7], 127)):
        engine.add_request(number, prompt, greedy(40))
    for _ in range(12):
        engine.step_modern()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step_modern()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    drain(engine)
    engine.close()


@pytest.mark.parametrize("stages", on_cards([2, 4]))
def test_steps_wait_for_nothing_else(stages: int) -> None:
    run_ranks(stages, no_hidden_wait, stages, timeout_s=200)
