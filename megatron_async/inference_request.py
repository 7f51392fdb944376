"""Requests at Megatron-Core's path."""

from megatron_async.requests.inference_request import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    Status,
)

__all__ = [
    "DynamicInferenceEvent",
    "DynamicInferenceEventType",
    "DynamicInferenceRequest",
    "Status",
]
