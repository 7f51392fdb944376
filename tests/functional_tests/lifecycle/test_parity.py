"""Every combination of settings gives the same tokens, greedy and sampled, on the tiny model; the
demo model says what `transformers` says, whatever the scheduling."""

import random
from itertools import product
from typing import Any

import pytest
import torch

from megatron_async import SamplingParams
from megatron_async.models import linear
from megatron_async.ops.linear.product_kernel import Wants
from megatron_async.ops.linear.products import CUBLAS, Choice
from tests.support.harness import (
    NUM_TOKENS,
    Job,
    alone_once,
    assert_all_is_back,
    greedy,
    make_engine,
    random_prompts,
    run_alone,
    run_at,
    run_together,
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
PROMPTS = random_prompts(11, LENGTHS)
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
@pytest.mark.parametrize("block_size", [16, 256])
def test_all_settings_agree(make_tiny_engine, alone, kind: str, lookahead, block_size: int):
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


def test_the_projection_may_rotate_and_append(make_tiny_engine, alone, monkeypatch):
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


SMALL_POOL = {"block_size_tokens": 16, "num_kv_blocks": 14}
"""One or two of the eight requests fit at their full lengths."""
SCENARIOS: dict[str, dict[str, Any]] = {
    "serial, small pool": {"lookahead": 0, "max_tokens": 61, **SMALL_POOL},
    "two ahead, large blocks, budget 61": {
        "lookahead": 2,
        "block_size_tokens": 256,
        "max_tokens": 61,
    },
    "two ahead, small pool, budget 7": {
        "lookahead": 2,
        "max_requests": 7,
        "max_tokens": 7,
        **SMALL_POOL,
        "num_kv_blocks": 11,
    },
}
SAMPLING = (
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "seed": 1234},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "seed": 7},
    {"temperature": 1.0, "seed": 2**62},
    {"temperature": 0.6, "top_p": 0.5},
)
SAMPLED_TOKENS = 10


@pytest.fixture(scope="session")
def jobs(smollm2_prompts: list[list[int]]) -> list[Job]:
    return [Job(prompt, greedy(NUM_TOKENS)) for prompt in smollm2_prompts]


@pytest.fixture(scope="session")
def sampled_jobs(smollm2_prompts: list[list[int]]) -> list[Job]:
    limits = {"num_tokens_to_generate": SAMPLED_TOKENS, "termination_id": -1}
    return [
        Job(prompt, SamplingParams(**limits, **mode))
        for prompt, mode in zip(smollm2_prompts, SAMPLING, strict=True)
    ]


def test_prompts_are_varied(smollm2_prompts: list[list[int]]) -> None:
    lengths = sorted(map(len, smollm2_prompts))
    assert lengths[0] == 1
    assert 100 <= lengths[-1] <= 130
    assert len(set(lengths)) == len(lengths)


@pytest.mark.slow
def test_alone(make_smollm2_engine, jobs, transformers_tokens, lookahead):
    mine = slice(lookahead, None, 3)  # every prompt is alone once, at one of the lookaheads
    engine = make_smollm2_engine(lookahead=lookahead, block_size_tokens=16)
    assert run_alone(engine, jobs[mine]) == transformers_tokens[mine]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_together(make_smollm2_engine, jobs, transformers_tokens, name: str):
    engine = make_smollm2_engine(**SCENARIOS[name])
    assert run_together(engine, jobs) == transformers_tokens
    check_pressure(engine.stats(), expected="small pool" in name)


@pytest.mark.slow
def test_arriving_at_random_steps(make_smollm2_engine, jobs, transformers_tokens):
    engine = make_smollm2_engine(lookahead=1, max_tokens=13, **SMALL_POOL)
    order, arrivals = arrive(jobs, seed=0)
    tokens = run_at(engine, arrivals)
    assert tokens == [transformers_tokens[number] for number in order]
    check_pressure(engine.stats(), expected=True)


@pytest.mark.slow
def test_samples_do_not_depend_on_scheduling(make_smollm2_engine, sampled_jobs: list[Job]):
    serial = make_smollm2_engine(lookahead=0, block_size_tokens=16)
    expected = alone_once(serial, sampled_jobs)
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    # Short answers need small blocks to run out of them.
    pool = {"block_size_tokens": 8, "num_kv_blocks": 18}
    engine = make_smollm2_engine(lookahead=2, max_tokens=13, **pool)
    assert run_together(engine, sampled_jobs) == expected
    check_pressure(engine.stats(), expected=True)


def arrive(jobs: list[Job], seed: int) -> tuple[list[int], dict[int, list[Job]]]:
    """Jobs in a random order, each at a random one of the first 30 steps: the order, and the jobs
    of each step."""
    chooser = random.Random(seed)
    order = chooser.sample(range(len(jobs)), len(jobs))
    arrivals: dict[int, list[Job]] = {}
    for number, step in zip(order, sorted(chooser.choices(range(30), k=len(jobs))), strict=True):
        arrivals.setdefault(step, []).append(jobs[number])
    return order, arrivals


def check_pressure(stats: Any, expected: bool) -> None:
    assert (stats["pauses"] > 0) == expected
    assert (stats["evictions"] > 0) == expected
