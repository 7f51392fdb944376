"""From Megatron's `InferenceConfig` to the settings of this engine."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.inference.config import AsyncScheduleMode
from megatron.core.inference.config import InferenceConfig as MegatronConfig

from megatron_async.compat.conversions.config_fields import check_fields
from megatron_async.compat.conversions.memory_limits import with_memory_limits
from megatron_async.compat.inference.config import OWN_FIELDS
from megatron_async.compat.inference.config import InferenceConfig as CompatConfig
from megatron_async.config import InferenceConfig
from megatron_async.errors import ConfigurationError
from megatron_async.other_names import no_attribute

logger = logging.getLogger("megatron_async")

DEFAULT_MAX_TOKENS = 16384
"""Megatron's `DynamicInferenceContext.DEFAULT_MAX_TOKENS`."""
LOGPROBS_MODES = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
"""Megatron's names of `logprobs_mode`, and ours."""


class ServedConfig(InferenceConfig):
    """Our settings, made from Megatron's. Names that ours lack are read from Megatron's instance,
    so `context.config` has all names of both.

    Attributes:
        given: Megatron's instance; None in copies that the engine makes for itself.
    """

    given: MegatronConfig | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self.given, name):
            raise no_attribute(self, name)
        return getattr(self.given, name)


def to_settings(model_config: Any, config: MegatronConfig | InferenceConfig) -> ServedConfig:
    """The settings that Megatron's configuration means.

    Args:
        model_config: the model's `TransformerConfig`, with its layer pattern if it is hybrid.
        config: Megatron's, or the subclass of it with our fields; or our own, which stays as it is.

    Returns:
        settings; `given` is Megatron's configuration, with its defaults where `config` is ours.

    Raises:
        ConfigurationError: a value that is not served, by the name of its field.
    """
    if isinstance(config, InferenceConfig):
        own = {name: getattr(config, name) for name in config.__dataclass_fields__}
        own["async_sched_mode"] = None  # lookahead says it
        served = ServedConfig(**own)
        served.given = CompatConfig()
        return served
    if not isinstance(config, MegatronConfig):
        kind = type(config)
        raise ConfigurationError(
            f"inference_config is a {kind.__module__}.{kind.__qualname__}: give Megatron's "
            "InferenceConfig, that of megatron_async.compat.inference.config, or "
            "megatron_async.InferenceConfig."
        )
    check_fields(config)
    _check_model(model_config)
    fields = _same_fields(config) | _own_fields(config)
    fields["lookahead"] = _lookahead(config)
    fields["inference_sampling_seed"] = sampling_seed(model_config, config)
    fields |= _graph_fields(config)
    fields |= _speculation_fields(config)
    fields |= _recurrent_fields(config)
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
    """Megatron's dtype of states, where no other was asked for. That of the convolution's inputs
    is not looked at: these are activations, and kept in the dtype that they have."""
    states = config.mamba_inference_state_config
    if states is None or getattr(config, "mamba_ssm_states_dtype", None) is not None:
        return {}
    return {"mamba_ssm_states_dtype": str(states.ssm_states_dtype)}


def _check_model(model_config: Any) -> None:
    if getattr(model_config, "moe_enable_routing_replay", False):
        raise ConfigurationError(
            "TransformerConfig.moe_enable_routing_replay=True is not served: requests come back "
            "without routing_indices. Leave it False."
        )


def _data_parallel_rank(groups: Any) -> int:
    if not torch.distributed.is_initialized():
        return 0
    group = getattr(groups, "dp", None)
    if group is None:
        if not parallel_state.model_parallel_is_initialized():
            return 0
        group = parallel_state.get_data_parallel_group()
    return torch.distributed.get_rank(group)
