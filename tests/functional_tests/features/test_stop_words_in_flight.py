"""Stop words end requests at the same token, with the same text, at every lookahead."""

from __future__ import annotations

import pytest

from megatron_async import LLM, DynamicInferenceEngine, Status
from tests.support.harness import TINY, EngineFactory, Job, drain, greedy, random_prompts, run_at

PROMPT_LENGTHS = (3, 17, 40, 8, 25, 1)
TOKENS = 40


class Letters:
    """A tokenizer for the tiny model: each token is one character of its own."""

    eod = -1

    def tokenize(self, text: str) -> list[int]:
        return [ord(character) - 200 for character in text]

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(chr(200 + token) for token in tokens)


class ByteLetters(Letters):
    """The same, and it tells the bytes of its tokens, so that few of them are looked at."""

    def token_bytes(self, num_tokens: int) -> list[bytes]:
        return [chr(200 + token).encode() for token in range(num_tokens)]


@pytest.fixture
def prompts() -> list[list[int]]:
    return random_prompts(5, PROMPT_LENGTHS, TINY.vocab_size)


@pytest.fixture
def words(make_tiny_engine: EngineFactory, prompts: list[list[int]]) -> list[list[str]]:
    """For each prompt some of the text that it would generate, and words that never come."""
    engine = make_tiny_engine(lookahead=0, max_requests=8)
    texts = [Letters().detokenize(t) for t in run_at(engine, jobs(prompts, [[]] * len(prompts)))]
    spans = ((0, 1), (3, 6), (10, 14), (20, 21), (38, 40))
    return [["never", text[a:b]] for text, (a, b) in zip(texts, spans)] + [["never"]]


def jobs(prompts: list[list[int]], words: list[list[str]]) -> dict[int, list[Job]]:
    made = [Job(p, greedy(TOKENS, stop_words=w or None)) for p, w in zip(prompts, words)]
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
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_equal_at_every_lookahead(
    make_tiny_engine: EngineFactory,
    prompts: list[list[int]],
    words: list[list[str]],
    lookahead: int,
    pressed: bool,
) -> None:
    expected = expected_tokens(make_tiny_engine(lookahead=0, max_requests=8), prompts, words)
    assert sum(map(len, expected)) < len(expected) * TOKENS
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
def test_text_ends_at_the_word(
    make_tiny_engine: EngineFactory, prompts: list[list[int]], words: list[list[str]], keep: bool
) -> None:
    engine = make_tiny_engine(lookahead=1, tokenizer=Letters())
    params = greedy(TOKENS, stop_words=words[2], detokenize_stop_sequence=keep)
    request = engine.generate([prompts[2]], params)[0]
    drain(engine)
    assert request.finish_reason == "stop_word"
    whole = Letters().detokenize(request.generated_tokens)
    assert whole.endswith(words[2][1])
    assert request.generated_text == (whole if keep else whole.removesuffix(words[2][1]))


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_tokenizer_that_fails_ends_its_request_alone(
    make_tiny_engine: EngineFactory, prompts: list[list[int]], lookahead: int
) -> None:
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
