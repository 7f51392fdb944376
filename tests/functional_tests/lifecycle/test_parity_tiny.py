"""Every combination of settings gives the same tokens, greedy and sampled, on the tiny model."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from megatron_async import SamplingParams
from megatron_async.models import linear
from megatron_async.ops.linear.product_kernel import Wants
from megatron_async.ops.linear.products import CUBLAS, Choice
from tests.support.harness import (
    TINY,
    EngineFactory,
    Job,
    assert_all_is_back,
    greedy,
    make_engine,
    random_prompts,
    run_alone,
    run_at,
)

LENGTHS = (1, 2, 15, 16, 17, 40, 63, 100)
TOKENS = 28
LIMITS = {"num_tokens_to_generate": TOKENS, "termination_id": -1}
MODES = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 10},
    {"temperature": 1.5, "top_p": 0.8, "seed": 5},
    {"temperature": 1.1, "min_p": 0.03},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "seed": 2**63 - 1},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 1.0, "seed": 0},
)
PROMPTS = random_prompts(11, LENGTHS, TINY.vocab_size)
JOBS = {
    "greedy": [Job(prompt, greedy(TOKENS)) for prompt in PROMPTS],
    "sampled": [
        Job(prompt, SamplingParams(**LIMITS, **mode))
        for prompt, mode in zip(PROMPTS, MODES, strict=True)
    ],
}
BUDGETS = (7, 61, 2048)


@pytest.fixture(scope="module")
def alone(tiny_model: torch.nn.Module) -> dict[str, list[list[int]]]:
    """Tokens of each kind of jobs, each job alone and serially."""
    engine = make_engine(tiny_model, lookahead=0, max_requests=7)
    tokens = {kind: run_alone(engine, jobs) for kind, jobs in JOBS.items()}
    engine.close()
    assert_all_is_back(engine)
    return tokens


@pytest.mark.pairs
@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("block_size", [16, 256])
def test_all_settings_agree(
    make_tiny_engine: EngineFactory,
    alone: dict[str, list[list[int]]],
    kind: str,
    lookahead: int,
    block_size: int,
) -> None:
    jobs, expected = JOBS[kind], alone[kind]
    assert len({tuple(tokens) for tokens in expected}) == len(jobs)
    # With large blocks a pool is small when requests have to wait; none can pause.
    pauses = evictions = 0
    pools = {16: (256, 8), 256: (256, 2)}[block_size]
    for budget, pool in product(BUDGETS, pools):
        engine = make_tiny_engine(
            lookahead=lookahead,
            block_size_tokens=block_size,
            max_tokens=budget,
            max_requests=7,
            num_kv_blocks=pool,
        )
        # Ids seed the samples that bring no seed, so the order of arrival stays; the steps vary.
        chooser = random.Random(budget + pool)
        arrivals: dict[int, list[Job]] = {}
        for step, job in zip(sorted(chooser.choices(range(30), k=len(jobs))), jobs, strict=True):
            arrivals.setdefault(step, []).append(job)
        assert run_at(engine, arrivals) == expected, (budget, pool)
        stats = engine.stats()
        pauses, evictions = pauses + stats["pauses"], evictions + stats["evictions"]
    assert (pauses > 0) == (block_size == 16)
    assert (evictions > 0) == (block_size == 16)


def test_the_projection_may_rotate_and_append(
    make_tiny_engine: EngineFactory,
    alone: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One op does both, as on a GPU; here in plain torch, in steps of an odd number of rows."""
    asked: list[bool] = []

    def choose_for(x: torch.Tensor, weight: torch.Tensor, rotate: int = 0, **_: object) -> Choice:
        rotates = rotate if len(x) % 2 else 0
        if rotate:
            asked.append(rotates > 0)
        return Choice(CUBLAS, None, Wants(len(x), rotate=rotates))

    monkeypatch.setattr(linear, "choose_for", choose_for)
    monkeypatch.setattr(linear.InferenceColumnParallelLinear, "may_rotate", True)
    engine = make_tiny_engine(lookahead=1, max_requests=7, max_tokens=61)
    assert run_at(engine, {0: JOBS["greedy"]}) == alone["greedy"]
    assert {True, False} <= set(asked)
