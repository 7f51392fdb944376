"""Engines that are made in one of torch's autograd modes and stepped in another."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_async import (
    LLM,
    DynamicInferenceEngine,
    DynamicInferenceRequest,
    SamplingParams,
    StructuredOutput,
)
from megatron_async.devices import CpuDevice, Device
from tests.support.harness import drain, greedy, make_engine, make_model, random_prompts
from tests.support.late_device import LateDevice
from tests.support.letter_tokenizers import make_ascii_tokenizer

Mode = Callable[[], AbstractContextManager[Any]]
MODES: dict[str, Mode] = {
    "plain": nullcontext,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
}
PAIRS = [
    ("inference", "inference"),
    ("inference", "plain"),
    ("plain", "inference"),
    ("inference", "enable_grad"),
    ("enable_grad", "no_grad"),
    ("no_grad", "inference"),
]
"""Mode in which an engine is made, and mode in which it runs."""
PROMPTS = random_prompts(3, (5, 20, 1, 12))
ANSWER = StructuredOutput(regex="[a-z ]{3,12}")
PARAMS = [
    greedy(14, return_log_probs=True, top_n_logprobs=2, skip_prompt_log_probs=False),
    SamplingParams(temperature=0.9, seed=5, frequency_penalty=0.5, num_tokens_to_generate=20),
    greedy(12, bad_words=[[3, 4]], repetition_penalty=1.2),
    SamplingParams(temperature=1.0, seed=2, num_tokens_to_generate=16, structured_output=ANSWER),
]


def start(device: Device, **config: Any) -> DynamicInferenceEngine:
    model = make_model().requires_grad_(True)  # as a user's own model may come
    settings = {"max_requests": 4, "max_tokens": 16, **config}
    return make_engine(model, device=device, tokenizer=make_ascii_tokenizer(), **settings)


def answers(engine: DynamicInferenceEngine) -> list[list[int]]:
    params = [replace(one) for one in PARAMS]
    requests = engine.generate(PROMPTS, params)
    assert [request.error for request in requests] == [None] * len(requests)
    check_log_probs(requests[0])
    return [request.generated_tokens for request in requests]


def check_log_probs(request: DynamicInferenceRequest) -> None:
    assert request.prompt_log_probs is not None
    assert len(request.prompt_log_probs) == len(request.prompt_tokens) - 1


def suspend_and_resume(engine: DynamicInferenceEngine) -> None:
    engine.suspend(free_kv_cache=True)
    engine.resume()


@pytest.fixture(scope="module")
def expected() -> Iterator[list[list[int]]]:
    engine = start(CpuDevice(), lookahead=0)
    yield answers(engine)
    engine.close()


@pytest.mark.pairs
@pytest.mark.parametrize(("made_in", "run_in"), PAIRS)
def test_tokens_are_the_same(expected, made_in: str, run_in: str, lookahead, invalidation):
    with MODES[made_in]():
        engine = start(CpuDevice(), lookahead=lookahead, invalidation=invalidation)
    with MODES[run_in]():
        assert answers(engine) == expected
        suspend_and_resume(engine)
    # What was made lazily, in the other mode, is used again.
    assert answers(engine) == expected
    with MODES[made_in]():
        assert answers(engine) == expected
    drain(engine)


@pytest.mark.parametrize(("made_in", "run_in"), PAIRS)
def test_work_that_runs_as_it_is_launched(expected: list[list[int]], made_in: str, run_in: str):
    """On a GPU launched work runs in its launcher's mode, not in a thread of its own."""
    eager = ("compute", "copy", "upload")
    with MODES[made_in]():
        engine = start(LateDevice(eager), lookahead=1, invalidation="rollback")
    for mode in (run_in, "plain", made_in):
        with MODES[mode]():
            assert answers(engine) == expected
            suspend_and_resume(engine)


def test_the_mode_changes_between_steps(expected: list[list[int]]) -> None:
    engine = start(CpuDevice(), lookahead=1)
    futures = [
        engine.add_request(number, prompt, params)
        for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]
    modes = list(MODES.values())
    step = 0
    while engine.has_unfinished_requests():
        with modes[step % len(modes)]():
            engine.step_modern()
        step += 1
    assert [future.result().generated_tokens for future in futures] == expected


@pytest.mark.parametrize(("made_in", "run_in"), [("inference", "plain"), ("plain", "inference")])
def test_llm(made_in: str, run_in: str) -> None:
    settings: dict[str, Any] = {"num_kv_blocks": 64, "max_sequence_length": 64}
    with LLM("dummy:tiny", device="cpu", **settings) as llm:
        prompts = [[1, 2, 3], [7] * 20]
        plain = [request.generated_tokens for request in llm.generate(prompts, greedy(9))]
    with MODES[made_in]():
        llm = LLM("dummy:tiny", device="cpu", **settings)
    with MODES[run_in](), llm:
        assert [r.generated_tokens for r in llm.generate(prompts, greedy(9))] == plain
        # Its weights are ordinary tensors: a trainer may write new ones into them.
        weights = list(llm.engine.controller.inference_wrapped_model.model.parameters())
    for weight in weights:
        assert not weight.is_inference()
        weight.data.mul_(1.0)
