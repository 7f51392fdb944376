"""`share_states`: the number of snapshots of recurrent states that an engine keeps, and the
interval between them."""

from __future__ import annotations

from typing import Any

import torch

from megatron_async.config import InferenceConfig
from megatron_async.device_state.device_memory import agree_on_least, block_shape
from megatron_async.device_state.kv_cache import GIB
from megatron_async.device_state.recurrent_state import make_recurrent_state
from megatron_async.device_state.state_table import StateSharing
from megatron_async.devices import Device
from megatron_async.errors import ConfigurationError
from megatron_async.models.partition import is_recurrent, recurrent_layers, recurrent_sizes

MOST_INTERVAL = 8192
"""Most tokens between snapshots of a prompt; a model without keys and values has no other
measure."""


def share_states(model: Any, config: InferenceConfig, device: Device) -> StateSharing | None:
    """How an engine shares recurrent states; None if it does not share them.

    Args:
        model: Megatron's `TransformerConfig`; a `HybridModel`'s carries `hybrid_layer_pattern`.
        config: settings of the engine.
        device: of the engine.

    Raises:
        ConfigurationError: `prefix_caching_mamba_gb` has no room for a single snapshot.
    """
    if not config.enable_prefix_caching or not is_recurrent(model):
        return None
    snapshots, interval = config.num_state_snapshots, config.prefix_caching_mamba_interval
    budget = config.prefix_caching_mamba_gb
    if snapshots is None and budget is not None and budget <= 0:
        snapshots = 0
    # A stage without recurrent layers has room for any number.
    most, spacing = 2**31 - 1, MOST_INTERVAL
    if layers := recurrent_layers(model):
        sizes, nowhere = recurrent_sizes(model, layers), torch.device("meta")
        each = make_recurrent_state(sizes, config, model.params_dtype, nowhere).bytes_per_slot
        most = int((budget or 0) * GIB) // each
        if block := block_shape(model, config).num_bytes:
            spacing = min(spacing, -(-each * config.block_size_tokens // block))
    most, spacing = agree_on_least(most, device), agree_on_least(spacing, device)
    interval = spacing if interval is None else interval
    if snapshots is None and budget is None:
        # They live in rows that no request needs.
        return StateSharing(0, config.max_requests, interval)
    if snapshots is None and most == 0:
        raise ConfigurationError(
            f"prefix_caching_mamba_gb={budget} has no room for a snapshot of one request's states, "
            "so nothing would be found: give more (`megatron-async info` tells the size), or leave "
            "it out."
        )
    snapshots = most if snapshots is None else snapshots
    return StateSharing(snapshots, snapshots, interval)
