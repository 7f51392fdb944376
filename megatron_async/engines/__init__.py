"""The life of requests, and the loop."""

from megatron_async.engines.dynamic_engine import DynamicInferenceEngine

__all__ = ["DynamicInferenceEngine"]
