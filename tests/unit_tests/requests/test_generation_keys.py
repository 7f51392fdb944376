"""Keys of generation_config.json that are not honoured are told by name, once."""

from __future__ import annotations

import logging

import pytest

from megatron_async.requests.generation_keys import (
    HONOURED,
    NEUTRAL,
    passed_over,
    tell_passed_over,
)


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
