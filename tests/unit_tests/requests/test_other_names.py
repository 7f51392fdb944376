"""Names of other engines are answered with the names of this one."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from typing import Any

import pytest

from megatron_async import LLM, InferenceConfig, SamplingParams
from megatron_async.errors import ConfigurationError
from megatron_async.other_names import ENGINE_NAMES, SAMPLING_ADVICE, SAMPLING_NAMES


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"max_tokens": 5}, "did you mean num_tokens_to_generate=5?"),
        ({"stop": ["."]}, "did you mean stop_words=['.']?"),
        ({"temprature": 1}, "did you mean temperature=1?"),
        ({"n": 2}, "give the prompt n times"),
        ({"do_sample": False}, "temperature=0"),
        ({"qqq": 1}, "Its parameters are: temperature, top_k"),
    ],
)
def test_a_parameter_of_others(given: dict[str, Any], answer: str) -> None:
    with pytest.raises(TypeError, match="SamplingParams has no parameter") as error:
        SamplingParams(**given)
    assert answer in str(error.value)


def test_parameters_by_place_and_by_name_are_taken_as_ever() -> None:
    assert SamplingParams(0.5, 3, top_p=0.9) == SamplingParams(temperature=0.5, top_k=3, top_p=0.9)
    assert SamplingParams(0.5).copy().temperature == 0.5


def test_a_setting_of_others() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'max_sequence_length'") as error:
        LLM("dummy:tiny", max_model_len=128)
    assert "The settings are: device, dtype, " in str(error.value)


def test_what_is_named_exists() -> None:
    """An answer names a parameter that there is, and no name of ours is answered at all."""
    of_llm = {field.name for field in fields(InferenceConfig)} | signature(LLM).parameters.keys()
    assert set(ENGINE_NAMES.values()) <= of_llm
    assert not ENGINE_NAMES.keys() & of_llm
    own = {field.name for field in fields(SamplingParams)}
    written = {part.split("=")[0] for text in SAMPLING_NAMES.values() for part in text.split(", ")}
    assert written <= own
    assert not (SAMPLING_NAMES.keys() | SAMPLING_ADVICE.keys()) & own
