"""Megatron's errors can be caught, and what cannot be served fails alone, as Megatron marks it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from megatron.core.inference.contexts import dynamic_context as megatron_contexts
from megatron.core.inference.engines import dynamic_engine as megatron_engines
from megatron.core.inference.inference_request import (
    DynamicInferenceRequestRecord,
)
from megatron.core.inference.sampling_params import SamplingParams

from megatron_async import errors
from megatron_async.compat.inference import engines
from megatron_async.compat.inference.contexts import dynamic_context as contexts
from megatron_async.compat.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.compat.inference.engines import DynamicInferenceEngine
from megatron_async.errors import ConfigurationError, RequestError
from tests.support.compat_trio import PROMPTS, compat_config, compat_engine, drive, greedy_params
from tests.support.harness import make_engine

NAMES = (
    "ActiveRequestCountOverflowError",
    "BlockOverflowError",
    "ContextErrorFactory",
    "ContextOverflowError",
    "MaxSequenceLengthOverflowError",
    "RequestOverflowError",
    "TensorStateDeallocatedError",
    "TokenOverflowError",
    "get_mem_size_str",
)


def test_the_names_are_megatrons_own_classes() -> None:
    for name in NAMES:
        assert getattr(contexts, name) is getattr(megatron_contexts, name)
    assert engines.EngineSuspendedError is megatron_engines.EngineSuspendedError


OVERFLOWS = {
    "MaxSequenceLengthOverflowError": ("x" * 64, greedy_params(1), errors.SequenceTooLong),
    "TokenOverflowError": ("x" * 50, greedy_params(1), errors.PromptTooLong),
    "BlockOverflowError": ("x" * 20, greedy_params(40), errors.PoolTooSmall),
}


@pytest.mark.parametrize("name", list(OVERFLOWS))
def test_an_overflow_fails_its_request_with_megatrons_error(
    tiny_model: torch.nn.Module, name: str
) -> None:
    prompt, params, ours = OVERFLOWS[name]
    settings = {"max_sequence_length": 64, "max_tokens": 40, "num_kv_blocks": 3, "max_requests": 2}
    with compat_engine(tiny_model, **settings) as engine:
        (plain,) = drive(engine, PROMPTS[:1], greedy_params(3))
        failed, fine = drive(engine, [prompt, PROMPTS[0]], [params, greedy_params(3)])
    assert fine.generated_tokens == plain.generated_tokens
    assert (failed.failed(), failed.generated_tokens, failed.generated_text) == (True, [], "")
    assert [event.type.name for event in failed.events] == [
        "ADD_ENGINE", "ERROR_NONTRANSIENT", "FAIL",
    ]  # fmt: skip
    error = failed.events[1].payload
    assert isinstance(error, getattr(megatron_contexts, name))
    assert isinstance(error, ours)
    assert (error.request_id, error.is_transient) == (0, False)
    assert "raise" in str(error), "with a remedy"
    # Megatron's own code sends it and reads it.
    record = DynamicInferenceRequestRecord.from_request(failed)
    back = DynamicInferenceRequestRecord.deserialize(record.serialize())
    assert type(back[0].events[1].payload) is getattr(megatron_contexts, name)


@pytest.mark.parametrize(
    ("params", "word"),
    [
        (greedy_params(0), "num_tokens_to_generate"),
        (greedy_params(2, top_n_logprobs=2), "return_log_probs"),
        (SamplingParams(num_tokens_to_generate=2, num_tokens_total=9), "num_tokens_total"),
        ({"top_k": 1}, "dict"),
        (greedy_params(2, top_p=1.5), "top_p"),
    ],
)
def test_other_bad_parameters_fail_their_request_alone(
    tiny_model: torch.nn.Module, params: Any, word: str
) -> None:
    with compat_engine(tiny_model) as engine:
        future = engine.add_request(7, PROMPTS[0], params)
        assert future.done()
        assert engine.has_unfinished_requests(), "it is still to be reported"
        result = engine.step_modern()
        (record,) = result["finished_request_records"]
    assert record is future.result()
    assert record[0].failed()
    error = record[0].events[1].payload
    assert isinstance(error, RequestError)
    assert isinstance(error, megatron_contexts.ContextOverflowError)
    assert word in str(error)
    assert record.serialize()["requests"][0]["events"][1]["payload"]["request_id"] == 7


def test_an_id_in_use_is_refused_and_its_request_goes_on(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        (plain,) = drive(engine, PROMPTS[:1], greedy_params(5))
        future = engine.add_request(4, PROMPTS[0], greedy_params(5))
        for bad in (4, "four", True):
            with pytest.raises(RequestError, match="request id"):
                engine.add_request(bad, PROMPTS[1], greedy_params(5))  # type: ignore[arg-type]
        while engine.has_unfinished_requests():
            engine.step_modern()
        assert future.result().merge().generated_tokens == plain.generated_tokens


def test_a_stopped_engine_raises_what_both_worlds_catch(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        future = engine.add_request(0, PROMPTS[0], greedy_params(2))
        engine.suspend()
        for kind in (megatron_engines.EngineSuspendedError, errors.EngineStopped):
            with pytest.raises(kind, match="resume"):
                engine.step_modern()
            with pytest.raises(kind):
                asyncio.run(engine.async_step())
            with pytest.raises(kind):
                engine.generate([PROMPTS[0]], greedy_params(2))
        engine.resume()
        while engine.has_unfinished_requests():
            engine.step_modern()
        assert future.result()[0].succeeded()


def test_an_abort_is_a_failed_record(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        future = engine.add_request(0, PROMPTS[0], greedy_params(50))
        other = engine.add_request(1, PROMPTS[1], greedy_params(5))
        for _ in range(4):
            engine.step_modern()
        engine.abort_request(0)
        request = future.result()[0]
        assert request.failed()
        assert 0 < len(request.generated_tokens) < 50
        assert "aborted" in str(request.events[-2].payload)
        ids = []
        while engine.has_unfinished_requests():
            ids += [r.request_id for r in engine.step_modern()["finished_request_records"]]
        assert ids == [0, 1]
        assert other.result()[0].succeeded()


def test_parts_of_our_own_trio_are_refused(tiny_model: torch.nn.Module) -> None:
    own = make_engine(tiny_model, max_requests=2)
    context = DynamicInferenceContext(tiny_model.config, compat_config())
    with pytest.raises(ConfigurationError, match=r"megatron_async.compat"):
        DynamicInferenceEngine(own.controller, context)  # type: ignore[arg-type]
    own.close()
    context.device.close()
