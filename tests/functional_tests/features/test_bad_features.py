"""Twenty malformed values of each feature: a clear error that names value and remedy, and nobody
else is harmed."""

import math
import re
from typing import Any

import pytest

from megatron_async import InferenceConfig, SamplingParams, Status
from megatron_async.errors import ConfigurationError, RequestError
from tests.support.harness import EngineFactory, drain, greedy

ODD: tuple[Any, ...] = (math.nan, math.inf, -math.inf, "1", None, [1], (2,), {}, 1j)
NAN_TOKEN = [[math.nan]]
BAD: dict[str, list[dict[str, Any]]] = {
    "log probs": [
        *({"return_log_probs": value} for value in (1, 0, "yes", None, 2.0, [True])),
        *({"skip_prompt_log_probs": value} for value in ("no", None, 3)),
        *(
            {"return_log_probs": True, "top_n_logprobs": value}
            for value in (-1, 21, 1.5, "3", None, math.nan, True)
        ),
        {"top_n_logprobs": 1},
        *({"logprobs_mode": value} for value in ("", "Raw", None, 1, "raw_logits")),
    ],
    "penalties": [
        *({"frequency_penalty": value} for value in (*ODD, -2.1, 2.1)),
        *({"presence_penalty": value} for value in (-3, 100, "0")),
        *({"repetition_penalty": value} for value in (*ODD, 0, -1, 101)),
    ],
    "logit bias": [
        *({"logit_bias": value} for value in (5, "a", [1], [(1, 2)], 0.5, True)),
        *({"logit_bias": {token: 1.0}} for token in (-1, 128, 1.5, "1", None, True, (1,))),
        *({"logit_bias": {1: value}} for value in (*ODD, 101, -100.5)),
    ],
    "min tokens": [
        *({"min_tokens": value} for value in (-1, 1.5, *ODD, True, "all")),
        *({"min_tokens": value, "num_tokens_to_generate": 4} for value in (5, 6, 10**9)),
        {"min_tokens": 2, "stop_token_ids": list(range(128))},
        {"min_tokens": 1, "stop_token_ids": [128]},
        {"min_tokens": 1, "stop_token_ids": [-2]},
        {"min_tokens": 1, "stop_token_ids": ["a"]},
        {"min_tokens": [2], "stop_token_ids": [1]},
    ],
    "bad words": [
        *({"bad_words": value} for value in (1, "word", (1,), {}, {1: 2}, True)),
        *({"bad_words": [value]} for value in (1, None, (), [], "", "  ", "word", [128], [-1])),
        *({"bad_words": [[value]]} for value in (1.5, "a", None, True)),
        {"bad_words": NAN_TOKEN},
        {"bad_words": [[1] * 17]},
        {"bad_words": [[1, token] for token in range(65)]},
        {"bad_words": [[token] for token in range(128)]},
        {"bad_words": [[1] * 10**6]},
        {"bad_words": [[1]] * 65},
    ],
    "stop words": [
        *({"stop_words": value} for value in (1, "word", (1,), {}, {"a": 2}, True, 2.5)),
        *({"stop_words": [value]} for value in (1, None, (), [], "", 1.5, b"a", True, "word", 2j)),
        *({"stop_words": ["good", value]} for value in (3, "", None, "long" * 65)),
        {"stop_words": [f"{number}" for number in range(10**4)]},
    ],
    "stop tokens": [
        *({"stop_token_ids": value} for value in (1, True, {"a": 2}, 2.5, "12", {None}, "word")),
        *({"stop_token_ids": [value]} for value in (1.5, "1", -1, 128, 2**70, [1], b"1", (), 2j)),
        *({"stop_token_ids": [1] * count} for count in (129, 130, 1000, 10**6)),
    ],
    "echo": [
        {"echo": value}
        for value in (0, 1, "yes", "True", *ODD, [True], 2, "", b"", -1, 0.0, (), {"echo": True})
    ],
}


@pytest.mark.parametrize("feature", BAD)
def test_bad_values_fail_alone(make_tiny_engine: EngineFactory, feature: str) -> None:
    assert len(BAD[feature]) >= 20
    good = greedy(12, return_log_probs=True, frequency_penalty=0.5, bad_words=[[3, 4]])
    prompt = [3, 1, 4, 1, 5]
    want = make_tiny_engine(lookahead=0).generate([prompt], good)[0]
    engine = make_tiny_engine(lookahead=1)
    served = engine.add_request(1000, prompt, good)
    for number, changes in enumerate(BAD[feature]):
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=12)
        for name, value in changes.items():
            setattr(params, name, value)
        request = engine.add_request(number, prompt, params).result()
        assert request.status == Status.FAILED, changes
        assert isinstance(request.error, RequestError), (changes, request.error)
        message = str(request.error)
        assert any(name in message for name in (*changes, "bad word")), message
        assert any(word in message for word in ("must", "set", "give", "most", "lower", "leave"))
        engine.step_modern()
    drain(engine)
    assert engine.context.slots.stop_ids.shape[1] == 1  # as many as the request that was served has
    assert served.result().generated_tokens == want.generated_tokens
    assert served.result().generated_log_probs == pytest.approx(want.generated_log_probs)


NUMBERS: tuple[Any, ...] = (
    *ODD, 0.5, "0", b"1", True, False, [0], {0}, 2**70, -(2**70), range(3), object, 1 + 0j,
)  # fmt: skip


def test_bad_priorities_fail_alone(make_tiny_engine: EngineFactory) -> None:
    engine = make_tiny_engine(lookahead=1)
    served = engine.add_request(1000, [3, 1, 4], greedy(12))
    bad = [value for value in NUMBERS if value is not None] + [None, 2**20 + 1, -(2**20) - 1]
    assert len(bad) >= 20
    for number, priority in enumerate(bad):
        request = engine.add_request(number, [1, 2], greedy(3), priority).result()
        assert isinstance(request.error, RequestError), priority
        assert "priority=" in str(request.error)
        assert "must" in str(request.error)
        engine.step_modern()
    drain(engine)
    assert served.result().generated_length == 12


@pytest.mark.parametrize("method", ["abort_request", "stream", "get_request"])
def test_ids_that_nobody_has(make_tiny_engine: EngineFactory, method: str) -> None:
    """Such ids raise KeyError, or TypeError where they cannot be an id, and change nothing."""
    engine = make_tiny_engine(lookahead=1)
    served = engine.add_request(7, [3, 1, 4], greedy(12))
    bad = [value for value in NUMBERS if value not in (7, 7.0)] + [-1, 8, 10**9, "7"]
    assert len(bad) >= 20
    for request_id in bad:
        with pytest.raises((KeyError, TypeError)):
            getattr(engine, method)(request_id)
        engine.step_modern()
    drain(engine)
    assert served.result().generated_length == 12


@pytest.mark.parametrize("name", ["logging_step_interval", "lookahead", "invalidation"])
def test_bad_settings_raise_at_once(name: str) -> None:
    bad = [value for value in NUMBERS if value not in (None, 2**70)]  # any interval is served
    bad += [-1, -100, "async", "Rollback", 1.0]
    assert len(bad) >= 20
    for value in bad:
        with pytest.raises(ConfigurationError, match=name):
            InferenceConfig(**{name: value})


class LettersOnly:
    """A tokenizer that tells what it was given to tokenize."""

    eod = None

    def __init__(self) -> None:
        self.most = 0

    def tokenize(self, text: str) -> list[int]:
        self.most = max(self.most, len(text))
        return [ord(letter) % 128 for letter in text]

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a" * 257], r"bad_words has the word 'aaa.* of 257 characters: at most 256"),
        (["b" * 10**6], r"1000000 characters"),
        (["c" * 20], r"the bad word 'c+' has 20 tokens: at most 16"),
        ([f"{n}" for n in range(10**5)], r"bad_words has 100000 words: at most 64"),
    ],
)
def test_large_bad_words_are_refused_before_they_are_tokenized(
    make_tiny_engine: EngineFactory, words: list[str], message: str
) -> None:
    """Many words would hold up the engine's thread. Break `_bad_words`: count only what was
    tokenized."""
    tokenizer = LettersOnly()
    engine = make_tiny_engine(tokenizer=tokenizer)
    request = engine.add_request(0, [1, 2], greedy(3, bad_words=words)).result()
    assert isinstance(request.error, RequestError)
    assert re.search(message, str(request.error))
    assert len(str(request.error)) < 200
    assert tokenizer.most <= 21
    drain(engine)
