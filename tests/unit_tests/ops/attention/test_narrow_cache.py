"""Keys and values in e4m3, by scales of heads: written by `rope_append`, read by attention."""

import math
import random
import re
import subprocess

import pytest
import torch

from megatron_async.errors import ConfigurationError
from megatron_async.ops.attention.narrow_cache import (
    KEYS,
    NARROW,
    VALUES,
    as_bytes,
    check_dtypes,
    check_narrow_cache,
    narrowed,
    scales_of,
    widened,
)
from megatron_async.ops.attention.paged_attention import TorchPagedAttention
from megatron_async.ops.attention.rope_append import rope_append, rope_append_cpu, rope_append_gpu
from megatron_async.ops.batch_dimensions import BatchDimensions
from tests.unit_tests.ops.attention.cases import rope_arguments
from tests.unit_tests.ops.attention.decode_batch import Batch, some_scales
from tests.unit_tests.ops.attention.prefill_batch import PrefillBatch, random_chunks
from tests.unit_tests.ops.cases import Numbers
from tests.unit_tests.ops.linear.test_resident_kernel import TOOLS, spilled_bytes
from tests.unit_tests.ops.triton_interpreter import INTERPRETED


def test_numbers_are_clamped_and_rounded_to_even() -> None:
    """Break it: no clamp (torch gives NaN from 465 on), or the scale of the other."""
    scales = scales_of(torch.tensor([0.5, 2.0]), torch.tensor([4.0, 1.0]))
    x = torch.tensor([[9.5, -1e9, 1e-9, math.nan, 17.0 / 2], [9.5, 1e4, -0.0, math.inf, 17.0]])
    keys = narrowed(x, scales, KEYS)
    assert keys.dtype == NARROW
    expected = [[20.0, -448.0, 0.0, math.nan, 16.0], [5.0, 448.0, 0.0, 448.0, 8.0]]
    torch.testing.assert_close(keys.float(), torch.tensor(expected), equal_nan=True)
    assert narrowed(x, scales, VALUES)[:, 0].float().tolist() == [2.5, 10.0]
    assert widened(keys, scales, KEYS, torch.float32)[:, 0].tolist() == [10.0, 10.0]
    every = torch.arange(256, dtype=torch.uint8).view(NARROW).view(64, 2, 2)
    wanted = every.float() * torch.tensor([[4.0], [1.0]])
    found = widened(every, scales, VALUES, torch.float32)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def narrow_arguments(tokens, kv_heads, group, dim, dtype, device, norm=False):
    """Arguments of `rope_append` with caches of e4m3 NaN and their scales."""
    given = list(rope_arguments(Numbers(device, dtype), tokens, kv_heads, group, dim, norm))
    given[5:7] = [cache.to(NARROW) for cache in given[5:7]]
    return [*given, some_scales(kv_heads, device)]


@pytest.mark.parametrize("op", [rope_append.reference, rope_append_cpu])
def test_the_reference_rounds_what_it_would_store(op) -> None:
    """Once to the dtype, as without a narrow cache, and then to e4m3."""
    given = narrow_arguments(7, 3, 2, 16, torch.bfloat16, "cpu", norm=True)
    plain = [*given[:5], *(torch.zeros(c.shape, dtype=torch.bfloat16) for c in given[5:7])]
    expected = rope_append.reference(*plain, *given[7:10])
    torch.testing.assert_close(op(*given), expected, rtol=0, atol=0)
    scales, places = given[-1], given[4]
    for of, narrow, wide in (KEYS, given[5], plain[5]), (VALUES, given[6], plain[6]):
        found, stored = (as_bytes(cache).flatten(0, 1)[places] for cache in (narrow, wide))
        assert torch.equal(found, as_bytes(narrowed(stored, scales, of)))
        assert narrow.float().isnan().sum() == (len(wide.flatten(0, 1)) - 7) * 3 * 16


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "group", "dim"), [(5, 2, 3, 64), (1, 3, 1, 16), (9, 1, 4, 80)]
)
def test_the_kernel_writes_the_same_bytes(tokens, kv_heads, group, dim, norm, device) -> None:
    """Break it: the scale of keys for values, or of another head; no clamp."""
    given = narrow_arguments(tokens, kv_heads, group, dim, torch.float32, device, norm)
    given[0][0] *= 1e4  # clamped
    caches = [cache.clone() for cache in given[5:7]]
    expected = rope_append.reference(*given[:5], *caches, *given[7:])
    torch.testing.assert_close(rope_append_gpu(*given), expected, rtol=1e-5, atol=1e-5)
    for found, wanted in zip(given[5:7], caches, strict=True):
        differ = as_bytes(found) != as_bytes(wanted)
        # Sums of a norm have another order, and a GPU fuses a rotation's product and sum: a number
        # may round to its neighbour.
        may_differ = norm or device == "cuda"
        assert differ.sum() <= (0.01 * tokens * kv_heads * dim if may_differ else 0)
        torch.testing.assert_close(found.float(), wanted.float(), rtol=0.13, atol=0, equal_nan=True)


@pytest.mark.pairs
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 64), (torch.bfloat16, 48), (torch.float16, 16)]
)
@pytest.mark.parametrize("part", [0, 64])
@pytest.mark.parametrize("count", [1, 6, 132])
def test_decode_attention(width, dtype, dim, part, count, device) -> None:
    """Whole rows, parts joined by the last program, and by the second kernel. Break it: the scale
    of values twice, or the scale of keys left out; odd elements of keys by even ones of queries."""
    lengths = [5, 16, 63, 65, 300, 129]
    shape = 64, 2, 3, dim, dtype, device
    batch = Batch(300, len(lengths), *shape, count, width=width, part=part, is_narrow=True)
    expected = batch.refill(lengths)
    batch.run()
    batch.check(expected)


@pytest.mark.parametrize("processors", [0, 12])
@pytest.mark.parametrize(
    ("block_size", "dim", "dtype"),
    [(64, 64, torch.float16), (16, 80, torch.float32), (128, 64, torch.bfloat16)],
)
def test_prefill_attention(block_size, dim, dtype, processors, device) -> None:
    """Keys of a tile that all queries see come by a descriptor, others by pointers."""
    chunks = [(90, 90), (3, 260), (40, 150)]
    batch = PrefillBatch(150, 4, 300, block_size, 2, 3, dim, dtype, device, is_narrow=True)
    batch.refill(chunks)
    batch.attend(batch.rows(chunks), batch.schedule(processors))
    batch.check()


@pytest.mark.parametrize("query_scale", [1e-30, 1e6])
@pytest.mark.parametrize("part", [0, 64])
def test_queries_of_any_size_are_multiplied_in_float16(query_scale, part, device) -> None:
    """Break it: queries as they are, which are 0 or infinite there."""
    batch = Batch(70, 2, 64, 2, 2, 64, torch.bfloat16, device, part=part, is_narrow=True)
    expected = batch.refill([70, 33], query_scale)
    batch.run()
    batch.check(expected)
    batch = PrefillBatch(70, 1, 70, 64, 2, 2, 64, torch.bfloat16, device, is_narrow=True)
    batch.refill([(70, 70)], query_scale)
    batch.attend(batch.rows())
    batch.check()


@pytest.mark.parametrize("part", [0, 64])
def test_small_weights_of_many_keys_count(part, device) -> None:
    """A first key that all look at, and weights of 2^-26 for the rest. Break it: no WEIGHT_BITS."""
    batch = Batch(257, 1, 64, 1, 1, 32, torch.bfloat16, device, part=part, is_narrow=True)
    batch.refill([257])
    keys, values = (
        as_bytes(cache)[batch.tables[0, :5].long()] for cache in (batch.keys, batch.values)
    )
    one, scale = torch.ones(1).to(NARROW).view(torch.uint8).item(), batch.scales[KEYS, 0].item()
    keys.zero_()
    values.fill_(one)
    keys[0, 0, 0, 0], values[0, 0] = one, 0
    for cache, filled in (batch.keys, keys), (batch.values, values):
        as_bytes(cache)[batch.tables[0, :5].long()] = filled
    batch.query.zero_()
    batch.query[0, 0, 0] = 26 * math.log(2) / (scale * batch.scale)
    batch.run()
    rest = 256 * 2.0**-26 * batch.scales[VALUES, 0].item()
    assert batch.out[0, 0].tolist() == pytest.approx([rest] * 32, rel=0.01)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
def test_numbers_are_widened_in_registers_two_at_a_time(tmp_path) -> None:
    """Machine code of decode attention for Hopper. Break it: widen to bfloat16 (a slow instruction
    for each number), or load single bytes (which matrix units' loads do not take)."""
    sizes = 256, 16, 256, 8, 4, 128, torch.bfloat16, "cpu", 8
    kernel = Batch(*sizes, is_narrow=True).compiled()
    assert spilled_bytes(kernel.asm, tmp_path) == 0
    command = [TOOLS / "nvdisasm", "-c", tmp_path / "kernel.cubin"]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # A tile of 64 keys and values, two numbers an instruction, by 128 threads.
    assert code.count("F2FP.F16.E4M3") == 64 * 128 * 2 // 2 // 128
    assert not re.search(r"F2F\.|LDS\.U", code)


def test_the_reference_reads_what_is_stored() -> None:
    """Attention of torch on e4m3 is attention of torch on the rounded numbers."""
    torch.manual_seed(0)
    rng = random.Random(0)
    for _ in range(4):
        kv_heads, dim, size, width = 3, 16, 8, rng.choice([1, 2])
        chunks = random_chunks(rng, 3, 30, 40)
        decode = [rng.randint(width, 40) for _ in range(3)]
        dims = BatchDimensions(3, width=width, prefill_lengths=tuple(chunks),
                               max_decode_kv_length=max(decode))  # fmt: skip
        lengths = torch.tensor(decode + [kv for _, kv in chunks], dtype=torch.int32)
        tables = torch.randperm(len(lengths) * 5).view(-1, 5).int()
        keys, values = torch.randn(2, len(lengths) * 5, size, kv_heads, dim) * 3
        scales, query = some_scales(kv_heads, "cpu"), torch.randn(dims.tokens, 6, dim)
        positions = torch.tensor([n - width + j for n in decode for j in range(width)])
        attention = TorchPagedAttention(size, 5, torch.device("cpu"))
        attention.begin_step(dims, tables, lengths, None, positions)
        narrow = [narrowed(x, scales, of) for of, x in ((KEYS, keys), (VALUES, values))]
        wide = [widened(x, scales, of, torch.float32) for of, x in enumerate(narrow)]
        found = attention.attend(query, *narrow, 0.25, scales)
        assert torch.equal(found, attention.attend(query, *wide, 0.25))
        assert not torch.equal(found, attention.attend(query, keys, values, 0.25))


def test_caches_that_do_not_fit_are_refused() -> None:
    given = narrow_arguments(2, 2, 1, 8, torch.float32, "cpu")
    for wrong in (None, given[-1][:, :1], given[-1][:2]):
        with pytest.raises(ValueError, match=r"rope_append: rows of .* scales"):
            rope_append_gpu(*given[:-1], wrong)
    odd = narrow_arguments(2, 2, 1, 9, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"heads of 9 .* of an even number of elements"):
        check_dtypes("rope_append", torch.float32, *odd[5:7], odd[-1])
    given[6] = given[6].float()
    with pytest.raises(ValueError, match="must have one dtype with the rows, or be torch"):
        rope_append_gpu(*given)


def test_a_gpu_without_e4m3_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    check_narrow_cache(torch.device("cpu"))
    with pytest.raises(ConfigurationError, match=r"needs a GPU of compute capability 8\.9"):
        check_narrow_cache(torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(8, 4, 128), (3, 3, 64), (2, 5, 80)])
class TestOnGpu:
    """Sizes of models, in bfloat16: whole rows and parts, blocks read by descriptors."""

    @pytest.mark.parametrize("width", [1, 3])
    @pytest.mark.parametrize("part", [0, 256])
    def test_decode_attention(self, width, part, kv_heads, group, dim):
        rng = random.Random(dim + width)
        for rows in (1, 7, 64):
            lengths = [rng.choice([width, 255, 256, 257, 2000, 7000]) for _ in range(rows)]
            sizes = 7000, rows, 256, kv_heads, group, dim, torch.bfloat16, "cuda", 132
            batch = Batch(*sizes, width=width, part=part, is_narrow=True)
            expected = batch.refill(lengths)
            batch.run()
            batch.check(expected)

    @pytest.mark.parametrize("block_size", [256, 64, 16])
    def test_prefill_attention(self, block_size, kv_heads, group, dim):
        rng = random.Random(block_size)
        sizes = 2048, 6, 5000, block_size, kv_heads, group, dim, torch.bfloat16, "cuda"
        batch = PrefillBatch(*sizes, is_narrow=True)
        schedules = [batch.schedule(count) for count in (0, 132)]
        for number in range(12):
            chunks = random_chunks(rng, 6, 2048, 5000)
            batch.refill(chunks)
            batch.attend(batch.rows(chunks), schedules[number % 2])
            batch.check()

    @pytest.mark.parametrize("tokens", [1, 67, 2048])
    def test_append(self, tokens, kv_heads, group, dim):
        given = list(
            rope_arguments(
                Numbers("cuda", torch.bfloat16), tokens, kv_heads, group, dim, blocks=40,
                block_size=64,
            )
        )  # fmt: skip
        given[5:7] = [cache.to(NARROW) for cache in given[5:7]]
        given.append(some_scales(kv_heads, "cuda"))
        caches = [cache.clone() for cache in given[5:7]]
        rope_append.reference(*given[:5], *caches, *given[7:])
        rope_append_gpu(*given)
        for found, wanted in zip(given[5:7], caches, strict=True):
            # A rotation may round otherwise to bfloat16, and so to a neighbour.
            assert (as_bytes(found) != as_bytes(wanted)).float().mean() < 0.02
            assert torch.equal(found.float().isnan(), wanted.float().isnan())
