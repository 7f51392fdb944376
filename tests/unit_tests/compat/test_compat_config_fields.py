"""Every field of Megatron's `InferenceConfig` is honoured, known to be harmless, or refused."""

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.inference.config import (
    AsyncScheduleMode,
    CudaGraphSizingDistribution,
    KVCacheManagementMode,
    MambaInferenceStateConfig,
    PrefixCachingCoordinatorPolicy,
    PrefixCachingEvictionPolicy,
)
from megatron.core.inference.config import InferenceConfig as MegatronConfig

import megatron_async
from megatron_async.compat.conversions.settings import FIELDS, Treatment, to_settings
from megatron_async.compat.inference.config import InferenceConfig
from megatron_async.errors import ConfigurationError
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.model_config import transformer_config
from tests.support.harness import TINY

MODEL = transformer_config(TINY, torch.float32)
BLOCK = 2 * 2 * 256 * 2 * 8 * 4
"""Bytes of a block of 256 tokens of this model."""
GIB = 1024**3


def settings(**changes: Any) -> Any:
    return to_settings(MODEL, MegatronConfig(**changes))


def named(treatment: Treatment) -> list[str]:
    return sorted(name for name, rule in FIELDS.items() if rule.treatment is treatment)


def test_every_field_of_this_megatron_is_known() -> None:
    assert {field.name for field in fields(MegatronConfig)} == set(FIELDS)


HONOURED: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "block_size_tokens": [(16, {"block_size_tokens": 16})],
    "buffer_size_gb": [(0.5, {"buffer_size_gb": 0.5}), (20, {"buffer_size_gb": 1.0})],
    "paused_buffer_size_gb": [
        (0.25, {"paused_buffer_size_gb": 0.25}),
        (0, {"paused_buffer_size_gb": None}),
    ],
    "max_requests": [(7, {"max_requests": 7})],
    "max_tokens": [(4096, {"max_tokens": 4096}), (None, {"max_tokens": 16384})],
    "num_cuda_graphs": [
        (16, {"num_cuda_graphs": 16}),
        (-1, {"num_cuda_graphs": None}),
        (0, {"num_cuda_graphs": 0}),
    ],
    "cuda_graph_mixed_prefill_count": [
        (4, {"cuda_graph_mixed_prefill_count": 4, "use_cuda_graphs_for_non_decode_steps": True}),
        (0, {"use_cuda_graphs_for_non_decode_steps": False}),
        (None, {"use_cuda_graphs_for_non_decode_steps": False}),
    ],
    "use_cuda_graphs_for_non_decode_steps": [
        (False, {"use_cuda_graphs_for_non_decode_steps": False})
    ],
    "max_sequence_length": [(100, {"max_sequence_length": 100})],
    "enable_chunked_prefill": [
        (True, {"enable_chunked_prefill": True}),
        (False, {"enable_chunked_prefill": False}),
    ],
    "num_speculative_tokens": [
        (2, {"num_speculative_tokens": 2, "speculative_method": "mtp"}),
        (0, {"num_speculative_tokens": 0, "speculative_method": None}),
    ],
    "enable_prefix_caching": [
        (True, {"enable_prefix_caching": True}),
        (False, {"enable_prefix_caching": False}),
    ],
    "logging_step_interval": [(5, {"logging_step_interval": 5})],
    "async_sched_mode": [
        (AsyncScheduleMode.LEGACY, {"lookahead": 0}),
        (AsyncScheduleMode.ASYNC, {"lookahead": 1}),
        ("async", {"lookahead": 1}),
    ],
    "mamba_inference_state_config": [
        (
            MambaInferenceStateConfig(["M", "*"], (1,), (1,), torch.bfloat16, torch.bfloat16),
            {"mamba_ssm_states_dtype": "bfloat16"},
        )
    ],
}
"""By field: a value, and what our settings say then."""
ELSEWHERE = {
    "kv_cache_management_mode": "test_compat_suspension",
    "static_kv_memory_pointers": "below",
    "mamba_memory_ratio": "below",
    "pg_collection": "below",
    "prefix_caching_mamba_gb": "below",
    "track_paused_request_events": "test_compat_events",
    "track_generated_token_events": "test_compat_events",
    "metrics_writer": "test_compat_events",
    "offset_sampling_seed_by_dp_rank": "below",
    "logprobs_mode": "test_compat_requests",
}
"""Honoured by other parts than our settings, and where that is tested."""


def test_every_honoured_field_has_a_test() -> None:
    assert sorted(HONOURED | ELSEWHERE) == named(Treatment.HONOURED)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [(name, *case) for name, cases in HONOURED.items() for case in cases],
)
def test_an_honoured_field_reaches_our_settings(name: str, value: Any, expected: dict[str, Any]):
    found = settings(**{name: value})
    assert {key: getattr(found, key) for key in expected} == expected


HARMLESS: dict[str, Any] = {
    "cuda_graph_all_prefills": True,
    "cuda_graph_max_tokens": 1024,
    "cuda_graph_sizing_distribution": CudaGraphSizingDistribution.LINEAR,
    "disable_ep_consensus": True,
    "ep_consensus_interval": 3,
    "materialize_only_last_token_logits": False,
    "prefix_caching_coordinator_policy": PrefixCachingCoordinatorPolicy.LONGEST_PREFIX,
    "prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.LRU,
    "prefix_caching_routing_alpha": 0.9,
    "sampling_backend": "torch",
    "use_flashinfer_fused_rope": None,
    "use_synchronous_zmq_collectives": True,
}


def test_harmless_fields_change_nothing() -> None:
    assert sorted(HARMLESS) == named(Treatment.HARMLESS)
    plain = settings()
    for name, value in HARMLESS.items():
        assert settings(**{name: value}) == plain, name


REFUSED: dict[str, Any] = {
    "request_metadata_types": [("temperature", torch.float32)],
    "unified_memory_level": 1,
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_fields_are_named(name: str) -> None:
    assert sorted(REFUSED) == named(Treatment.REFUSED)
    with pytest.raises(ConfigurationError, match=f"InferenceConfig.{name}=") as caught:
        settings(**{name: REFUSED[name]})
    assert FIELDS[name].note in str(caught.value)


def test_a_field_of_a_newer_megatron_is_refused_by_its_name(monkeypatch):
    monkeypatch.delitem(FIELDS, "ep_consensus_interval")
    settings()  # its default is served
    with pytest.raises(ConfigurationError, match="ep_consensus_interval=3"):
        settings(ep_consensus_interval=3)


@pytest.mark.parametrize("mode", list(KVCacheManagementMode))
def test_addresses_are_kept_where_the_cache_is_given_back(mode: KVCacheManagementMode) -> None:
    assert not settings(kv_cache_management_mode=mode).enable_sleep_mode
    found = settings(kv_cache_management_mode=mode, static_kv_memory_pointers=True)
    assert found.enable_sleep_mode is (mode is not KVCacheManagementMode.PERSIST)


def test_snapshot_memory_counts_only_with_prefix_caching() -> None:
    assert settings(prefix_caching_mamba_gb=1.0).prefix_caching_mamba_gb is None
    found = settings(prefix_caching_mamba_gb=1.0, enable_prefix_caching=True)
    assert found.prefix_caching_mamba_gb == 1.0
    for off in (0.0, -1.0):
        assert settings(prefix_caching_mamba_gb=off, enable_prefix_caching=True) == replace(
            found, prefix_caching_mamba_gb=off
        )


def test_without_limits_there_are_as_many_requests_as_blocks() -> None:
    found = settings(buffer_size_gb=103 * BLOCK / GIB)
    assert found.max_requests == 100  # 102 beside the dummy block, in fours
    assert settings(buffer_size_gb=4.0).max_requests == 16384  # no more than tokens of a step
    assert settings(buffer_size_gb=1.0, max_tokens=50).max_requests == 48
    own = to_settings(MODEL, InferenceConfig(num_kv_blocks=40))
    assert (own.num_kv_blocks, own.max_requests) == (40, 40)


def test_recurrent_states_are_taken_from_the_buffer() -> None:
    from tests.support.hybrid_model import HYBRID

    model = transformer_config(HYBRID, torch.float32)
    states = MambaInferenceStateConfig(
        list(model.hybrid_layer_pattern or ""), (1,), (1,), torch.float32, torch.float32
    )
    config = MegatronConfig(buffer_size_gb=0.1, max_requests=8, mamba_inference_state_config=states)
    few, many = (
        to_settings(model, MegatronConfig(**{**vars_of(config), "max_requests": count}))
        for count in (8, 16)
    )
    assert 0 < many.buffer_size_gb < few.buffer_size_gb < 0.1
    none = to_settings(model, MegatronConfig(**{**vars_of(config), "max_requests": None}))
    assert none.buffer_size_gb < many.buffer_size_gb
    with pytest.raises(ConfigurationError, match=r"buffer_size_gb=0\.001"):
        to_settings(
            model,
            MegatronConfig(**{**vars_of(config), "buffer_size_gb": 0.001, "max_requests": 999}),
        )


def test_a_share_of_the_buffers_is_for_recurrent_states() -> None:
    """The formula of `DynamicInferenceContext.__init__` of megatron-core 0.19.2."""
    from tests.support.hybrid_model import HYBRID

    model = transformer_config(HYBRID, torch.float32)
    states = MambaInferenceStateConfig(
        list(model.hybrid_layer_pattern or ""), (1,), (1,), torch.float32, torch.float32
    )

    def made(ratio: float, **changes: Any) -> Any:
        fields = {"buffer_size_gb": 0.25, "mamba_inference_state_config": states} | changes
        return to_settings(model, InferenceConfig(mamba_memory_ratio=ratio, **fields))

    few = made(0.1)
    assert few.buffer_size_gb == pytest.approx(0.225)
    by_bytes = to_settings(
        model,
        MegatronConfig(
            buffer_size_gb=0.25, max_requests=few.max_requests, mamba_inference_state_config=states
        ),
    )
    bytes_of_states = (0.25 - by_bytes.buffer_size_gb) * GIB / few.max_requests
    assert few.max_requests == int(0.025 * GIB // bytes_of_states) // 4 * 4
    paused = made(0.1, paused_buffer_size_gb=0.25)
    assert paused.paused_buffer_size_gb == pytest.approx(0.225)
    assert paused.max_requests == int(0.05 * GIB // bytes_of_states) // 4 * 4
    assert made(0.1, max_requests=8).max_requests == 8
    for fault in ({"ratio": 1.0}, {"ratio": 0.0}, {"ratio": 0.1, "num_kv_blocks": 9}):
        with pytest.raises(ConfigurationError, match="mamba_memory_ratio"):
            made(**fault)
    with pytest.raises(ConfigurationError, match="mamba_inference_state_config"):
        settings(mamba_memory_ratio=0.1)


def vars_of(config: MegatronConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}


def test_our_fields_by_keyword() -> None:
    config = InferenceConfig(
        device="cpu", lookahead=2, num_kv_blocks=9, check_integrity=True, num_speculative_tokens=2,
        speculative_method="ngram", mamba_ssm_states_dtype="bfloat16", max_requests=3,
        quantization="int8",
    )  # fmt: skip
    assert isinstance(config, MegatronConfig)
    found = to_settings(MODEL, config)
    assert (found.device, found.lookahead, found.num_kv_blocks) == ("cpu", 2, 9)
    assert (found.check_integrity, found.speculative_method) == (True, "ngram")
    assert (found.mamba_ssm_states_dtype, found.quantization) == ("bfloat16", "int8")
    ahead = to_settings(MODEL, InferenceConfig(async_sched_mode="async", lookahead=3))
    assert ahead.lookahead == 3
    with pytest.raises(ConfigurationError, match="lookahead=0"):
        to_settings(MODEL, InferenceConfig(async_sched_mode="async", lookahead=0))


def test_settings_have_megatrons_names_too() -> None:
    config = MegatronConfig(logprobs_mode="processed_logprobs", unified_memory_level=0)
    found = to_settings(MODEL, config)
    assert found.given is config
    assert found.logprobs_mode == "processed_logprobs"
    assert found.track_paused_request_events is False
    with pytest.raises(AttributeError, match="no_such_field"):
        _ = found.no_such_field
    with pytest.raises(AttributeError, match=r"Did you mean 'lookahead=1'\?$"):
        _ = found.async_scheduling


def test_our_own_configuration_stays_as_it_is() -> None:
    own = megatron_async.InferenceConfig(max_requests=5, lookahead=2, num_kv_blocks=11)
    found = to_settings(MODEL, own)
    names = [field.name for field in fields(own) if field.name != "async_sched_mode"]
    assert [getattr(found, name) for name in names] == [getattr(own, name) for name in names]


def test_other_objects_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"builtins\.dict"):
        to_settings(MODEL, {})  # type: ignore[arg-type]


def test_routing_replay_is_a_field_of_the_model() -> None:
    config = transformer_config(DUMMY_SHAPES["tiny-moe"], torch.float32)
    assert not to_settings(config, MegatronConfig()).enable_routing_replay
    config.moe_enable_routing_replay = True
    assert to_settings(config, MegatronConfig()).enable_routing_replay
    dense = transformer_config(TINY, torch.float32)
    dense.moe_enable_routing_replay = True
    with pytest.raises(ConfigurationError, match="has no layers with experts"):
        to_settings(dense, MegatronConfig())


def test_the_seed_is_the_models_and_differs_by_data_parallel_rank(monkeypatch):
    model = transformer_config(TINY, torch.float32)
    model.inference_sampling_seed = 100
    groups = SimpleNamespace(dp=object())
    asked = []

    def rank_in(group: Any) -> int:
        asked.append(group)
        return 3

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", rank_in)
    monkeypatch.setattr(
        "megatron_async.compat.conversions.memory_limits.resolve_device_name", lambda _: "cpu"
    )

    def seed(**changes: Any) -> int:
        config = MegatronConfig(pg_collection=groups, **changes)
        return to_settings(model, config).inference_sampling_seed

    assert seed() == 103
    assert asked == [groups.dp]
    assert seed(offset_sampling_seed_by_dp_rank=False) == 100
    model.deterministic_mode = True
    assert seed() == 100
