"""The CPU's truth about requests and memory, and the device's view of one step."""

from megatron_async.contexts.dynamic_context import DynamicInferenceContext

__all__ = ["DynamicInferenceContext"]
