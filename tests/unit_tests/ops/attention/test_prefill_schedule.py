"""The schedule of prefill attention, and keys of few queries divided among programs by it."""

import random

import pytest
import torch

from megatron_async.ops.attention.prefill_tile import queries_of, tile_of
from tests.unit_tests.ops.attention.prefill_batch import PrefillBatch, random_chunks
from tests.unit_tests.ops.attention.schedule_reference import parts_reference, schedule_reference
from tests.unit_tests.ops.linear.test_resident_kernel import spilled_bytes
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

HALF = torch.float16


def attend(batch, rows, schedule):
    batch.attend(rows, schedule)
    assert not schedule._parts.arrived.any(), "counters are zeros between two launches"


def units_used(schedule):
    """Units that left a partial result."""
    return int((~schedule._parts.maximum.isnan()).any(1).sum())


@pytest.mark.parametrize("processors", [0, 3, 7, 24])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("rows", [1, 4, 20])
def test_units(processors, group, rows, device):
    """Break it: parts in the other order, a tile of keys left out, units of a dummy row."""
    rng = random.Random(rows)
    batch = PrefillBatch(1500, rows, 4000, 64, 1, group, 64, HALF, device)
    schedule = batch.schedule(processors)
    divided = idle = 0
    for number in range(20):
        tokens = rng.choice([8, 64, 300, 1500]) if number else 1500
        chunks = random_chunks(rng, rows, tokens, 4000) if number else [(tokens, 1500)]
        first = rng.choice([0, 1500 - tokens])
        dummies = [(0, 1 + i) for i in range(rows - len(chunks))]
        starts = torch.tensor([first] + [query for query, _ in chunks + dummies]).cumsum(0)
        batch.starts.copy_(starts)
        batch.lengths.copy_(torch.tensor([kv for _, kv in chunks + dummies]))
        tile = batch.tile(tokens)
        bound = tokens if number % 2 else max(query for query, _ in chunks)
        schedule.update(batch.lengths, batch.starts, tokens, bound, tile.keys, tile.programs)
        assert (schedule.parts is not None) == (schedule.parts is schedule._parts is not None)
        shares = schedule.shares_of(tile.programs) if processors else 0
        if tokens * group >= shares * tile.queries:
            shares = 0
        assert (schedule.parts is not None) == (shares > 0)
        expected = schedule_reference(chunks + dummies, first, group, tile, shares)
        found = schedule.units.tolist()
        assert len(found) >= len(expected)
        for unit, wanted in zip(found, expected, strict=False):
            assert (unit[0] == -1) if wanted is None else (tuple(unit[:9]) == wanted)
            idle += wanted is None
        assert all(unit[0] == -1 for unit in found[len(expected) :])
        is_part = [unit[0] >= 0 and unit[8] > 1 for unit in found]
        assert not any(is_part[schedule.slots :])
        divided += any(is_part)
    if rows == 1 or processors in (0, 24):
        assert (divided > 0) == (processors > 0)
    if (group, processors) == (1, 24):
        assert idle > 0


def test_equal_parts_fill_the_device():
    """Two parts of each of eight tiles of queries, for sixteen shares (128 tokens over 8192 on the
    8B shape: 150 -> 70 microseconds a layer, where the safe rule alone divided nothing)."""
    tile = tile_of(128, 32, 128, 256, torch.bfloat16, torch.device("cpu"))
    assert parts_reference([(128, 8192)], 4, tile, 16) == [2]


CASES = [
    # chunks, block size, KV heads, group, head dimension, dtype, processors, parts of each chunk
    ([(8, 3000)], 64, 2, 4, 64, torch.float16, 6, [6]),
    ([(30, 3000), (30, 40), (5, 1200)], 64, 1, 4, 64, torch.float16, 6, [3, 1, 2]),
    ([(8, 3000), (30, 40), (5, 1200)], 256, 1, 4, 128, torch.float16, 12, [6, 1, 3]),
    ([(20, 2000)], 16, 2, 2, 80, torch.float32, 8, [4]),
    ([(70, 1025)], 64, 1, 1, 64, torch.float16, 4, [3]),
    # The first queries see fewer tiles of keys than there are parts, or nothing of a part.
    ([(1100, 1110)], 64, 1, 1, 64, torch.float16, 24, [2]),
    ([(200, 900)], 64, 2, 2, 64, torch.float16, 2, [1]),  # tokens fill the device
    # So do tiles, as none is full; in a step of more tokens all tiles would be divided.
    ([(2, 1200)] * 4 + [(2, 3000)], 64, 1, 1, 64, torch.float16, 2, [1] * 5),
    ([(2, 1200)] * 3 + [(2, 3000)], 64, 1, 1, 64, torch.float16, 4, [1] * 3 + [2]),
    ([(200, 500)], 64, 2, 2, 64, torch.float16, 40, [1]),  # too few keys for parts
]


@pytest.mark.parametrize(
    ("chunks", "block_size", "kv_heads", "group", "dim", "dtype", "processors", "expected"), CASES
)
def test_against_softmax(
    chunks, block_size, kv_heads, group, dim, dtype, processors, expected, device
):
    """Behind nine decode tokens, with two dummy rows and seven padding tokens; twice, as counters
    and partial results are left over."""
    tokens, longest = sum(query for query, _ in chunks), max(kv for _, kv in chunks)
    rows = len(chunks) + 2
    batch = PrefillBatch(
        tokens + 16, rows, longest, block_size, kv_heads, group, dim, dtype, device
    )
    schedule = batch.schedule(processors)
    batch.refill(chunks, first=9)
    found = []
    for _ in range(2):
        batch.out.fill_(float("nan"))
        attend(batch, batch.rows(), schedule)
        batch.check()
        found.append(batch.out.clone())
    assert torch.equal(found[0].nan_to_num(), found[1].nan_to_num())
    tile = batch.tile()
    shares = schedule.shares_of(tile.programs)
    divided = parts_reference(chunks, group, tile, shares)
    assert divided == expected
    tiles = [-(-query * group // tile.queries) for query, _ in chunks]
    units = sum(t * p for t, p in zip(tiles, divided, strict=True) if p > 1)
    assert units_used(schedule) == units * kv_heads


def test_random_batches(device):
    rng = random.Random(0)
    batch = PrefillBatch(64, 5, 2500, 64, 1, 2, 64, torch.float16, device)
    schedule = batch.schedule(10)
    for number in range(20):
        first = rng.choice([0, 5])
        filled = batch.refill(random_chunks(rng, 5, 64 - first, 2500), first=first)
        attend(batch, batch.rows(filled if number % 2 else ()), schedule)
        batch.check()


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_queries_of_a_tile_do_not_depend_on_the_step(dim, dtype):
    for tokens in (1, 10_000):
        tiles = [tile_of(tokens, 1, dim, size, dtype, torch.device("cpu")) for size in (16, 256)]
        assert {tile.queries for tile in tiles} == {queries_of(dtype, dim)}


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(
    ("dtype", "dim", "block_size"),
    [(torch.bfloat16, 128, 64), (torch.float16, 80, 16), (torch.float32, 64, 64)],
)
def test_compiled(dtype, dim, block_size, tmp_path):
    """Few registers are spilled, and a program counts itself once."""
    batch = PrefillBatch(64, 1, 2048, block_size, 8, 4, dim, dtype, "cpu")
    schedule = batch.schedule(132)
    asm = batch.compiled(schedule).asm
    assert schedule.parts is not None
    assert spilled_bytes(asm, tmp_path) <= 32
    assert asm["ptx"].count("atom.") == 1


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize(
        ("kv_heads", "group", "dim", "block_size"),
        [(3, 3, 64, 256), (8, 4, 128, 256), (8, 4, 128, 64), (2, 2, 80, 16), (1, 8, 256, 64)],
    )
    def test_random_batches(self, kv_heads, group, dim, block_size):
        """In a captured graph too, replayed with other rows."""
        rng = random.Random(dim)
        dtype = torch.bfloat16
        batch = PrefillBatch(128, 6, 9000, block_size, kv_heads, group, dim, dtype, "cuda")
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        schedule = batch.schedule(processors)
        batch.refill([])
        attend(batch, batch.rows(), schedule)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                batch.attend(batch.rows(), schedule)
        for number in range(40):
            filled = batch.refill(random_chunks(rng, 6, 128, 9000))
            if number % 2:
                graph.replay()
            else:
                attend(batch, batch.rows(filled), schedule)
            batch.check()
            assert not schedule._parts.arrived.any()
        assert units_used(schedule) > 0
