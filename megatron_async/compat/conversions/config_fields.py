"""What becomes of each field of Megatron's `InferenceConfig`.

A field that is not in `FIELDS` is refused when it has another value than its default: a newer
Megatron may have fields that nobody here has read about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from typing import Any

from megatron.core.inference.config import InferenceConfig, KVCacheManagementMode

from megatron_async.errors import ConfigurationError


class Treatment(Enum):
    """What a field does here."""

    HONOURED = "honoured"
    """What it does in Megatron."""
    HARMLESS = "harmless"
    """Nothing: it chooses among ways to the same tokens, or steers a part that is not there."""
    REFUSED = "refused"
    """Only its default is served."""


@dataclass(frozen=True)
class FieldRule:
    """One field.

    Attributes:
        treatment: what it does.
        note: how it is honoured, why it is harmless, or what to do instead of it.
        serves: whether a value of an honoured field is served; None: all that our own
            configuration takes are.
    """

    treatment: Treatment
    note: str
    serves: Callable[[Any], bool] | None = None


def _honoured(note: str, serves: Callable[[Any], bool] | None = None) -> FieldRule:
    return FieldRule(Treatment.HONOURED, note, serves)


def _harmless(note: str) -> FieldRule:
    return FieldRule(Treatment.HARMLESS, note)


def _refused(note: str) -> FieldRule:
    return FieldRule(Treatment.REFUSED, note)


COORDINATOR = "read by Megatron's coordinator; ours has settings of its own (docs/serving.md)"
OUR_GRAPHS = "this engine measures which shapes pay and captures those; tokens do not depend on it"

FIELDS: dict[str, FieldRule] = {
    "block_size_tokens": _honoured("as it is"),
    "buffer_size_gb": _honoured("on a CPU, where Megatron does not run, its default means 1 GiB"),
    "paused_buffer_size_gb": _honoured("beyond it a paused request is evicted; None: no limit"),
    "mamba_inference_state_config": _honoured("layers and dtype of the recurrent states"),
    "mamba_memory_ratio": _refused(
        "set max_requests: recurrent states take what so many requests need, KV blocks the rest"
    ),
    "max_requests": _honoured("None: as many as there are KV blocks, at most max_tokens"),
    "max_tokens": _honoured("None: 16384, as in Megatron"),
    "unified_memory_level": _refused("leave it 0: the KV cache lies in device memory alone"),
    "kv_cache_management_mode": _honoured(
        "use 'persist' (the cache stays) or 'recompute' (it is freed, requests are prefilled "
        "again); copies on the host are not kept",
        lambda mode: KVCacheManagementMode(mode) is not KVCacheManagementMode.OFFLOAD,
    ),
    "num_cuda_graphs": _honoured("decode shapes; None and -1: as many as pay; 0: none"),
    "cuda_graph_mixed_prefill_count": _honoured("None or 0: mixed steps run eagerly"),
    "cuda_graph_sizing_distribution": _harmless(OUR_GRAPHS),
    "use_cuda_graphs_for_non_decode_steps": _honoured("as it is"),
    "cuda_graph_all_prefills": _harmless(OUR_GRAPHS),
    "cuda_graph_max_tokens": _harmless(OUR_GRAPHS),
    "static_kv_memory_pointers": _honoured(
        "with 'persist' the cache never moves; with 'recompute' it may, and graphs are captured "
        "again"
    ),
    "max_sequence_length": _honoured("as it is"),
    "pg_collection": _honoured("the model's own groups serve; the dp group offsets the seed"),
    "use_flashinfer_fused_rope": _harmless("rope is fused into this engine's own kernel"),
    "materialize_only_last_token_logits": _harmless(
        "prompt log probs come from hidden states: both values give them"
    ),
    "enable_chunked_prefill": _honoured("as it is"),
    "num_speculative_tokens": _honoured("drafted by the model's own layer (speculative_method)"),
    "enable_prefix_caching": _honoured("as it is"),
    "prefix_caching_eviction_policy": _harmless(
        "blocks are kept until they are needed (LRU); tokens are the same with REF_ZERO"
    ),
    "prefix_caching_coordinator_policy": _harmless(COORDINATOR),
    "prefix_caching_routing_alpha": _harmless(COORDINATOR),
    "prefix_caching_mamba_gb": _honoured("without prefix caching nothing, as in Megatron"),
    "track_paused_request_events": _honoured("as it is"),
    "track_generated_token_events": _honoured("times are those of the report with the token"),
    "metrics_writer": _honoured("any object with wandb's `log`"),
    "logging_step_interval": _honoured("as it is"),
    "sampling_backend": _harmless("sampling has kernels of its own"),
    "offset_sampling_seed_by_dp_rank": _honoured("as it is"),
    "async_sched_mode": _honoured("LEGACY is lookahead 0, ASYNC is lookahead 1"),
    "logprobs_mode": _honoured("applies to every request"),
    "request_metadata_types": _refused(
        "leave it None: per-request tensors of Megatron's context have no counterpart"
    ),
    "use_synchronous_zmq_collectives": _harmless(COORDINATOR),
    "disable_ep_consensus": _harmless(COORDINATOR),
    "ep_consensus_interval": _harmless(COORDINATOR),
}


def check_fields(config: InferenceConfig) -> None:
    """Refuse what is not served.

    Raises:
        ConfigurationError: a field has a value that is not served; its message names both, and
            what to do instead.
    """
    for field in fields(InferenceConfig):
        value, rule = getattr(config, field.name), FIELDS.get(field.name)
        if rule is None:
            rule = _refused("this version of Megatron-Core has a field that is not known here")
        if rule.treatment is Treatment.REFUSED:
            is_served = value == _default(field)
        else:
            is_served = rule.serves is None or rule.serves(value)
        if not is_served:
            raise ConfigurationError(
                f"InferenceConfig.{field.name}={value!r} is not served: {rule.note}."
            )
    mode = KVCacheManagementMode(config.kv_cache_management_mode)
    if config.static_kv_memory_pointers and mode is not KVCacheManagementMode.PERSIST:
        raise ConfigurationError(
            f"InferenceConfig.static_kv_memory_pointers=True is not served with "
            f"kv_cache_management_mode={mode.value!r}: memory that was given back may come back at "
            "other addresses. Use 'persist', or leave static_kv_memory_pointers False (graphs are "
            "captured again)."
        )


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return None if field.default_factory is MISSING else field.default_factory()
