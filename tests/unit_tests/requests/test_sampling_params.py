"""`SamplingParams`: what is allowed, what is greedy, and that a copy is a copy."""

import math

import numpy as np
import pytest

from megatron_async.errors import RequestError
from megatron_async.requests.sampling_params import SamplingParams

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
        ({"num_tokens_to_generate": 0}, ("num_tokens_to_generate=0", "1 or more")),
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
