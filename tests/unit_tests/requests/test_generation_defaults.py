"""What a request that says nothing is answered with: one rule for all ways in."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.checkpoints import gguf_metadata
from megatron_async.errors import ConfigurationError
from megatron_async.requests.defaults import default_sampling_params, generation_defaults
from megatron_async.requests.generation_keys import HONOURED, NEUTRAL, passed_over, tell_passed_over


def model(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(generation_config=fields, source="a/model")


@pytest.mark.parametrize(
    ("said", "given", "temperature"),
    [
        ({}, {}, 0),
        ({}, {"temperature": 0.7}, 0.7),
        ({}, {"top_p": 0.9}, 1),
        ({}, {"top_k": 5}, 1),
        ({}, {"min_p": 0.1}, 1),
        ({}, {"top_p": 1, "top_k": -1, "min_p": 0}, 0),
        ({}, {"top_p": 0, "top_k": 1}, 0),
        ({}, {"top_p": 0.9, "temperature": 0}, 0),
        ({"temperature": 0.6}, {}, 0.6),
        ({"temperature": 0.6}, {"top_p": 0.5}, 0.6),
        ({"temperature": 0.6}, {"temperature": 1}, 1),
        ({"temperature": None, "top_k": None}, {}, 0),
        ({"top_k": 20, "top_p": 0.8}, {}, 1),
        ({"do_sample": True}, {}, 1),
        ({"do_sample": True, "temperature": 0.2}, {}, 0.2),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {}, 0),
        ({"do_sample": False, "temperature": 0.6}, {"top_p": 0.9}, 1),
        ({"temperature": 0}, {"top_k": 5}, 1),
    ],
)
def test_the_temperature(said: dict[str, Any], given: dict[str, Any], temperature: float) -> None:
    defaults = generation_defaults(model(**said))
    assert defaults.complete(given)["temperature"] == temperature
    if not given:
        assert defaults.told()["temperature"] == temperature


def test_other_numbers_and_lengths() -> None:
    said = generation_defaults(model(top_p=0.8, repetition_penalty=1.1, max_new_tokens=9))
    params = default_sampling_params(said, min_p=0.1, seed=3)
    assert (params.temperature, params.top_p, params.min_p) == (1, 0.8, 0.1)
    assert (params.repetition_penalty, params.num_tokens_to_generate, params.seed) == (1.1, 9, 3)
    assert default_sampling_params(said, num_tokens_to_generate=4).num_tokens_to_generate == 4
    total = default_sampling_params(said, num_tokens_total=30)
    assert (total.num_tokens_total, total.num_tokens_to_generate) == (30, None)
    plain = default_sampling_params(generation_defaults(None))
    assert (plain.temperature, plain.top_p, plain.num_tokens_to_generate) == (0, 0, 256)
    assert said.told()["max_tokens"] == 9


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"temperature": "hot"}, "temperature='hot', which must be a number from 0 to 100"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": True}, "top_p=True"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"do_sample": "yes"}, "do_sample='yes', which must be true or false"),
        ({"do_sample": 1}, "do_sample=1, which must be true or false"),
        ({"top_k": 0.5}, "top_k=0.5, which must be a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5"),
    ],
)
def test_a_value_that_cannot_be_is_named(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as told:
        generation_defaults(model(**said))
    assert words in str(told.value)
    assert str(told.value).startswith("a/model: ")


def test_what_a_gguf_file_says(caplog: pytest.LogCaptureFixture) -> None:
    """Numbers of 32 bits are told as they were meant; what is not served is told."""
    metadata = {
        "general.sampling.temp": 0.949999988079071, "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.0499999523162842, "general.sampling.mirostat": 2,
        "general.sampling.xtc_probability": 0.0,
    }  # fmt: skip
    found = gguf_metadata.generation_config(metadata, "m.gguf")
    assert found == {"temperature": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    assert [record.getMessage() for record in caplog.records] == [
        "m.gguf: general.sampling.mirostat = 2 is not served: answers go without it."
    ]


def test_defaults_of_transformers_are_not_worth_a_word() -> None:
    from transformers import GenerationConfig

    config = GenerationConfig()
    assert not passed_over(config.to_dict())
    assert not passed_over(GenerationConfig._get_default_generation_params() | {"max_length": None})
    # Every key that transformers knows is honoured, told at another value, or known to be harmless.
    told = set(passed_over(dict.fromkeys(config.to_dict(), "another")))
    assert told.isdisjoint(HONOURED)
    assert told >= NEUTRAL.keys()
    assert told - NEUTRAL.keys() == {
        "constraints", "dola_layers", "exponential_decay_length_penalty", "force_words_ids",
        "forced_bos_token_id", "forced_eos_token_id", "max_length", "max_time", "top_h",
        "watermarking_config",
    }  # fmt: skip


def test_what_is_not_honoured_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    fields = {
        "temperature": 0.6, "eos_token_id": [1, 2], "do_sample": True, "use_cache": False,
        "num_beams": 4, "suppress_tokens": [5], "bad_words_ids": None, "min_new_tokens": 0,
        "a_new_key": 1,
    }  # fmt: skip
    assert passed_over(fields) == {"num_beams": 4, "suppress_tokens": [5], "a_new_key": 1}
    with caplog.at_level(logging.WARNING, "megatron_async"):
        for _ in range(2):
            tell_passed_over(fields, "a-model")
            tell_passed_over({"temperature": 0.6}, "another-model")
    assert [record.getMessage() for record in caplog.records] == [
        "a-model: its generation_config has a_new_key = 1, num_beams = 4, suppress_tokens = [5]: "
        "not honoured here."
    ]
