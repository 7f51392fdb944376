"""The default of `max_sequence_length`: the model's context, if the KV pool holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_async.config import InferenceConfig
from megatron_async.device_state.cache_layout import BlockNeeds, cache_layout
from megatron_async.device_state.kv_cache import DEFAULT_CPU_POOL_GB, GIB
from megatron_async.models.architecture import ModelArchitecture

LONGEST_ON_GPU = 8192
"""Tokens. On a GPU the KV pool takes the memory that the weights leave, which is not known yet. A
pool nearly always holds this length; a longer one needs `max_sequence_length`."""


def default_max_sequence_length(
    architecture: ModelArchitecture, context: int, settings: Mapping[str, Any], itemsize: int
) -> int:
    """Tokens of prompt and answer together.

    Args:
        architecture: of the model.
        context: tokens that the model was trained for.
        settings: of the engine, as they were given; "device" is "cpu" or a GPU's name.
        itemsize: bytes of an element of the KV cache.

    Returns:
        `context`, or as many whole blocks of it as the KV pool has; at least Megatron's 2,560, and
        on a GPU at most `LONGEST_ON_GPU`.
    """
    block = settings.get("block_size_tokens") or InferenceConfig.block_size_tokens
    windows = architecture.attention_windows
    layout, columns = cache_layout([windows]), -(-context // block)
    needs = BlockNeeds(layout.windows, block)
    of_token = architecture.kv_bytes_per_token(itemsize) // max(len(windows), 1) * layout.layers
    longest = context
    if isinstance(blocks := settings.get("num_kv_blocks"), int):
        longest = needs.longest(blocks, columns) * block
    elif of_token and settings["device"] == "cpu":
        pool = settings.get("buffer_size_gb") or DEFAULT_CPU_POOL_GB
        # A block of the pool is the dummy block.
        longest = needs.longest(int(pool * GIB) // (of_token * block) - 1, columns) * block
    elif settings["device"] != "cpu":
        longest = LONGEST_ON_GPU
    return min(context, max(longest, InferenceConfig.max_sequence_length))
