"""The coordinator under Megatron's path."""

from megatron_async.compat.inference.data_parallel_inference_coordinator.coordinator import (
    DataParallelInferenceCoordinator,
)

__all__ = ["DataParallelInferenceCoordinator"]
