"""Engines under Megatron's path; `AbstractEngine` and `StaticInferenceEngine` are Megatron's."""

from megatron_async.compat.inference.engines.dynamic_engine import (
    DynamicInferenceEngine,
    EngineSuspendedError,
)

__all__ = ["DynamicInferenceEngine", "EngineSuspendedError"]
