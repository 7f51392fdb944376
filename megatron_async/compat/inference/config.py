"""Megatron's `InferenceConfig` with the settings that only this engine has.

Megatron's enums and `MambaInferenceStateConfig` are its own classes. What becomes of each field
says `compat/conversions/settings.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron.core.inference.config import (
    AsyncScheduleMode,
    CudaGraphSizingDistribution,
    KVCacheManagementMode,
    MambaInferenceStateConfig,
    PrefixCachingCoordinatorPolicy,
    PrefixCachingEvictionPolicy,
)
from megatron.core.inference.config import InferenceConfig as MegatronInferenceConfig

from megatron_async.other_names import names_settings_that_are_meant

__all__ = [
    "OWN_FIELDS",
    "AsyncScheduleMode",
    "CudaGraphSizingDistribution",
    "InferenceConfig",
    "KVCacheManagementMode",
    "MambaInferenceStateConfig",
    "PrefixCachingCoordinatorPolicy",
    "PrefixCachingEvictionPolicy",
]


@names_settings_that_are_meant
@dataclass(kw_only=True)
class InferenceConfig(MegatronInferenceConfig):
    """Megatron's settings, its defaults among them, and ours by keyword.

    The fields below mean what they mean in `megatron_async.InferenceConfig`, where their manual is.
    None leaves the choice to the engine, and to Megatron's field of the same subject.

    Raises:
        TypeError: a keyword is no field; the message names the right one.
        ValueError: by Megatron's own checks. Values that this engine does not serve are refused
            when a context is made.
    """

    device: str | None = None
    """"cpu", "cuda" or "cuda:N". None: "cuda" where there is a GPU, else "cpu". The model's
    parameters must be there."""

    lookahead: int | None = None
    """Steps that may be in flight. None: 0 with `AsyncScheduleMode.LEGACY`, 1 with `ASYNC`; a
    number goes before the mode."""

    num_kv_blocks: int | None = None
    """Blocks of the KV pool, exactly; goes before `buffer_size_gb`."""

    speculative_method: str | None = None
    """None: "mtp", as in Megatron, where `num_speculative_tokens` is above 0. Or "ngram"."""

    kv_cache_dtype: str | None = None
    draft_vocab_size: int | None = None
    quantization: str | None = None
    attention_backend: str | None = None
    invalidation: str | None = None
    mamba_ssm_states_dtype: str | None = None
    """None: as in `mamba_inference_state_config`, or float32 without one."""

    num_state_snapshots: int | None = None
    prefix_caching_mamba_interval: int | None = None
    nvtx: bool | None = None
    check_integrity: bool | None = None
    check_ranks_agree: bool | None = None


OWN_FIELDS = tuple(
    sorted(
        {f.name for f in fields(InferenceConfig)}
        - {f.name for f in fields(MegatronInferenceConfig)}
    )
)
"""Names of the fields that Megatron's class lacks."""
