"""The size of the KV pool: what was asked for, or an error whose advice works when followed."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_async.device_state.kv_cache import GIB, BlockShape, PagedKVCache, blocks_that_fit
from megatron_async.errors import OutOfMemoryError

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
    cache = PagedKVCache(shape, 5, CPU)
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
    cache = PagedKVCache(shape, 5, CPU)
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
    cache = PagedKVCache(shape, GIB // shape.num_bytes, torch.device("cpu"))
    assert cache.num_bytes >= GIB
    assert resident() - before < GIB // 4
    keys, values = cache.layer(1)
    assert keys.data_ptr() % 64 == cache.block_tokens.data_ptr() % 64 == 0
    assert not keys[-3:].any()
    assert not values[:3].any()
    assert not cache.block_tokens.any()
