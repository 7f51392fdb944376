"""How many requests and KV blocks Megatron's `buffer_size_gb` means.

Megatron divides the buffer into blocks; without `max_requests` there may be as many requests as
blocks, rounded down to a multiple of 4 and of the tensor-parallel ranks. Recurrent states of hybrid
models are taken from the same buffer (`DynamicInferenceContext.__init__` of megatron-core 0.19).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.inference.config import InferenceConfig as MegatronConfig

from megatron_async.config import InferenceConfig
from megatron_async.device_state.device_memory import block_shape
from megatron_async.device_state.kv_cache import DEFAULT_CPU_POOL_GB, GIB
from megatron_async.device_state.recurrent_state import make_recurrent_state
from megatron_async.devices import resolve_device_name
from megatron_async.errors import ConfigurationError
from megatron_async.models.parallel_state import agree_on_least
from megatron_async.models.partition import recurrent_layers, recurrent_sizes

REQUEST_MULTIPLE = 4
"""Megatron's `DynamicInferenceContext.REQUEST_ROUNDER`."""
DEFAULT_BUFFER_GB = MegatronConfig.buffer_size_gb


def with_memory_limits(
    model_config: Any, config: MegatronConfig, settings: InferenceConfig
) -> dict[str, Any]:
    """`max_requests`, the same on all ranks of the model, and `buffer_size_gb` of the KV cache
    alone.

    Args:
        model_config: the model's `TransformerConfig`.
        config: Megatron's.
        settings: ours, complete but for these.

    Raises:
        ConfigurationError: the buffer does not hold the recurrent states of `max_requests`.
    """
    most = settings.max_tokens // settings.decode_width
    asked = config.max_requests
    if settings.num_kv_blocks is not None:
        limit = min(settings.num_kv_blocks, most)
        return {"max_requests": asked or _rounded(limit, model_config)}
    buffer_gb: float = config.buffer_size_gb
    if resolve_device_name(settings.device) == "cpu" and buffer_gb == DEFAULT_BUFFER_GB:
        buffer_gb = DEFAULT_CPU_POOL_GB
    pool = int(buffer_gb * GIB)
    block, states = (
        block_shape(model_config, settings).num_bytes,
        _state_bytes(model_config, settings),
    )
    if asked is None:
        # A request has one block and one state; one block is the dummy block.
        count = agree_on_least(pool // max(block + states, 1))
        kv_pool = count * block if states else pool
        limits = {"max_requests": _rounded(min(count - 1, most), model_config)}
    else:
        kv_pool = pool - asked * states
        limits = {"max_requests": asked}
    if kv_pool <= 0:
        raise ConfigurationError(
            f"buffer_size_gb={buffer_gb} does not hold KV blocks beside the recurrent states of "
            f"max_requests={limits['max_requests']}, which take {states / GIB:.3g} GiB each: raise "
            "it, or lower max_requests."
        )
    return limits | {"buffer_size_gb": kv_pool / GIB}


def _rounded(count: int, model_config: Any) -> int:
    multiple = REQUEST_MULTIPLE
    ranks = int(getattr(model_config, "tensor_model_parallel_size", 1))
    while multiple % ranks:
        multiple += REQUEST_MULTIPLE
    return count // multiple * multiple or max(count, 1)


def _state_bytes(model_config: Any, settings: InferenceConfig) -> int:
    """Recurrent states of one request."""
    kinds = recurrent_layers(model_config)
    if not kinds:
        return 0
    sizes, dtype = recurrent_sizes(model_config, kinds), model_config.params_dtype
    return make_recurrent_state(sizes, settings, dtype, torch.device("meta")).bytes_per_slot
