"""Megatron's trio around a tiny model, driven as `gpt_dynamic_inference.py` drives it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.inference.config import InferenceConfig as MegatronConfig
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams

from megatron_async.compat.inference.config import InferenceConfig
from megatron_async.compat.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.compat.inference.engines import DynamicInferenceEngine, EngineSuspendedError
from megatron_async.compat.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron_async.compat.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from tests.support.harness import assert_all_is_back
from tests.support.letter_tokenizers import EOS, make_ascii_tokenizer

PROMPTS = ("hello", "a", "The quick brown fox jumps over the dog", "1, 1, 2, 3, 5, 8, 13,")
SMALL = {"max_sequence_length": 128, "block_size_tokens": 16, "max_requests": 8}
MIB = 2**-10
"""In GiB."""


def compat_config(**fields: Any) -> InferenceConfig:
    """A small configuration whose books are checked after each step."""
    return InferenceConfig(
        **{**SMALL, "buffer_size_gb": MIB, "check_integrity": True, "async_sched_mode": "async"}
        | fields
    )


def make_compat_engine(
    model: torch.nn.Module, config: MegatronConfig | None = None, tokenizer: Any = None
) -> DynamicInferenceEngine:
    """Built in the order of Megatron's scripts."""
    context = DynamicInferenceContext(model.config, config or compat_config())
    wrapped = GPTInferenceWrapper(model, context)
    controller = TextGenerationController(wrapped, tokenizer or make_ascii_tokenizer())
    return DynamicInferenceEngine(controller, context)


@contextmanager
def compat_engine(model: torch.nn.Module, **fields: Any) -> Iterator[DynamicInferenceEngine]:
    """An engine that is closed at the end; everything must be back then."""
    engine = make_compat_engine(model, compat_config(**fields))
    try:
        yield engine
        while engine.has_unfinished_requests():  # a step ahead of an end that nobody foresaw
            engine.step_modern()
    finally:
        engine.close()
    assert_all_is_back(engine)


def greedy_params(tokens: int, **changes: Any) -> SamplingParams:
    """Megatron's way to say greedy; no token ends the request."""
    return SamplingParams(
        **{"top_k": 1, "num_tokens_to_generate": tokens, "termination_id": -1} | changes
    )


def drive(
    engine: DynamicInferenceEngine,
    prompts: Sequence[str],
    params: SamplingParams | Sequence[SamplingParams],
    suspend_resume_interval: int | None = None,
) -> list[DynamicInferenceRequest]:
    """The loop of Megatron's example script: one new request a step, a suspend and a resume now
    and then; merged requests in the order of `prompts`."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    finished: dict[int, DynamicInferenceRequest] = {}
    added = attempts = 0
    while True:
        if added < len(prompts):
            engine.add_request(added, prompts[added], each[added])
            added += 1
        try:
            result = engine.step_modern()
        except EngineSuspendedError:
            result = None
        attempts += 1
        assert attempts < 1000, "the loop does not end"
        if suspend_resume_interval is not None:
            if attempts % suspend_resume_interval == 0:
                engine.suspend()
            half = suspend_resume_interval // 2
            if (attempts - half) % suspend_resume_interval == 0:
                engine.resume()
        if result is None:
            continue
        for record in result["finished_request_records"]:
            request = record.merge()
            finished[request.request_id] = request
        if not (engine.has_unfinished_requests() or added < len(prompts)):
            break
    engine.resume()
    return [finished[number] for number in range(len(prompts))]


__all__ = ["EOS", "PROMPTS", "compat_config", "compat_engine", "drive", "greedy_params"]
