"""Megatron's offline API over this project's engine: `MegatronLLM`, `MegatronAsyncLLM`."""

from __future__ import annotations

from megatron_async.compat.inference.apis.async_llm import MegatronAsyncLLM
from megatron_async.compat.inference.apis.llm import MegatronLLM
from megatron_async.compat.inference.inference_request import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
)
from megatron_async.compat.inference.sampling_params import SamplingParams

__all__ = [
    "DynamicInferenceRequest",
    "DynamicInferenceRequestRecord",
    "MegatronAsyncLLM",
    "MegatronLLM",
    "SamplingParams",
]
