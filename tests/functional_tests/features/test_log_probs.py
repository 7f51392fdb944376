"""Log probs of prompts and of generated tokens, penalties, biases, min tokens and bad words: equal
to `transformers`, with steps in flight, through chunks, pauses and evictions."""

import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async import DynamicInferenceRequest, SamplingParams
from megatron_async.ops.sampling.sampling import SamplingRows, filter_logits
from megatron_async.planning.step_plan import NO_FEATURES
from megatron_async.requests.sampling_record import sampling_record
from megatron_async.step.token_sampler import TokenSampler
from tests.support.harness import EngineFactory, Job, drain, greedy, random_prompts, run_at
from tests.support.plain_model import PlainModel, process

PROMPTS = random_prompts(3, [3, 1, 40, 9, 25, 12, 31, 2], 128)
TOKENS = 30
PRESSURE = {"num_kv_blocks": 16, "block_size_tokens": 8, "max_tokens": 24}
TOLERANCE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def plain() -> PlainModel:
    return PlainModel()


def asks(**changes: Any) -> SamplingParams:
    return greedy(TOKENS, return_log_probs=True, top_n_logprobs=3, **changes)


def check_alternatives(found: list[list[tuple[int, float]]], expected: torch.Tensor) -> None:
    values, ids = expected.topk(3, dim=-1)
    assert [[token for token, _ in place] for place in found] == ids.tolist()
    ours = torch.tensor([[value for _, value in place] for place in found])
    torch.testing.assert_close(ours, values, **TOLERANCE)


def check(request: DynamicInferenceRequest, plain: PlainModel) -> None:
    prompt, tokens = request.prompt_tokens.tolist(), request.generated_tokens
    everything = prompt + tokens
    log_probs = plain.logits(everything).log_softmax(-1)[:-1]
    chosen = log_probs.gather(1, torch.tensor(everything[1:])[:, None])[:, 0]
    first = len(prompt) - 1
    generated = torch.tensor(request.generated_log_probs)
    torch.testing.assert_close(generated, chosen[first:], **TOLERANCE)
    assert request.log_probs is not None
    check_alternatives(request.log_probs.generated_top_n(), log_probs[first:])
    if request.sampling_params.skip_prompt_log_probs:
        assert request.prompt_log_probs is None
        assert request.prompt_top_n_logprobs is None
        return
    torch.testing.assert_close(torch.tensor(request.prompt_log_probs), chosen[:first], **TOLERANCE)
    if first:
        check_alternatives(request.log_probs.prompt_top_n(), log_probs[:first])


@pytest.mark.parametrize("memory", [{}, PRESSURE], ids=["room", "pressure"])
def test_equal_to_one_full_forward(make_tiny_engine, plain, lookahead, memory: dict[str, int]):
    engine = make_tiny_engine(lookahead=lookahead, **memory)
    params = [asks(skip_prompt_log_probs=number % 3 == 2) for number in range(len(PROMPTS))]
    params[4] = greedy(TOKENS)  # one that asks for nothing among them
    requests = engine.generate(PROMPTS, params)
    for request in requests:
        assert request.error is None
        if request.sampling_params.return_log_probs:
            check(request, plain)
        else:
            assert request.generated_log_probs is None
            assert request.prompt_log_probs is None
    stats = engine.stats()
    assert (stats["evictions"] > 0) == bool(memory)
    # With too little memory there are moments in which nobody can run before a resolve.
    assert stats["overlap_ratio"] >= (0.95 if memory else 1.0) * bool(lookahead)


def test_processed_ones_are_of_what_is_drawn_from(make_tiny_engine, plain: PlainModel, lookahead):
    params = SamplingParams(
        temperature=0.7, top_k=9, top_p=0.95, seed=3, num_tokens_to_generate=TOKENS,
        termination_id=-1, return_log_probs=True, top_n_logprobs=12, logprobs_mode="processed",
        frequency_penalty=0.5, repetition_penalty=1.2, bad_words=[[7], [3, 4]],
    )  # fmt: skip
    request = make_tiny_engine(lookahead=lookahead).generate([PROMPTS[3]], params)[0]
    prompt, tokens = PROMPTS[3], request.generated_tokens
    logits = plain.logits(prompt + tokens)
    assert request.log_probs is not None
    for place, found in enumerate(request.log_probs.generated_top_n()):
        at = logits[len(prompt) - 1 + place]
        scaled = process(at, prompt, tokens[:place], params)[None] / params.temperature
        record = sampling_record(
            params, seed=0, prompt_length=1, max_length=9, vocab_size=logits.size(1)
        )
        first = torch.zeros(1, dtype=torch.int64)
        filters = SamplingRows(first, first.int(), torch.from_numpy(record.words)[None])
        expected = filter_logits(scaled, filters).log_softmax(-1)[0]
        assert np.isclose(request.generated_log_probs[place], expected[tokens[place]], atol=1e-4)
        # Filtered tokens are no alternatives: there may be fewer than asked for.
        values, ids = expected.topk(min(12, int((expected > -torch.inf).sum())))
        assert [token for token, _ in found] == ids.tolist()
        assert np.allclose([value for _, value in found], values, atol=1e-4)


def test_by_text_as_megatron_gives_them(make_tiny_engine: EngineFactory) -> None:
    class Letters:
        """Two tokens for each letter."""

        eod = None

        def tokenize(self, text: str) -> list[int]:
            return [2 * ord(letter) for letter in text]

        def detokenize(self, ids: list[int]) -> str:
            return "".join(chr(97 + token // 2) for token in ids)

    engine = make_tiny_engine(tokenizer=Letters())
    request = engine.generate([PROMPTS[0]], asks(echo=True))[0]
    assert request.log_probs is not None
    for by_text, by_id in zip(
        request.generated_top_n_logprobs, request.log_probs.generated_top_n(), strict=True
    ):
        assert max(by_text.values()) == by_id[0][1]
        assert set(by_text) == {chr(97 + token // 2) for token, _ in by_id}
    letters = [chr(97 + token // 2) for token in PROMPTS[0] + request.generated_tokens]
    assert request.generated_text == "".join(letters)


@pytest.mark.parametrize(("top_n", "most_bytes"), [(0, 40), (20, 400)])
def test_memory_does_not_grow_with_the_batch(
    make_tiny_engine: EngineFactory, lookahead: int, top_n: int, most_bytes: int
) -> None:
    """What a token keeps, beside 31 rows that ask too (164 bytes each, 5,248 together). Break
    `add_generated`: keep `words`, which is a view of all rows'."""
    rows = 32
    engine = make_tiny_engine(lookahead=lookahead, max_requests=rows)
    asks = greedy(120, return_log_probs=True, top_n_logprobs=top_n, skip_prompt_log_probs=True)
    futures = [engine.add_request(n, [n, 5, 7], asks) for n in range(rows)]
    for _ in range(20):
        engine.step_modern()
    grown = []
    tracemalloc.start()
    try:
        # In turns: what another thread of the process allocates once is in one of them.
        for _ in range(4):
            before, at_first = (
                tracemalloc.get_traced_memory()[0],
                engine.statistics.generated_tokens,
            )
            for _ in range(20):
                engine.step_modern()
            tokens = engine.statistics.generated_tokens - at_first
            assert tokens >= 15 * rows
            grown.append((tracemalloc.get_traced_memory()[0] - before) / tokens)
    finally:
        tracemalloc.stop()
    assert min(grown) < most_bytes, grown
    drain(engine)
    for future in futures:
        log_probs = future.result().log_probs
        assert log_probs is not None
        assert len(log_probs.generated()) == 120


ANSWER = 40
"""Less memory than the requests want, and prompts in chunks."""


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
    return greedy(ANSWER, **changes)


@pytest.fixture(scope="module")
def jobs(plain: PlainModel) -> list[tuple[Job, list[int]]]:
    """Requests with the tokens that the loop gives them."""
    rng = random.Random(0)
    found = []
    for prompt in random_prompts(5, [3, 17, 40, 9, 25, 12, 31, 5], 128):
        params = random_params(rng, plain.greedy(prompt, greedy(ANSWER)))
        found.append((Job(prompt, params), plain.greedy(prompt, params)))
    return found


@pytest.mark.parametrize("memory", [{}, PRESSURE], ids=["room", "pressure"])
def test_tokens_are_the_loops(make_tiny_engine, jobs, lookahead, memory: dict[str, int]):
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
        if job.params != greedy(ANSWER):
            assert tokens != plain.greedy(job.prompt, greedy(ANSWER)), job.params


def test_a_slot_forgets_its_last_request(make_tiny_engine, jobs: list[tuple[Job, list[int]]]):
    """One slot: every request has the slot, the counts and the record of the one before."""
    engine = make_tiny_engine(lookahead=1, max_requests=1)
    plain_job = Job(jobs[0][0].prompt, greedy(ANSWER))
    alone = run_at(engine, {0: [plain_job]})
    for job, tokens in jobs:
        assert run_at(engine, {0: [job]}) == [tokens]
        assert run_at(engine, {0: [plain_job]}) == alone


def test_plain_requests_cost_nothing(make_tiny_engine, monkeypatch):
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
