"""Names of other engines are answered with the names of this one."""

import copy
import pickle
from dataclasses import fields, replace
from inspect import iscoroutinefunction, signature
from typing import Any

import pytest
from megatron.core.inference.config import InferenceConfig as MegatronConfig
from megatron.core.inference.sampling_params import SamplingParams as MegatronParams

from megatron_async import LLM, DynamicInferenceEngine, InferenceConfig, SamplingParams
from megatron_async.compat.inference.apis import MegatronAsyncLLM
from megatron_async.compat.inference.config import InferenceConfig as CompatConfig
from megatron_async.compat.inference.engines.dynamic_engine import (
    DynamicInferenceEngine as CompatEngine,
)
from megatron_async.errors import ConfigurationError, RequestError
from megatron_async.other_names import ENGINE_ADVICE, ENGINE_NAMES, check_engine_names
from megatron_async.requests.parameter_names import SAMPLING_ADVICE, SAMPLING_NAMES


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


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"gpu_memory_utilization": 0.9}, "'buffer_size_gb' (GiB of the KV pool, not a share of"),
        ({"mem_fraction_static": 0.9}, "Did you mean 'buffer_size_gb'"),
        ({"enforce_eager": True}, "Did you mean 'num_cuda_graphs=0'?"),
        ({"trust_remote_code": True}, "Here no code of a model's folder is run"),
        ({"temperature": 0.5}, "belongs to a request: SamplingParams(temperature=...)"),
        ({"max_new_tokens": 5}, "belongs to a request: SamplingParams(num_tokens_to_generate=...)"),
        ({"hf_token": "x"}, "HF_TOKEN"),
        ({"buffer_size_gb": "1"}, "buffer_size_gb='1' must be a number of GiB above 0."),
        ({"prefix_caching_mamba_gb": "1"}, "'1' must be a number of GiB, 0 for no snapshots."),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no' must be True or False."),
        ({"late_launch": "off"}, "late_launch='off' must be True or False."),
        ({"timeline": "run.json"}, "timeline='run.json' must be True or False."),
        ({"n": 2}, "It belongs to a request: give the prompt n times"),
    ],
)
def test_settings_of_others(given: dict[str, Any], answer: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        LLM("dummy:tiny", **given)
    assert answer in str(error.value)


@pytest.mark.parametrize("made", [InferenceConfig, CompatConfig])
@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("max_model_len", "Did you mean 'max_sequence_length'?"),
        ("async_scheduling", "Did you mean 'lookahead=1'?"),
        ("finished_sync_period", "Here every step that is resolved tells which requests ended"),
        ("inference_dynamic_batching_max_requests", "Did you mean 'max_requests'?"),
        ("no_inference_dynamic_batching_prefix_caching", "'enable_prefix_caching=False'?"),
        ("inference_dynamic_batching_max_tokens", "Did you mean 'max_tokens'?"),
        ("active_buffer_size_gb", "Did you mean 'buffer_size_gb'?"),
        ("max_requsts", "Did you mean 'max_requests'?"),
        ("cache_mla_latent", "Here latent attention is not served"),
        ("temperature", "It belongs to a request: SamplingParams(temperature=...)."),
    ],
)
def test_settings_of_others_in_the_config(made: Any, given: str, answer: str) -> None:
    with pytest.raises(TypeError, match=f"InferenceConfig has no setting '{given}'") as error:
        made(**{given: 5})
    assert answer in str(error.value)
    config = made(lookahead=0)
    assert config.lookahead == 0
    with pytest.raises(AttributeError, match=f"no attribute '{given}'") as unset:
        setattr(config, given, 5)
    assert answer in str(unset.value)
    with pytest.raises(AttributeError, match=r"'InferenceConfig' object has no .*'lookahead=1'\?$"):
        _ = config.async_scheduling


@pytest.mark.parametrize(
    "method",
    [LLM.generate, LLM.chat, DynamicInferenceEngine.generate, DynamicInferenceEngine.add_request,
     CompatEngine.add_request, CompatEngine.generate, MegatronAsyncLLM.generate],
)  # fmt: skip
def test_parameters_of_a_request_beside_its_prompt(method: Any) -> None:
    for name, answer in (
        ("max_tokens", "It belongs to a request: SamplingParams(num_tokens_to_generate=...)."),
        ("num_tokens_to_generate", "request: SamplingParams(num_tokens_to_generate=...)."),
        ("n", "It belongs to a request: give the prompt n times"),
        ("sampling_parms", "Did you mean 'sampling_params'?"),
    ):
        with pytest.raises(
            TypeError, match=rf"{method.__name__}\(\) takes no argument '{name}'"
        ) as e:
            method(None, [1], **{name: 2})
        assert answer in str(e.value)
    assert iscoroutinefunction(method) is (method is MegatronAsyncLLM.generate)
    with pytest.raises(TypeError, match=r"missing [12] required positional"):
        method(None)


@pytest.mark.parametrize("made", [InferenceConfig, CompatConfig])
def test_settings_are_set_and_copied_as_ever(made: Any) -> None:
    config = made(max_tokens=64, max_requests=8)
    config.max_requests = 4
    copies = (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)))
    for each in (*copies, replace(config, lookahead=None)):
        each.max_tokens = 32
        assert (each.max_requests, each.max_tokens, config.max_tokens) == (4, 32, 64)
        with pytest.raises(AttributeError):
            each.max_tokns = 16


def test_what_is_set_beside_the_parameters_of_a_request() -> None:
    params = SamplingParams()
    params.top_k = 3
    params.validate(vocab_size=10)
    for name, answer in (("stop", "did you mean stop_words=5?"), ("n", "give the prompt n times")):
        params = SamplingParams()
        setattr(params, name, 5)
        with pytest.raises(RequestError, match=f"no parameter '{name}'") as error:
            params.copy().validate(vocab_size=10)
        assert answer in str(error.value)


def test_every_field_of_megatrons_is_a_setting_or_answered() -> None:
    own = {field.name for field in fields(InferenceConfig)}
    answered = ENGINE_ADVICE.keys() | ENGINE_NAMES.keys()
    assert {field.name for field in fields(MegatronConfig)} <= own | answered
    own = {field.name for field in fields(SamplingParams)}
    answered = SAMPLING_NAMES.keys() | SAMPLING_ADVICE.keys()
    assert {field.name for field in fields(MegatronParams)} <= own | answered


def test_a_short_step_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Megatron's `max_tokens` keeps its meaning; for an answer's length users read the name."""
    for budget, told in ((255, 1), (256, 0)):
        caplog.clear()
        check_engine_names({"max_tokens": budget}, ["max_tokens"])
        assert len(caplog.records) == told
        assert all("num_tokens_to_generate=255" in each.getMessage() for each in caplog.records)


def test_what_is_named_exists() -> None:
    """An answer names a parameter that there is, and no name of ours is answered at all."""
    of_llm = {field.name for field in fields(InferenceConfig)} | signature(LLM).parameters.keys()
    assert {text.partition("=")[0] for text in ENGINE_NAMES.values()} <= of_llm
    assert not ENGINE_ADVICE.keys() & (of_llm | ENGINE_NAMES.keys())
    assert not ENGINE_NAMES.keys() & of_llm
    own = {field.name for field in fields(SamplingParams)}
    written = {part.split("=")[0] for text in SAMPLING_NAMES.values() for part in text.split(", ")}
    assert written <= own
    assert not (SAMPLING_NAMES.keys() | SAMPLING_ADVICE.keys()) & own
