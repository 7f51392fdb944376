"""Keys of few queries, divided among programs: the rule, and attention with it."""

import random

import pytest
import torch
import triton
from prefill_batch import PrefillBatch, random_chunks
from test_resident_kernel import HOPPER, spilled_bytes
from triton.compiler import ASTSource
from triton_interpreter import INTERPRETED

from megatron_async.ops.attention.prefill_attention import (
    _prefill_kernel,
    paged_prefill_attention,
)
from megatron_async.ops.attention.prefill_parts import LEAST_KEYS, PrefillParts
from megatron_async.ops.attention.prefill_tiles import queries_of, tile_of


def parts_for(batch, processors):
    kv_heads, dim = batch.keys.shape[2:]
    tile = tile_of(batch.query, batch.block_size)
    parts = PrefillParts(processors, kv_heads, tile.queries, dim, batch.query.device)
    for tensor in (parts.output, parts.maximum, parts.total):
        tensor.fill_(float("nan"))
    return parts


def attend_only(batch, rows, parts):
    paged_prefill_attention(
        batch.query, batch.keys, batch.values, rows.block_tables, rows.kv_lengths, rows.starts,
        rows.max_query_length, batch.scale, batch.out, batch.first_key, parts,
    )  # fmt: skip


def attend(batch, rows, parts):
    attend_only(batch, rows, parts)
    assert not parts.arrived.any(), "counters are zeros between two launches"


def units_used(parts):
    """Units that left a partial result."""
    return int((~parts.maximum.isnan()).any(1).sum())


def reference(chunks, group, tile, shares):
    """Parts of each tile of queries of each row, in plain Python."""
    tiles = [-(-query * group // tile.queries) for query, _ in chunks]
    keys = [-(-kv // tile.keys) for _, kv in chunks]
    room = max(shares - sum(tiles), 1)
    largest = -(-sum(t * k for t, k in zip(tiles, keys, strict=True)) // room)
    largest = max(largest, LEAST_KEYS // tile.keys)
    parts = [-(-k // largest) for k in keys]
    assert sum(t * p for t, p in zip(tiles, parts, strict=True)) <= max(shares, sum(tiles))
    return tiles, parts


CASES = [
    # chunks, block size, KV heads, group, head dimension, dtype, processors, parts of each chunk
    ([(8, 3000)], 64, 2, 4, 64, torch.float16, 6, [5]),
    ([(30, 3000), (30, 40), (5, 1200)], 64, 1, 4, 64, torch.float16, 6, [3, 1, 2]),
    ([(8, 3000), (30, 40), (5, 1200)], 256, 1, 4, 128, torch.float16, 12, [5, 1, 2]),
    ([(20, 2000)], 16, 2, 2, 80, torch.float32, 8, [3]),
    ([(70, 1025)], 64, 1, 1, 64, torch.float16, 4, [3]),
    # The last part has one key, which the last query alone sees.
    ([(30, 3585)], 64, 1, 1, 64, torch.float16, 5, [8]),
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
    parts = parts_for(batch, processors)
    batch.refill(chunks, first=9)
    found = []
    for _ in range(2):
        batch.out.fill_(float("nan"))
        attend(batch, batch.rows(), parts)
        batch.check()
        found.append(batch.out.clone())
    assert torch.equal(found[0].nan_to_num(), found[1].nan_to_num())
    tile = tile_of(batch.query, block_size)
    shares = parts.shares_of(tile.programs(dim))
    tiles, divided = reference(chunks, group, tile, shares)
    assert divided == expected
    units = sum(t * p for t, p in zip(tiles, divided, strict=True) if p > 1)
    assert units_used(parts) == units * kv_heads


def test_random_batches(device):
    rng = random.Random(0)
    batch = PrefillBatch(64, 5, 2500, 64, 1, 2, 64, torch.float16, device)
    parts = parts_for(batch, 10)
    for number in range(20):
        first = rng.choice([0, 5])
        filled = batch.refill(random_chunks(rng, 5, 64 - first, 2500), first=first)
        attend(batch, batch.rows(filled if number % 2 else ()), parts)
        batch.check()


def test_keys_that_are_not_there_are_not_divided(device):
    batch = PrefillBatch(8, 1, 2000, 64, 1, 2, 64, torch.float16, device, first_key=1)
    batch.refill([(8, 2000)])
    parts = parts_for(batch, 10)
    attend(batch, batch.rows(), parts)
    batch.check()
    assert units_used(parts) == 0


def test_parts_of_another_model():
    batch = PrefillBatch(8, 1, 64, 64, 2, 2, 64, torch.float16, "cpu")
    for kv_heads, queries, dim in ((1, 64, 64), (2, 32, 64), (2, 64, 128)):
        parts = PrefillParts(4, kv_heads, queries, dim, torch.device("cpu"))
        made_for = f"{kv_heads} KV heads and tiles of {queries} queries of {dim}; here are 2, 64 "
        with pytest.raises(ValueError, match=made_for):
            attend(batch, batch.rows(), parts)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_queries_of_a_tile_do_not_depend_on_the_step(dim, dtype):
    for tokens in (1, 10_000):
        query = torch.empty(tokens, 1, dim, dtype=dtype)
        assert {tile_of(query, block).queries for block in (16, 256)} == {queries_of(dtype, dim)}


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(
    ("dtype", "dim", "queries", "keys", "stages", "block_size"),
    [("bf16", 128, 64, 64, 2, 64), ("fp16", 80, 64, 64, 3, 16), ("fp32", 64, 32, 32, 2, 64)],
)
def test_compiled(dtype, dim, queries, keys, stages, block_size, tmp_path):
    """No more registers are spilled than without parts, and a program counts itself once."""
    constants = {
        "divides": True, "least_keys": LEAST_KEYS, "block_size": block_size, "group": 4,
        "kv_heads": 8, "dim": dim, "dim_tile": triton.next_power_of_2(dim), "rows_tile": 16,
        "query_tile": queries, "key_tile": keys, "first_key": 0, "overlap": True,
    }  # fmt: skip
    types = dict.fromkeys(("table_stride", "rows", "shares"), "i32") | {"scale": "fp32"}
    types |= dict.fromkeys(("tables", "kv_lengths", "starts", "arrived"), "*i32")
    types |= dict.fromkeys(("part_output", "part_maximum", "part_total"), "*fp32")
    descriptors = ("key_descriptor", "value_descriptor")
    if dim == triton.next_power_of_2(dim) and dtype != "fp32":
        types |= dict.fromkeys(descriptors, f"tensordesc<{dtype}[{keys}, {dim}]>")
    else:
        constants |= dict.fromkeys(descriptors)
    names = _prefill_kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "*" + dtype) for n in names}
    aligned = ("query", "out", "key_cache", "value_cache", "part_output", "part_maximum")
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in (*aligned, "part_total")}
    source = ASTSource(_prefill_kernel, signature, constants, attributes)
    options = {"num_warps": 4, "num_stages": stages, "launch_pdl": True}
    asm = triton.compile(source, target=HOPPER, options=options).asm
    assert spilled_bytes(asm, tmp_path) <= 8
    assert asm["ptx"].count("atom.") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
        parts = parts_for(batch, processors)
        batch.refill([])
        attend(batch, batch.rows(), parts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                attend_only(batch, batch.rows(), parts)
        for number in range(40):
            filled = batch.refill(random_chunks(rng, 6, 128, 9000))
            if number % 2:
                graph.replay()
            else:
                attend(batch, batch.rows(filled), parts)
            batch.check()
            assert not parts.arrived.any()
        assert units_used(parts) > 0
