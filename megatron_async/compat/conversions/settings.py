"""From Megatron's `InferenceConfig` to the settings of this engine: what becomes of each field.

A field that is not in `FIELDS` is refused when it has another value than its default: a newer
Megatron may have fields that nobody here has read about.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, replace
from enum import Enum
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.inference.config import AsyncScheduleMode, KVCacheManagementMode
from megatron.core.inference.config import InferenceConfig as MegatronConfig

from megatron_async.compat.conversions.memory_limits import with_memory_limits
from megatron_async.compat.inference.config import OWN_FIELDS
from megatron_async.compat.inference.config import InferenceConfig as CompatConfig
from megatron_async.config import InferenceConfig
from megatron_async.errors import ConfigurationError
from megatron_async.other_names import ENGINE_ADVICE, no_attribute


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
    """One field: what it does, and how it is honoured, why it is harmless, or what to do instead of
    it. `serves`: whether a value of an honoured field is served; None: all that our own
    configuration takes are."""

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
    "mamba_memory_ratio": _honoured("states of max_requests None; the rest is of KV blocks"),
    "max_requests": _honoured("None: as many as there are KV blocks, at most max_tokens"),
    "max_tokens": _honoured("None: 16384, as in Megatron"),
    "kv_cache_management_mode": _honoured(
        "what suspend does to keys, values and states: 'persist' leaves them, 'offload' frees them "
        "with a copy on the host, 'recompute' without one"
    ),
    "num_cuda_graphs": _honoured("decode shapes; None and -1: as many as pay; 0: none"),
    "cuda_graph_mixed_prefill_count": _honoured("None or 0: mixed steps run eagerly"),
    "use_cuda_graphs_for_non_decode_steps": _honoured("as it is"),
    "static_kv_memory_pointers": _honoured(
        "addresses stay, and captured steps valid, by enable_sleep_mode; False: what was freed may "
        "come back elsewhere, and graphs are captured again"
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
    **_as_elsewhere(Treatment.REFUSED, "unified_memory_level request_metadata_types"),
}


def check_fields(config: MegatronConfig) -> None:
    """Refuse fields with values that are not served, by name, with what to do instead."""
    for field in fields(MegatronConfig):
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


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return None if field.default_factory is MISSING else field.default_factory()


logger = logging.getLogger("megatron_async")

DEFAULT_MAX_TOKENS = 16384
"""Megatron's `DynamicInferenceContext.DEFAULT_MAX_TOKENS`."""
LOGPROBS_MODES = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
"""Megatron's names of `logprobs_mode`, and ours."""


class ServedConfig(InferenceConfig):
    """Our settings, made from Megatron's instance (`given`; None in copies that the engine makes
    for itself). Names that ours lack are read from it, so `context.config` has all names of
    both."""

    given: MegatronConfig | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        # Megatron's models read it in every step: one of Export-Deploy's writes must not change
        # what a step computes. Log probs of prompts need no other logits.
        if name != "materialize_only_last_token_logits":
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self.given, name):
            raise no_attribute(self, name)
        return getattr(self.given, name)


def to_settings(model_config: Any, config: MegatronConfig | InferenceConfig) -> ServedConfig:
    """The settings that Megatron's configuration means; our own stays as it is, and `given` then
    has Megatron's defaults.

    Raises:
        ConfigurationError: a value that is not served, by the name of its field.
    """
    is_invariant = bool(getattr(model_config, "batch_invariant_mode", False))
    if isinstance(config, InferenceConfig):
        own = {name: getattr(config, name) for name in config.__dataclass_fields__}
        own["async_sched_mode"] = None  # lookahead says it
        own["batch_invariant_mode"] |= is_invariant
        served = ServedConfig(**own)
        served.given = CompatConfig()
        return served
    if not isinstance(config, MegatronConfig):
        kind = type(config)
        raise ConfigurationError(
            f"inference_config is a {kind.__module__}.{kind.__qualname__}: give Megatron's "
            "InferenceConfig, the one of megatron_async.compat.inference.config, or "
            "megatron_async.InferenceConfig."
        )
    check_fields(config)
    fields = _same_fields(config) | _own_fields(config)
    fields["lookahead"] = _lookahead(config)
    fields["inference_sampling_seed"] = sampling_seed(model_config, config)
    fields |= _graph_fields(config)
    fields |= _speculation_fields(config)
    fields |= _recurrent_fields(config)
    if getattr(model_config, "moe_enable_routing_replay", False):
        fields["enable_routing_replay"] = True
    fields["batch_invariant_mode"] = is_invariant
    mode = KVCacheManagementMode(config.kv_cache_management_mode)
    if config.static_kv_memory_pointers and mode is not KVCacheManagementMode.PERSIST:
        fields["enable_sleep_mode"] = True  # a cache that persists never moves
    # How many requests there may be follows from memory, and memory from the other settings.
    served = ServedConfig(**fields, max_requests=1)
    limits = with_memory_limits(model_config, config, served)
    served = replace(served, **limits)
    served.given = config
    return served


def sampling_seed(model_config: Any, config: MegatronConfig) -> int:
    """`TransformerConfig.inference_sampling_seed`, plus the data-parallel rank as in Megatron
    (`offset_sampling_seed_by_dp_rank`, and not `deterministic_mode`)."""
    seed = int(getattr(model_config, "inference_sampling_seed", 42))
    if config.offset_sampling_seed_by_dp_rank and not model_config.deterministic_mode:
        seed += _data_parallel_rank(config.pg_collection)
    return seed


def _same_fields(config: MegatronConfig) -> dict[str, Any]:
    """Fields that mean the same here, Megatron's None resolved."""
    names = (
        "block_size_tokens",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "logging_step_interval",
        "max_sequence_length",
    )
    same = {name: getattr(config, name) for name in names}
    same["max_tokens"] = config.max_tokens or DEFAULT_MAX_TOKENS
    same["paused_buffer_size_gb"] = config.paused_buffer_size_gb or None
    if config.enable_prefix_caching:
        same["prefix_caching_mamba_gb"] = config.prefix_caching_mamba_gb
    return same


def _own_fields(config: MegatronConfig) -> dict[str, Any]:
    """What was set of the fields that Megatron's class lacks."""
    given = {name: getattr(config, name, None) for name in OWN_FIELDS}
    return {name: value for name, value in given.items() if value is not None}


def _lookahead(config: MegatronConfig) -> int:
    mode = AsyncScheduleMode(config.async_sched_mode)
    asked: int | None = getattr(config, "lookahead", None)
    if mode is AsyncScheduleMode.ASYNC:
        if asked == 0:
            raise ConfigurationError(
                "async_sched_mode='async' means at least one step ahead, but lookahead=0 was given "
                "too. Leave one of them out."
            )
        return 1 if asked is None else asked
    if asked is None:
        logger.info(
            "async_sched_mode is LEGACY, Megatron's default: every step waits for the one before. "
            "Set AsyncScheduleMode.ASYNC (--inference-dynamic-batching-async-sched-mode async) to "
            "launch ahead; the tokens are the same."
        )
        return 0
    return asked


def _graph_fields(config: MegatronConfig) -> dict[str, Any]:
    count = config.num_cuda_graphs
    mixed = config.cuda_graph_mixed_prefill_count
    fields: dict[str, Any] = {
        "num_cuda_graphs": None if count == -1 else count,
        "use_cuda_graphs_for_non_decode_steps": bool(
            config.use_cuda_graphs_for_non_decode_steps and mixed
        ),
    }
    if mixed:
        fields["cuda_graph_mixed_prefill_count"] = mixed
    return fields


def _speculation_fields(config: MegatronConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"num_speculative_tokens": config.num_speculative_tokens}
    if config.num_speculative_tokens and getattr(config, "speculative_method", None) is None:
        fields["speculative_method"] = "mtp"
    return fields


def _recurrent_fields(config: MegatronConfig) -> dict[str, Any]:
    """Megatron's dtype of states, where no other was asked for. The convolution's inputs'
    is not looked at: these are activations, and kept in the dtype that they have."""
    states = config.mamba_inference_state_config
    if states is None or getattr(config, "mamba_ssm_states_dtype", None) is not None:
        return {}
    return {"mamba_ssm_states_dtype": str(states.ssm_states_dtype)}


def _data_parallel_rank(groups: Any) -> int:
    if not torch.distributed.is_initialized():
        return 0
    group = getattr(groups, "dp", None)
    if group is None:
        if not parallel_state.model_parallel_is_initialized():
            return 0
        group = parallel_state.get_data_parallel_group()
    return torch.distributed.get_rank(group)
