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
from megatron_async.other_names import ENGINE_ADVICE


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


def _as_elsewhere(treatment: Treatment, names: str) -> dict[str, FieldRule]:
    """Rules of fields that our own configuration refuses with the same words."""
    return {name: FieldRule(treatment, ENGINE_ADVICE[name]) for name in names.split()}


FIELDS: dict[str, FieldRule] = {
    "block_size_tokens": _honoured("as it is"),
    "buffer_size_gb": _honoured("on a CPU, where Megatron does not run, its default means 1 GiB"),
    "paused_buffer_size_gb": _honoured("beyond it a paused request is evicted; None: no limit"),
    "mamba_inference_state_config": _honoured("layers and dtype of the recurrent states"),
    "max_requests": _honoured("None: as many as there are KV blocks, at most max_tokens"),
    "max_tokens": _honoured("None: 16384, as in Megatron"),
    "kv_cache_management_mode": _honoured(
        "use 'persist' (the cache stays) or 'recompute' (it is freed, requests are prefilled "
        "again); copies on the host are not kept",
        lambda mode: KVCacheManagementMode(mode) is not KVCacheManagementMode.OFFLOAD,
    ),
    "num_cuda_graphs": _honoured("decode shapes; None and -1: as many as pay; 0: none"),
    "cuda_graph_mixed_prefill_count": _honoured("None or 0: mixed steps run eagerly"),
    "use_cuda_graphs_for_non_decode_steps": _honoured("as it is"),
    "static_kv_memory_pointers": _honoured(
        "with 'persist' the cache never moves; with 'recompute' it may, and graphs are captured "
        "again"
    ),
    "max_sequence_length": _honoured("as it is"),
    "pg_collection": _honoured("the model's own groups serve; the dp group offsets the seed"),
    "enable_chunked_prefill": _honoured("as it is"),
    "num_speculative_tokens": _honoured("drafted by the model's own layer (speculative_method)"),
    "enable_prefix_caching": _honoured("as it is"),
    "prefix_caching_mamba_gb": _honoured(
        "0 or less, and without prefix caching: no snapshots, as in Megatron. None: those that fit "
        "in rows which no request needs (Megatron keeps none)"
    ),
    "track_paused_request_events": _honoured("as it is"),
    "track_generated_token_events": _honoured("times are those of the report with the token"),
    "metrics_writer": _honoured("any object with wandb's `log`"),
    "logging_step_interval": _honoured("as it is"),
    "offset_sampling_seed_by_dp_rank": _honoured("as it is"),
    "async_sched_mode": _honoured("LEGACY is lookahead 0, ASYNC is lookahead 1"),
    "logprobs_mode": _honoured("applies to every request"),
    "materialize_only_last_token_logits": FieldRule(
        Treatment.HARMLESS, "prompt log probs come from hidden states: both values give them"
    ),
    **_as_elsewhere(
        Treatment.HARMLESS,
        "cuda_graph_sizing_distribution cuda_graph_all_prefills cuda_graph_max_tokens "
        "use_flashinfer_fused_rope prefix_caching_eviction_policy prefix_caching_routing_alpha "
        "prefix_caching_coordinator_policy sampling_backend use_synchronous_zmq_collectives "
        "disable_ep_consensus ep_consensus_interval",
    ),
    **_as_elsewhere(
        Treatment.REFUSED, "mamba_memory_ratio unified_memory_level request_metadata_types"
    ),
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
            rule = FieldRule(
                Treatment.REFUSED,
                "this version of Megatron-Core has a field that is not known here",
            )
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
