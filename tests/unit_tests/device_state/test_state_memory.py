"""What slots take is counted before KV blocks are, and comes and goes with the cache."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_async import DynamicInferenceContext, InferenceConfig
from megatron_async.device_state.device_memory import block_bytes, make_gpu_view
from megatron_async.device_state.sampling_state import SamplingState
from megatron_async.devices import CpuDevice
from megatron_async.errors import OutOfMemoryError
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
    more = block_bytes(model, kept) - block_bytes(model, config)
    assert more == 16 * stage
    assert view.kv_cache.num_bytes == 6 * block_bytes(model, kept)


def test_states_that_do_not_fit_are_refused_with_what_fits() -> None:
    with pytest.raises(OutOfMemoryError, match=r"max_requests=7 .* At most max_requests=3 fits"):
        make_context(1_000_000, 18_000_000)
    make_context(1_000_000, 18_000_000, max_requests=3)
    with pytest.raises(OutOfMemoryError, match="Not even one request's fits"):
        make_context(1_000_000, 7_000_000)


def test_a_released_state_has_no_memory_and_comes_back_zeroed() -> None:
    state = SamplingState(3, 1000, torch.device("cpu"))
    assert state.counts.nbytes == 0
    state.allocate()
    assert 4 * state.bytes_per_slot == state.counts.nbytes + state.recent.nbytes
    state.counts.fill_(7)
    state.release()
    assert state.counts.nbytes == state.recent.nbytes == 0
    state.allocate()
    assert not state.counts.any()
