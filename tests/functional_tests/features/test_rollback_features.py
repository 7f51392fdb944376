"""What sampling remembers of a request's tokens, and log probs, when steps are taken back."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine, SamplingParams
from megatron_async.ops.sampling.slot_records import WINDOW
from megatron_async.requests.inference_request import DynamicInferenceRequest
from tests.support.harness import TINY, EngineFactory, drain, greedy, make_engine, random_prompts

TOKENS = 30
PROMPTS = random_prompts(9, (5, 33, 2, 14, 40, 21, 8, 1), TINY.vocab_size)
VICTIMS = {2: 6, 5: 13}
"""Requests that are aborted, and before which step."""
TWO = [greedy(TOKENS)] * 2
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks": {"max_tokens": 12},
    "evictions": {
        "num_kv_blocks": 22,
        "block_size_tokens": 4,
        "max_tokens": 24,
        "paused_buffer_size_gb": 1e-9,
    },
}


def params_of(number: int, likely: list[int]) -> dict[str, Any]:
    """Processors about tokens that would come without them, for all but one request."""
    chooser = random.Random(number)
    if number == 3:
        return {}
    found: dict[str, Any] = {"return_log_probs": True, "top_n_logprobs": 2}
    found["skip_prompt_log_probs"] = number % 2 == 0
    if number % 3:
        found["frequency_penalty"] = chooser.choice([0.4, 1.5])
        found["presence_penalty"] = chooser.choice([0.0, 0.8])
        found["repetition_penalty"] = chooser.choice([1.0, 1.3])
    if number % 2:
        found["bad_words"] = [likely[2:4], [likely[5]], likely[6:10]]
    return found


def run(
    engine: DynamicInferenceEngine, params: list[SamplingParams], victims: dict[int, int]
) -> list[DynamicInferenceRequest]:
    futures = []
    for step in range(20):
        for number in range(2 * step, min(2 * step + 2, len(PROMPTS))):
            futures.append(engine.add_request(number, PROMPTS[number], params[number]))
        for number, at in victims.items():
            if at == step and not futures[number].done():
                engine.abort_request(number)
        engine.step_modern()
    drain(engine)
    return [future.result() for future in futures]


@pytest.fixture(scope="module")
def serial(tiny_model: torch.nn.Module) -> list[DynamicInferenceRequest]:
    """The requests, finished serially. Stop tokens end each early, most at different times."""
    engine = make_engine(tiny_model, lookahead=0, max_requests=8)
    plain = engine.generate(PROMPTS, greedy(TOKENS))
    features = [params_of(n, request.generated_tokens) for n, request in enumerate(plain)]
    whole = engine.generate(PROMPTS, [greedy(TOKENS, **mine) for mine in features])
    params = [
        greedy(TOKENS, termination_id=request.generated_tokens[6 + 3 * number], **mine)
        for number, (request, mine) in enumerate(zip(whole, features, strict=True))
    ]
    requests = run(engine, params, {})
    engine.close()
    return requests


def check_equal(found: DynamicInferenceRequest, expected: DynamicInferenceRequest) -> None:
    length = found.generated_length
    if found.finish_reason != "aborted":
        assert length == expected.generated_length
    assert found.generated_tokens == expected.generated_tokens[:length]
    if not found.sampling_params.return_log_probs:
        return
    assert expected.generated_log_probs is not None
    assert len(found.generated_log_probs or []) == length
    pairs = [(found.generated_log_probs, expected.generated_log_probs[:length])]
    if found.finish_reason != "aborted":  # perhaps before its prompt was through
        pairs.append((found.prompt_log_probs, expected.prompt_log_probs))
    for ours, theirs in pairs:
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_equal_to_serial(
    make_tiny_engine: EngineFactory,
    serial: list[DynamicInferenceRequest],
    lookahead: int,
    settings: str,
) -> None:
    params = [request.sampling_params for request in serial]
    for victims in ({}, VICTIMS):
        engine = make_tiny_engine(
            lookahead=lookahead, invalidation="rollback", **SETTINGS[settings]
        )
        for ours, theirs in zip(run(engine, params, victims), serial, strict=True):
            assert ours.error is None or ours.finish_reason == "aborted"
            check_equal(ours, theirs)
        stats = engine.stats()
        assert stats["discarded_steps"] > 0
        assert (stats["evictions"] > 0) == (settings == "evictions")


def test_the_longest_bad_word(make_tiny_engine: EngineFactory) -> None:
    """Discarded steps write over the oldest tokens that it must still match, if they come just
    before its end."""
    serial = make_tiny_engine(lookahead=0)
    first, second = (request.generated_tokens for request in serial.generate(PROMPTS[:2], TWO))
    banned = greedy(TOKENS, bad_words=[first[3 : 3 + WINDOW]])
    expected = serial.generate(PROMPTS[:1], banned)[0].generated_tokens
    assert expected != first
    discarded = 0
    for stop in range(12, 22):
        if second[stop] in second[:stop]:
            continue
        engine = make_tiny_engine(lookahead=3, invalidation="rollback")
        other = greedy(TOKENS, termination_id=second[stop])
        found = engine.generate(PROMPTS[:2], [banned, other])
        assert [request.generated_tokens for request in found] == [expected, second[: stop + 1]]
        drain(engine)
        discarded += int(engine.stats()["discarded_steps"])
    assert discarded >= 6
