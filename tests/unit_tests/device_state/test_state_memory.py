"""What slots take is counted before KV blocks are, and comes and goes with the cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceContext, InferenceConfig
from megatron_async.device_state.device_memory import block_shape, make_gpu_view
from megatron_async.device_state.recurrent_state import RecurrentState
from megatron_async.device_state.sampling_state import SamplingState
from megatron_async.devices import CpuDevice
from megatron_async.errors import ConfigurationError, OutOfMemoryError
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.model_config import ModelConfig, transformer_config


def make_model(vocab_size: int) -> ModelConfig:
    model = transformer_config(DUMMY_SHAPES["tiny"], torch.float32)
    model.vocab_size = vocab_size
    return model


def make_context(
    vocab_size: int, free: int, max_requests: int = 7, keeps_tokens: bool = False
) -> DynamicInferenceContext:
    """A context on a device with so many free bytes."""
    device = CpuDevice()
    device.free_memory = partial(int, free)  # type: ignore[method-assign]
    config = InferenceConfig(
        device="cpu",
        max_requests=max_requests,
        max_sequence_length=64,
        enable_prefix_caching=keeps_tokens,
    )
    return DynamicInferenceContext(make_model(vocab_size), config, device)


def test_blocks_share_what_the_states_leave() -> None:
    free = 20_000_000
    small, large = (make_context(vocab_size, free) for vocab_size in (100, 100_000))
    cache = small.gpu_view.kv_cache
    block = cache.num_bytes // (small.blocks.total + 1)
    state = large.gpu_view.states.num_bytes(7) - small.gpu_view.states.num_bytes(7)
    assert state == 8 * 4 * (100_000 - 100), "one row more than there are slots"
    fewer = small.blocks.total - large.blocks.total
    assert fewer == pytest.approx(0.8 * state / block, abs=1)


def test_tokens_beside_the_keys_are_counted() -> None:
    plain, kept = (make_context(100, 20_000_000, keeps_tokens=keeps) for keeps in (False, True))
    sizes = [c.gpu_view.kv_cache.num_bytes for c in (plain, kept)]
    assert plain.gpu_view.kv_cache.block_tokens is None
    assert kept.gpu_view.kv_cache.block_tokens is not None
    assert kept.blocks.total < plain.blocks.total
    assert sizes[0] == pytest.approx(sizes[1], abs=sizes[0] // plain.blocks.total)


@pytest.mark.parametrize("stage", [0, 1])
def test_only_the_stage_that_samples_keeps_tokens(stage: int) -> None:
    model = make_model(100)
    model.hybrid_layer_pattern, model.pipeline_stage = "*-|*-", stage
    config, kept = (
        InferenceConfig(
            device="cpu",
            max_requests=7,
            num_kv_blocks=5,
            block_size_tokens=4,
            enable_prefix_caching=keeps,
        )
        for keeps in (False, True)
    )
    view = make_gpu_view(model, kept, CpuDevice())
    assert (view.kv_cache.block_tokens is not None) == (stage == 1)
    more = block_shape(model, kept).num_bytes - block_shape(model, config).num_bytes
    assert more == 16 * stage
    assert view.kv_cache.num_bytes == 6 * block_shape(model, kept).num_bytes


def test_states_that_do_not_fit_are_refused_with_what_fits() -> None:
    with pytest.raises(OutOfMemoryError, match=r"max_requests=7 .* At most max_requests=3 fits"):
        make_context(1_000_000, 18_000_000)
    make_context(1_000_000, 18_000_000, max_requests=3)
    with pytest.raises(OutOfMemoryError, match="Not even one request's fits"):
        make_context(1_000_000, 7_000_000)


def hybrid_context(free: int = 400_000_000, **settings: Any) -> DynamicInferenceContext:
    device = CpuDevice()
    device.free_memory = partial(int, free)  # type: ignore[method-assign]
    model = transformer_config(DUMMY_SHAPES["tiny-hybrid"], torch.float32)
    model.vocab_size = 100
    config = InferenceConfig(
        device="cpu", max_requests=4, max_sequence_length=512, enable_prefix_caching=True,
        **{"num_kv_blocks": 9, **settings},
    )  # fmt: skip
    return DynamicInferenceContext(model, config, device)


def test_snapshots_have_rows_of_their_own() -> None:
    """In the pool of live states, counted before KV blocks are; a share of memory, or a number."""
    plain, three = hybrid_context(), hybrid_context(num_state_snapshots=3)
    states = [context.gpu_view.states.find(RecurrentState) for context in (plain, three)]
    assert states[0] is not None
    assert states[1] is not None
    each = states[0].bytes_per_slot
    assert len(states[0].base) == 5  # four requests, and one for padding
    assert len(states[1].base) == 8
    assert sum(pool.nbytes for layer in states[1]._by_kind for pool in layer) == 8 * each
    more = three.gpu_view.states.num_bytes(4) - plain.gpu_view.states.num_bytes(4)
    assert more == 3 * each
    gigabytes = 5.5 * each / 2**30
    by_memory = hybrid_context(prefix_caching_mamba_gb=gigabytes)
    assert by_memory.sharing is not None
    assert (by_memory.sharing.snapshots, by_memory.sharing.limit) == (5, 5)
    for off in (0, -1.5):  # as in Megatron
        sharing = hybrid_context(prefix_caching_mamba_gb=off).sharing
        assert sharing is not None
        assert (sharing.snapshots, sharing.limit) == (0, 0)
    both = hybrid_context(prefix_caching_mamba_gb=-1, num_state_snapshots=3)
    assert both.sharing == three.sharing
    # A snapshot weighs as much as the keys and values of as many tokens.
    assert plain.sharing is not None
    block = block_shape(plain.model_config, plain.config).num_bytes
    assert plain.sharing.interval == -(-each * 256 // block)


def test_snapshots_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OutOfMemoryError, match=r"GiB for snapshots of states.*mamba_gb lower"):
        hybrid_context(free=4_000_000, num_state_snapshots=500)
    with pytest.raises(ConfigurationError, match=r"mamba_gb=1e-06 has no room for a snapshot"):
        hybrid_context(prefix_caching_mamba_gb=1e-6)


def test_a_released_state_has_no_memory_and_comes_back_zeroed() -> None:
    state = SamplingState(3, 1000, torch.device("cpu"))
    assert state.memory.counts.nbytes == 0
    state.allocate()
    assert 4 * state.bytes_per_slot == state.memory.counts.nbytes + state.memory.recent.nbytes
    state.memory.counts.fill_(7)
    state.release()
    assert state.memory.counts.nbytes == state.memory.recent.nbytes == 0
    state.allocate()
    assert not state.memory.counts.any()
