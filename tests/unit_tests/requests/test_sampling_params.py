"""`SamplingParams`: what is allowed, what is greedy, and the words of them that kernels read."""

import math

import numpy as np
import pytest
import torch

from megatron_async import SamplingParams, StructuredOutput
from megatron_async.errors import RequestError
from megatron_async.ops.sampling.sampling import SamplingMode, SamplingRows
from megatron_async.ops.sampling.slot_records import (
    FLOAT_WORDS,
    FOREVER,
    HEADER,
    Header,
    RowFeature,
)
from megatron_async.requests.sampling_record import SamplingRecord, sampling_record

VOCABULARY = 100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": -0.1}, ("temperature=-0.1", "0 (greedy) or more")),
        ({"temperature": math.nan}, ("temperature=nan",)),
        ({"temperature": math.inf}, ("temperature=inf",)),
        ({"temperature": "1"}, ("temperature='1'",)),
        ({"temperature": None}, ("temperature=None",)),
        ({"top_p": 1.0001}, ("top_p=1.0001", "between 0 (off) and 1")),
        ({"top_p": -1e-9}, ("top_p=-1e-09",)),
        ({"top_p": math.nan}, ("top_p=nan",)),
        ({"min_p": 1.5}, ("min_p=1.5", "between 0 (off) and 1")),
        ({"top_k": -1}, ("top_k=-1", "0 (off) or more")),
        ({"top_k": 2.0}, ("top_k=2.0", "integer")),
        ({"top_k": True}, ("top_k=True", "integer")),
        ({"seed": -1}, ("seed=-1", "2**63 - 1")),
        ({"seed": 2**63}, (f"seed={2**63}", "2**63 - 1")),
        ({"num_tokens_to_generate": -1}, ("num_tokens_to_generate=-1", "to score the prompt")),
        ({"num_tokens_to_generate": 1.0}, ("num_tokens_to_generate=1.0", "integer")),
        ({"num_tokens_total": -4}, ("num_tokens_total=-4", "1 or more")),
        (
            {"num_tokens_to_generate": 3, "num_tokens_total": 4},
            ("num_tokens_to_generate=3", "num_tokens_total=4", "one of them"),
        ),
        ({"termination_id": 100}, ("termination_id=100", "0 to 99", "-1 for none")),
        ({"termination_id": -2}, ("termination_id=-2",)),
        ({"stop_token_ids": [3, -1]}, ("stop_token_ids=-1", "0 to 99")),
        ({"stop_token_ids": ["x"]}, ("stop_token_ids='x'", "integer")),
        ({"stop_token_ids": 5}, ("stop_token_ids=5", "a list of token ids")),
        ({"top_n_logprobs": 2}, ("top_n_logprobs=2", "return_log_probs=True")),
        ({"stop_words": ["a", ""]}, ("stop_words=['a', '']", "none empty")),
        ({"stop_words": "a"}, ("stop_words='a'", "list of strings")),
        ({"stop_token_ids": [1] * 129}, ("stop_token_ids has 129", "at most 128")),
        ({"stop_token_ids": range(10**6)}, ("stop_token_ids has 1000000", "at most 128")),
        ({"stop_words": ["a"] * 65}, ("stop_words has 65", "at most 64")),
        ({"stop_words": ["a", "b" * 257]}, ("stop_words has the word 'bbb", "257", "at most 256")),
    ],
)
def test_what_is_not_allowed(changes, words):
    params = SamplingParams()
    for name, value in changes.items():
        setattr(params, name, value)
    with pytest.raises(RequestError) as error:
        params.copy().validate(VOCABULARY)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": "hot"},
        {"temperature": None},
        {"top_k": [1]},
        {"seed": "x"},
        {"num_tokens_to_generate": "64"},
        {"min_tokens": {}},
        {"repetition_penalty": "1.1"},
    ],
)
def test_what_is_no_number_is_not_even_made(changes):
    (name,) = changes
    with pytest.raises(RequestError, match=f"{name}=.* is not allowed: it must be a number"):
        SamplingParams(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0},
        {"temperature": np.float32(0.5), "top_p": np.float64(0.5), "top_k": np.int64(5)},
        {"top_p": 1, "min_p": 1, "top_k": 10**12},
        {"seed": 2**63 - 1, "termination_id": 99, "stop_token_ids": [0, 99]},
        {"termination_id": -1, "stop_token_ids": []},
        {"stop_token_ids": (1, 2)},
        {"stop_token_ids": [7] * 128},
        {"stop_words": ["a" * 256] * 64},
        {"num_tokens_total": 10**12},
    ],
)
def test_what_is_allowed(changes):
    SamplingParams(**changes).copy().validate(VOCABULARY)


@pytest.mark.parametrize(
    ("changes", "greedy"),
    [({}, False), ({"temperature": 0.0}, True), ({"top_k": 1}, True), ({"top_k": 2}, False)],
)
def test_is_greedy(changes, greedy):
    assert SamplingParams(**changes).is_greedy is greedy


def test_a_copy_shares_nothing():
    params = SamplingParams(stop_token_ids=[1], temperature=0.3)
    copy = params.copy()
    assert copy == params
    copy.stop_token_ids.append(2)
    copy.temperature = 9.0
    assert params == SamplingParams(stop_token_ids=[1], temperature=0.3)


GREEDY, SOFTMAX, FILTERED, PROCESSED = SamplingMode


def record_of(seed: int = 5, vocab_size: int = 99, **params: object) -> SamplingRecord:
    return sampling_record(
        SamplingParams(**params), seed=seed, prompt_length=3, max_length=10, vocab_size=vocab_size
    )


def number(record: SamplingRecord, word: Header) -> float:
    words = record.words.view(np.float32) if word in FLOAT_WORDS else record.words
    return words[word].item()


@pytest.mark.parametrize(
    ("params", "mode", "temperature"),
    [
        ({}, SOFTMAX, 1),
        ({"temperature": 0.0, "top_p": 0.5}, GREEDY, 0),
        ({"top_k": 1, "temperature": 0.5}, GREEDY, 0),
        ({"temperature": 1e-40}, GREEDY, 0),
        ({"temperature": 1e-5}, SOFTMAX, 1e-5),
        ({"temperature": 1e39}, SOFTMAX, np.finfo(np.float32).max),
        ({"top_k": 2}, FILTERED, 1),
        ({"top_p": 0.5}, FILTERED, 1),
        ({"top_p": 1.0}, SOFTMAX, 1),  # 1 is off, as 0 is
        ({"min_p": 0.1}, FILTERED, 1),
        ({"top_k": 10**12}, FILTERED, 1),
        ({"temperature": 0.0, "presence_penalty": 1.0}, PROCESSED, 0),
    ],
)
def test_temperature_and_filters(params: dict[str, float], mode: SamplingMode, temperature: float):
    record = record_of(**params)
    assert record.mode == mode
    assert len(record.words) == HEADER, "a plain request's record is its header"
    assert number(record, Header.TEMPERATURE) == np.float32(temperature)
    assert number(record, Header.TOP_P) == params.get("top_p", 0) % 1
    assert number(record, Header.MIN_P) == np.float32(params.get("min_p", 0))
    assert number(record, Header.TOP_K) == min(params.get("top_k", 0), 2**31 - 1)
    assert number(record, Header.MAX_LENGTH) == 10
    assert number(record, Header.PROMPT_LENGTH) == 3


@pytest.mark.parametrize("seed", [0, 5, 2**32 - 1, 0x8000_0001 << 20, 2**63 - 1])
def test_a_seed_is_two_words(seed: int) -> None:
    words = record_of(seed).words
    assert words[Header.SEED_LOW : Header.SEED_HIGH + 1].view(np.int64).item() == seed
    first = torch.zeros(1, dtype=torch.int64)
    rows = SamplingRows(first, first.int(), torch.from_numpy(words)[None])
    found = (rows.numbers(Header.SEED_HIGH).long() << 32) | (
        rows.numbers(Header.SEED_LOW).long() & 0xFFFFFFFF
    )
    assert found.item() == seed


@pytest.mark.parametrize(
    ("params", "features"),
    [
        ({"frequency_penalty": 0.1}, RowFeature.PENALTIES),
        ({"repetition_penalty": 1.1}, RowFeature.PENALTIES),
        ({"return_log_probs": True}, RowFeature.LOG_PROBS),
        (
            {"return_log_probs": True, "logprobs_mode": "processed"},
            RowFeature.LOG_PROBS | RowFeature.PROCESSED_LOG_PROBS,
        ),
        ({"logit_bias": {3: 1.0}}, RowFeature.EDITS),
        ({"logit_bias": {3: 0.0}}, RowFeature(0)),
        ({"min_tokens": 2, "termination_id": 4}, RowFeature.EDITS),
        ({"bad_words": [[1, 2]]}, RowFeature.BAD_WORDS),
        ({"structured_output": StructuredOutput(regex="a")}, RowFeature.CONSTRAINED),
    ],
)
def test_features(params: dict[str, object], features: RowFeature) -> None:
    record = record_of(**params)
    assert record.features == features
    assert number(record, Header.FEATURES) == features
    assert (record.mode == PROCESSED) == bool(features)


def test_edits_and_bad_words_lie_behind_the_header() -> None:
    record = record_of(logit_bias={7: -1.5}, min_tokens=4, termination_id=9, bad_words=[[1, 2]])
    assert number(record, Header.NUM_EDITS) == 2
    assert number(record, Header.NUM_BAD_WORDS) == 1
    edits, word = record.words[HEADER : HEADER + 6].reshape(2, 3), record.words[HEADER + 6 :]
    assert edits[:, 0].tolist() == [7, 9]
    assert edits[:, 1].copy().view(np.float32).tolist() == [-1.5, -math.inf]
    assert edits[:, 2].tolist() == [FOREVER, 3 + 4]
    assert word.tolist() == [-1] * 14 + [1, 2]


def test_something_must_be_left_to_sample() -> None:
    with pytest.raises(RequestError, match="ban all 3 tokens of the vocabulary: leave one"):
        record_of(vocab_size=3, bad_words=[[0], [1], [2]])
