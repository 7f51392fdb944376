"""The size of the KV pool: what was asked for, or an error whose advice works when followed; what
slots take is counted before it, and comes and goes with the cache."""

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceContext, InferenceConfig
from megatron_async.device_state.device_memory import block_shape, make_gpu_view
from megatron_async.device_state.kv_cache import GIB, BlockShape, PagedKVCache, blocks_that_fit
from megatron_async.device_state.pools import Pools
from megatron_async.device_state.recurrent_state import RecurrentState
from megatron_async.device_state.sampling_state import SamplingState
from megatron_async.devices import CpuDevice
from megatron_async.errors import ConfigurationError, OutOfMemoryError
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.model_config import ModelConfig, transformer_config

MIB = 2**20
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("blocks", "gb", "fits"),
    [
        (7, None, 7),
        (7, 99.0, 7),  # num_kv_blocks overrides buffer_size_gb
        (None, 10 / 1024, 9),  # one block is the dummy block
        (None, None, 818),  # 80 % of what is free, where that is less than 1 GiB
    ],
)
def test_blocks_that_fit(blocks, gb, fits):
    assert blocks_that_fit(MIB, GIB, CPU, blocks, gb) == fits


def test_default_pools():
    assert blocks_that_fit(MIB, 100 * GIB, CPU, None, None) == 1023
    cuda = torch.device("cuda")
    assert blocks_that_fit(MIB, 100 * GIB, cuda, None, None) == 80 * 1024 - 1


@pytest.mark.parametrize(
    ("blocks", "gb", "words"),
    [
        (1024, None, ("num_kv_blocks=1024", "num_kv_blocks=1023")),
        (None, 2.0, ("buffer_size_gb=2", "1 GiB is free")),
        (None, 1 / 1024, ("buffer_size_gb=0.000977", "one block", "block_size_tokens")),
    ],
)
def test_a_pool_that_does_not_fit_names_value_and_remedy(blocks, gb, words):
    with pytest.raises(OutOfMemoryError) as error:
        blocks_that_fit(MIB, GIB, CPU, blocks, gb)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("block_bytes", [MIB, MIB + 12345, 7 * MIB - 1])
@pytest.mark.parametrize("free_blocks", [2, 3, 1000])
@pytest.mark.parametrize("more", [5000, -1])  # beyond whole blocks: a little, nearly one more
@pytest.mark.parametrize(("blocks", "gb"), [(5000, None), (None, 99.0), (None, 1e-6)])
def test_the_advice_works_when_followed(block_bytes, free_blocks, more, blocks, gb):
    # 5000, because the advice is rounded to 1e-6 GiB, about 1 KiB.
    free = free_blocks * block_bytes + more % block_bytes
    with pytest.raises(OutOfMemoryError) as error:
        blocks_that_fit(block_bytes, free, CPU, blocks, gb)
    text = str(error.value)
    advised = float(re.findall(r"buffer_size_gb=([0-9.]+)\b", text)[-1])
    wanted = 1 if gb == 1e-6 else free_blocks - 1
    assert blocks_that_fit(block_bytes, free, CPU, None, advised) == wanted
    for count in re.findall(r"At most num_kv_blocks=([0-9]+)", text):
        assert blocks_that_fit(block_bytes, free, CPU, int(count), None) == free_blocks - 1


def test_no_block_fits_at_all():
    with pytest.raises(OutOfMemoryError, match="Not even one block fits: lower block_size_tokens"):
        blocks_that_fit(MIB, 2 * MIB - 1, CPU, 1, None)


@pytest.mark.parametrize("layers", [0, 3])
def test_tokens_are_a_part_of_the_cache(layers):
    without = BlockShape(layers, 4, 2, 8, torch.float32)
    shape = replace(without, keeps_tokens=True)
    assert shape.num_bytes == without.num_bytes + 16
    cache = PagedKVCache(shape, 5, Pools(CPU))
    assert cache.num_bytes == 6 * shape.num_bytes
    assert cache.block_tokens is not None
    assert (cache.block_tokens.shape, cache.block_tokens.dtype) == ((6, 4), torch.int32)
    cache.release()
    assert cache.block_tokens is None
    cache.allocate()
    assert cache.block_tokens is not None
    assert not cache.block_tokens.any()


def test_layers_are_separate_views_with_a_dummy_block():
    shape = BlockShape(3, 4, 2, 8, torch.float32)
    cache = PagedKVCache(shape, 5, Pools(CPU))
    parts = [part for layer in range(3) for part in cache.layer(layer)]
    assert all(part.shape == (6, 4, 2, 8) for part in parts)
    assert len({part.data_ptr() for part in parts}) == 6
    assert all((part == 0).all() for part in parts)
    assert cache.dummy_block == 5
    total = shape.num_bytes * 6
    assert sum(part.numel() * part.itemsize for part in parts) == total


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_pool_on_a_cpu_takes_memory_as_it_is_written():
    """An engine starts half a second sooner than with a pool that is zeroed."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, shape = resident(), BlockShape(2, 16, 2, 64, torch.float32, keeps_tokens=True)
    cache = PagedKVCache(shape, GIB // shape.num_bytes, Pools(CPU))
    assert cache.num_bytes >= GIB
    assert resident() - before < GIB // 4
    keys, values = cache.layer(1)
    assert keys.data_ptr() % 64 == cache.block_tokens.data_ptr() % 64 == 0
    assert not keys[-3:].any()
    assert not values[:3].any()
    assert not cache.block_tokens.any()


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
    state = SamplingState(3, 1000, Pools(CPU))
    assert state.memory.counts.nbytes == 0
    state.allocate()
    assert 4 * state.bytes_per_slot == state.memory.counts.nbytes + state.memory.recent.nbytes
    state.memory.counts.fill_(7)
    state.release()
    assert state.memory.counts.nbytes == state.memory.recent.nbytes == 0
    state.allocate()
    assert not state.memory.counts.any()
