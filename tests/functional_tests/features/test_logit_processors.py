"""Penalties, biases, min tokens and bad words: equal to a token-by-token loop in `transformers`,
with steps in flight, through chunks, pauses and evictions."""

from __future__ import annotations

import random

import pytest

from megatron_async import SamplingParams
from megatron_async.planning.step_plan import NO_FEATURES
from megatron_async.step.token_sampler import TokenSampler
from tests.support.harness import EngineFactory, Job, greedy, random_prompts, run_at
from tests.support.plain_model import PlainModel

TOKENS = 40
PRESSURE = {"num_kv_blocks": 16, "block_size_tokens": 8, "max_tokens": 24}
"""Less memory than the requests want, and prompts in chunks."""


@pytest.fixture(scope="module")
def plain() -> PlainModel:
    return PlainModel()


def random_params(rng: random.Random, plain_tokens: list[int]) -> SamplingParams:
    """Greedy, with processors that matter: they are about tokens that would come without them."""
    likely = plain_tokens[:12]
    changes: dict[str, object] = {}
    if rng.random() < 0.6:
        changes["frequency_penalty"] = rng.choice([0.3, 1.5, -0.7])
        changes["presence_penalty"] = rng.choice([0.0, 0.9, -0.4])
        changes["repetition_penalty"] = rng.choice([1.0, 1.3, 0.8])
    if rng.random() < 0.5:
        changes["logit_bias"] = {rng.choice(likely): -5.0, rng.randrange(128): 2.0}
    if rng.random() < 0.5:
        changes["bad_words"] = [likely[2:4], [likely[5]], likely[6:10]]
    if rng.random() < 0.5:
        changes |= {"stop_token_ids": sorted(set(likely[:3])), "min_tokens": rng.choice([1, 7, 15])}
    return greedy(TOKENS, **changes)


@pytest.fixture(scope="module")
def jobs(plain: PlainModel) -> list[tuple[Job, list[int]]]:
    """Requests with the tokens that the loop gives them."""
    rng = random.Random(0)
    found = []
    for prompt in random_prompts(5, [3, 17, 40, 9, 25, 12, 31, 5], 128):
        params = random_params(rng, plain.greedy(prompt, greedy(TOKENS)))
        found.append((Job(prompt, params), plain.greedy(prompt, params)))
    return found


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("memory", [{}, PRESSURE], ids=["room", "pressure"])
def test_tokens_are_the_loops(
    make_tiny_engine: EngineFactory,
    jobs: list[tuple[Job, list[int]]],
    lookahead: int,
    memory: dict[str, int],
) -> None:
    engine = make_tiny_engine(lookahead=lookahead, **memory)
    arrivals: dict[int, list[Job]] = {}
    for number, (job, _) in enumerate(jobs):
        arrivals.setdefault(3 * (number // 2), []).append(job)
    assert run_at(engine, arrivals) == [tokens for _, tokens in jobs]
    stats = engine.stats()
    assert (stats["evictions"] > 0) == bool(memory)
    # With too little memory there are moments in which nobody can run before a resolve.
    assert stats["overlap_ratio"] >= (0.95 if memory else 1.0) * bool(lookahead)


def test_the_processors_matter(plain: PlainModel, jobs: list[tuple[Job, list[int]]]) -> None:
    for job, tokens in jobs:
        if job.params != greedy(TOKENS):
            assert tokens != plain.greedy(job.prompt, greedy(TOKENS)), job.params


def test_a_slot_forgets_its_last_request(
    make_tiny_engine: EngineFactory, jobs: list[tuple[Job, list[int]]]
) -> None:
    """One slot: every request has the slot, the counts and the record of the one before."""
    engine = make_tiny_engine(lookahead=1, max_requests=1)
    plain_job = Job(jobs[0][0].prompt, greedy(TOKENS))
    alone = run_at(engine, {0: [plain_job]})
    for job, tokens in jobs:
        assert run_at(engine, {0: [job]}) == [tokens]
        assert run_at(engine, {0: [plain_job]}) == alone


def test_plain_requests_cost_nothing(
    make_tiny_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel of processing is launched and nothing more is copied."""
    engine = make_tiny_engine(lookahead=1)
    monkeypatch.setattr(
        TokenSampler, "_sample_processed", lambda *given: pytest.fail("was processed")
    )
    plans = []
    launch = engine.controller.enqueue_step
    engine.controller.enqueue_step = lambda plan: plans.append(plan) or launch(plan)
    jobs = [Job([1, 2, 3], SamplingParams(temperature=0.9, top_k=5, num_tokens_to_generate=9))]
    run_at(engine, {0: jobs, 2: [Job([4, 5], greedy(9))]})
    assert plans
    assert all(plan.features is NO_FEATURES for plan in plans)
