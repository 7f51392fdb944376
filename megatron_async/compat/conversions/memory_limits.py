"""How many requests and KV blocks Megatron's `buffer_size_gb` means, and the numbers of its
`KVBlockAllocator`.

Megatron divides the buffer into blocks; without `max_requests` there may be as many requests as
blocks, rounded down to a multiple of 4 and of the tensor-parallel ranks. Recurrent states of hybrid
models are taken from the same buffer (`DynamicInferenceContext.__init__` of megatron-core 0.19).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core.inference.config import InferenceConfig as MegatronConfig

from megatron_async.config import InferenceConfig
from megatron_async.device_state.device_memory import agree_on_least, block_shape
from megatron_async.device_state.kv_cache import DEFAULT_CPU_POOL_GB, GIB
from megatron_async.device_state.recurrent_state import make_recurrent_state
from megatron_async.devices import resolve_device_name
from megatron_async.errors import ConfigurationError
from megatron_async.models.partition import recurrent_layers, recurrent_sizes
from megatron_async.planning.kv_block_allocator import KVBlockAllocator
from megatron_async.planning.request_slots import RequestSlots, SlotState

REQUEST_MULTIPLE = 4
"""Megatron's `DynamicInferenceContext.REQUEST_ROUNDER`."""
DEFAULT_BUFFER_GB = MegatronConfig.buffer_size_gb


def with_memory_limits(
    model_config: Any, config: MegatronConfig, settings: InferenceConfig
) -> dict[str, Any]:
    """`max_requests`, the same on all ranks of the model, and `buffer_size_gb` of the KV cache
    alone, for settings that are complete but for these.

    Raises:
        ConfigurationError: the buffer does not hold the recurrent states of `max_requests`, or
            `mamba_memory_ratio` is no share of it.
    """
    most = settings.max_tokens // settings.decode_width
    asked, ratio = config.max_requests, config.mamba_memory_ratio
    if ratio is not None:
        _check_ratio(ratio, config, settings)
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
    if ratio is not None:  # the rest of both buffers is of KV blocks, whatever the states need
        paused = int((config.paused_buffer_size_gb or 0) * GIB)
        kv_pool = int(pool * (1 - ratio))
        fitting = int((pool + paused) * ratio // max(states, 1))
        count = agree_on_least(min(kv_pool // block - 1, fitting, most))
        limits: dict[str, Any] = {"max_requests": asked or _rounded(count, model_config)}
        if paused:
            limits["paused_buffer_size_gb"] = paused * (1 - ratio) / GIB
    elif asked is None:
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


def _check_ratio(ratio: float, config: MegatronConfig, settings: InferenceConfig) -> None:
    if not 0 < ratio < 1 or config.mamba_inference_state_config is None:
        raise ConfigurationError(
            f"InferenceConfig.mamba_memory_ratio={ratio!r} must be a share between 0 and 1, of a "
            "model with a mamba_inference_state_config: leave it out for others."
        )
    if settings.num_kv_blocks is not None:
        raise ConfigurationError(
            f"InferenceConfig.mamba_memory_ratio={ratio!r} is a share of buffer_size_gb, and "
            f"num_kv_blocks={settings.num_kv_blocks} goes before that: leave one of them out."
        )


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


class KVBlockCounts:
    """Numbers of blocks; their owners are not Megatron's affair here. In Megatron the dummy block
    is one of `total_count`; so it is here. `max_paused`: blocks that paused requests may hold; all
    without a limit. `pool_size`, `paused_limit` and `get_allocatable_count` are main's names."""

    def __init__(
        self,
        blocks: KVBlockAllocator,
        slots: RequestSlots,
        max_paused: int,
        enable_prefix_caching: bool,
    ) -> None:
        self._blocks = blocks
        self._slots = slots
        self.total_count = self.pool_size = blocks.total + 1
        self.dummy_block_idx = blocks.total
        self.paused_count = max_paused if max_paused < blocks.total else 0
        self.paused_limit = self.paused_count
        self.active_count = blocks.total - self.paused_count
        self.enable_prefix_caching = enable_prefix_caching

    @property
    def total_avail(self) -> int:
        """Blocks that can be handed out, remembered ones among them."""
        return self._blocks.allocatable

    def get_allocatable_count(self) -> int:
        """What `total_avail` says."""
        return self._blocks.allocatable

    def get_total_used(self) -> int:
        """Blocks that requests hold."""
        return self._blocks.total - self._blocks.allocatable

    def get_active_used(self) -> int:
        """Blocks that requests hold which are not paused, each counted once."""
        state = self._slots.state
        return self._held((state != SlotState.FREE) & (state != SlotState.PAUSED))

    def get_paused_used(self) -> int:
        """Blocks that paused requests hold, each counted once."""
        return self._held(self._slots.state == SlotState.PAUSED)

    def get_active_avail(self) -> int:
        """Blocks that may still go to requests which are not paused."""
        return self.active_count - self.get_active_used()

    def get_paused_avail(self) -> int:
        """Blocks that paused requests may still hold."""
        return self.paused_count - self.get_paused_used()

    def is_memory_available(self, num_blocks: int) -> bool:
        """Whether so many blocks can be handed out."""
        return self._blocks.allocatable >= num_blocks

    def get_evictable_block_count(self) -> int:
        """Blocks that nobody owns and that are remembered."""
        return self._blocks.cached

    def __str__(self) -> str:
        return (
            f"using: total {self.get_total_used()}/{self._blocks.total}"
            f"; active {self.get_active_used()}/{self.active_count}"
            f"; paused {self.get_paused_used()}/{self.paused_count}"
        )

    def _held(self, is_meant: np.ndarray) -> int:
        slots = np.flatnonzero(is_meant)
        return self._blocks.count_held([self._slots.blocks_of(slot) for slot in slots])
