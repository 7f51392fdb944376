"""Megatron's offline API over this project's engine: `MegatronLLM`, `MegatronAsyncLLM`."""

from __future__ import annotations

from megatron.core.inference.apis.serve_config import ServeConfig
from megatron.core.inference.inference_request import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
)
from megatron.core.inference.sampling_params import SamplingParams

from megatron_async.compat.inference.apis.async_llm import MegatronAsyncLLM
from megatron_async.compat.inference.apis.llm import MegatronLLM

__all__ = [
    "DynamicInferenceRequest",
    "DynamicInferenceRequestRecord",
    "MegatronAsyncLLM",
    "MegatronLLM",
    "SamplingParams",
    "ServeConfig",
]
