"""megatron_async: an async-scheduled dynamic inference engine for Megatron-Core models."""

from __future__ import annotations

import gc
import importlib
import logging
import warnings
from typing import TYPE_CHECKING, Any

from megatron_async.version import __version__ as __version__

# Megatron-Core says at import, a dozen times, that TransformerEngine and Apex are missing, and
# torch that a CUDA toolkit lies on a machine without a GPU. Neither matters here. (The pattern's
# first part is for warnings of the compiler, which knows a module by its path.)
warnings.filterwarnings("ignore", module=r"(.*/)?megatron.core.*")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

if TYPE_CHECKING:
    from megatron_async.config import InferenceConfig
    from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
    from megatron_async.llm import LLM
    from megatron_async.planning.dynamic_context import DynamicInferenceContext
    from megatron_async.requests.inference_request import DynamicInferenceRequest, Status
    from megatron_async.requests.sampling_params import SamplingParams
    from megatron_async.step.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )
    from megatron_async.step.text_generation_controller import (
        TextGenerationController,
    )

# Imported on first use: `--help` and `--version` need neither torch nor Megatron.
_EXPORTS = {
    "LLM": "llm",
    "InferenceConfig": "config",
    "SamplingParams": "requests.sampling_params",
    "DynamicInferenceRequest": "requests.inference_request",
    "Status": "requests.inference_request",
    "StructuredOutput": "text.structured_output",
    "DynamicInferenceContext": "planning.dynamic_context",
    "DynamicInferenceEngine": "engine.dynamic_engine",
    "TextGenerationController": "step.text_generation_controller",
    "GPTInferenceWrapper": "step.gpt_inference_wrapper",
}
__all__ = [
    "LLM",
    "DynamicInferenceContext",
    "DynamicInferenceEngine",
    "DynamicInferenceRequest",
    "GPTInferenceWrapper",
    "InferenceConfig",
    "SamplingParams",
    "Status",
    "StructuredOutput",
    "TextGenerationController",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    collects = gc.isenabled()
    gc.disable()  # or garbage is looked for among 400,000 new objects, which all stay
    try:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return sorted(__all__)
