"""The CPU's truth about requests and memory: slots, blocks, scheduling, plans.

The device's side of a plan is in `device_state/`, the life of requests in `engine/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_async.planning.dynamic_context import DynamicInferenceContext

__all__ = ["DynamicInferenceContext"]


# Imported on first use: the coordinator needs `prefix_hashes`, and no torch.
def __getattr__(name: str) -> Any:
    if name != "DynamicInferenceContext":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_async.planning.dynamic_context import DynamicInferenceContext

    return DynamicInferenceContext
