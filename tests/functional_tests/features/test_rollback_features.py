"""What sampling remembers of a request's tokens, log probs and stop words, when steps are taken
back."""

import random
from typing import Any

import pytest
import torch

from megatron_async import (
    LLM,
    DynamicInferenceEngine,
    DynamicInferenceRequest,
    SamplingParams,
    Status,
)
from megatron_async.ops.sampling.slot_records import WINDOW
from tests.support.harness import (
    EngineFactory,
    Job,
    drain,
    greedy,
    make_engine,
    random_prompts,
    run_at,
)
from tests.support.letter_tokenizers import Letters

TOKENS = 30
PROMPTS = random_prompts(9, (5, 33, 2, 14, 40, 21, 8, 1))
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
def test_equal_to_serial(make_tiny_engine, serial, lookahead, settings: str):
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


PROMPT_LENGTHS = (3, 17, 40, 8, 25, 1)
LONG = 40


class ByteLetters(Letters):
    """A letter tokenizer which tells the bytes of its tokens, so that few of them are looked at."""

    def token_bytes(self, num_tokens: int) -> list[bytes]:
        return [chr(200 + token).encode() for token in range(num_tokens)]


@pytest.fixture
def prompts() -> list[list[int]]:
    return random_prompts(5, PROMPT_LENGTHS)


@pytest.fixture
def words(make_tiny_engine: EngineFactory, prompts: list[list[int]]) -> list[list[str]]:
    """For each prompt some of the text that it would generate, and words that never come."""
    engine = make_tiny_engine(lookahead=0, max_requests=8)
    texts = [Letters().detokenize(t) for t in run_at(engine, jobs(prompts, [[]] * len(prompts)))]
    spans = ((0, 1), (3, 6), (10, 14), (20, 21), (38, 40))
    return [["never", text[a:b]] for text, (a, b) in zip(texts, spans)] + [["never"]]


def jobs(prompts: list[list[int]], words: list[list[str]]) -> dict[int, list[Job]]:
    made = [Job(p, greedy(LONG, stop_words=w or None)) for p, w in zip(prompts, words)]
    return {0: made[:3], 4: made[3:]}


def expected_tokens(
    engine: DynamicInferenceEngine, prompts: list[list[int]], words: list[list[str]]
) -> list[list[int]]:
    """Tokens without stop words, cut where the text first contains one."""
    cut = []
    for tokens, mine in zip(run_at(engine, jobs(prompts, [[]] * len(prompts))), words):
        ends = [
            n + 1
            for n in range(len(tokens))
            if any(word in Letters().detokenize(tokens[: n + 1]) for word in mine)
        ]
        cut.append(tokens[: min(ends, default=len(tokens))])
    return cut


@pytest.mark.parametrize("pressed", [False, True], ids=["roomy", "evictions"])
def test_equal_at_every_lookahead(make_tiny_engine, prompts, words, lookahead, pressed: bool):
    expected = expected_tokens(make_tiny_engine(lookahead=0, max_requests=8), prompts, words)
    assert sum(map(len, expected)) < len(expected) * LONG
    memory = {"num_kv_blocks": 10, "block_size_tokens": 8, "paused_buffer_size_gb": 1e-9}
    tokenizer = Letters() if lookahead == 1 else ByteLetters()
    engine = make_tiny_engine(
        lookahead=lookahead, max_requests=8, tokenizer=tokenizer, **(memory if pressed else {})
    )
    assert run_at(engine, jobs(prompts, words)) == expected
    stats = engine.stats()
    assert (stats["evictions"] > 0) == pressed
    if not pressed:
        assert (stats["zombie_rows"] > 0) == (lookahead > 0)
    if lookahead:
        assert stats["overlap_ratio"] > 0.9


@pytest.mark.parametrize("keep", [False, True])
def test_text_ends_at_the_word(make_tiny_engine, prompts, words, keep: bool):
    engine = make_tiny_engine(lookahead=1, tokenizer=Letters())
    params = greedy(LONG, stop_words=words[2], detokenize_stop_sequence=keep)
    request = engine.generate([prompts[2]], params)[0]
    drain(engine)
    assert request.finish_reason == "stop_word"
    whole = Letters().detokenize(request.generated_tokens)
    assert whole.endswith(words[2][1])
    assert request.generated_text == (whole if keep else whole.removesuffix(words[2][1]))


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_tokenizer_that_fails_ends_its_request_alone(make_tiny_engine, prompts, lookahead):
    calls = 0

    class Failing(Letters):
        def detokenize(self, tokens: list[int]) -> str:
            nonlocal calls
            calls += 1
            if calls == 9:
                raise KeyError("no such piece")
            return super().detokenize(tokens)

    engine = make_tiny_engine(lookahead=lookahead, tokenizer=Failing())
    params = [greedy(12, stop_words=["never"]), greedy(12)]
    broken, other = engine.generate(prompts[:2], params)
    drain(engine)
    assert broken.status == Status.FAILED
    assert "no such piece" in str(broken.error)
    assert other.status == Status.COMPLETED
    assert len(other.generated_tokens) == 12


def test_real_text(smollm2_llm: LLM) -> None:
    """The demo model: a word made of several tokens, and one inside a token."""
    prompt = "The capital of France is"
    whole = smollm2_llm.generate(prompt, greedy(24))[0].generated_text
    assert whole is not None
    for start, length in ((3, 12), (11, 2), (20, 9)):
        word = whole[start : start + length]
        request = smollm2_llm.generate(prompt, greedy(24, stop_words=[word]))[0]
        assert request.finish_reason == "stop_word"
        assert request.generated_text == whole[: whole.find(word)]
