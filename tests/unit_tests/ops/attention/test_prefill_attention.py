"""The prefill kernel against a gathered softmax in float64; see `PrefillBatch`."""

import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from megatron_async.ops.attention import prefill_schedule
from megatron_async.ops.attention import warpgroup_attention as launch_module
from megatron_async.ops.attention import warpgroup_attention_kernel as kernel_module
from megatron_async.ops.attention.decode_attention import (
    DecodeWorkspace,
    decode_tile,
    paged_decode_attention,
)
from megatron_async.ops.attention.prefill_attention import paged_prefill_attention
from megatron_async.ops.attention.prefill_tile import Tile, tile_of
from megatron_async.ops.attention.warpgroup_attention import (
    warpgroup_prefill_attention,
    warpgroup_tile_of,
)
from tests.unit_tests.ops.attention.decode_batch import processors
from tests.unit_tests.ops.attention.prefill_batch import PrefillBatch, random_chunks
from tests.unit_tests.ops.linear.gluon_emulator import EmulatedKernel
from tests.unit_tests.ops.triton_interpreter import INTERPRETED


@pytest.mark.parametrize(
    ("chunks", "block_size", "kv_heads", "group", "dim", "dtype"),
    [
        ([(1, 1), (16, 16), (17, 40)], 16, 1, 1, 16, torch.float32),
        ([(5, 70), (40, 40)], 64, 3, 3, 64, torch.float32),
        ([(33, 65)], 256, 2, 4, 128, torch.float32),
        ([(20, 97), (7, 48)], 48, 2, 2, 80, torch.float32),  # padded head dimension
        ([(9, 40)], 64, 1, 4, 256, torch.float32),
        ([(30, 70), (1, 33), (2, 2)], 16, 3, 3, 64, torch.float16),
        ([(64, 64), (64, 129)], 64, 1, 2, 64, torch.float16),
        # Several tiles a chunk, one of which ends one key behind a key tile.
        ([(130, 140), (70, 71)], 64, 1, 2, 64, torch.float16),
        ([(40, 300), (3, 256)], 256, 2, 4, 128, torch.float16),  # key tiles of 128
        ([(70, 70), (20, 85)], 48, 1, 2, 32, torch.float16),  # a key tile spans blocks
        ([(66, 130), (1, 9)], 16, 1, 2, 80, torch.float16),
    ],
)
@pytest.mark.parametrize("captured", [False, True])
def test_against_softmax(chunks, block_size, kv_heads, group, dim, dtype, captured, device):
    """Captured: behind nine decode tokens, with two dummy rows, seven padding tokens, and no
    lengths on the host."""
    tokens, rows = sum(query for query, _ in chunks), len(chunks)
    longest = max(kv for _, kv in chunks)
    if captured:
        tokens, rows = tokens + 7 + 9, rows + 2
    batch = PrefillBatch(tokens, rows, longest, block_size, kv_heads, group, dim, dtype, device)
    batch.refill(chunks, first=9 if captured else 0)
    batch.attend(batch.rows(() if captured else chunks))
    batch.check()


@pytest.mark.parametrize(
    ("block_size", "dim", "dtype"),
    [(64, 64, torch.float16), (48, 32, torch.float16), (16, 80, torch.float32)],
)
def test_keys_that_are_not_there(block_size, dim, dtype, device):
    """The first place of a sequence has no key, as of a draft model; one query stands there."""
    chunks = [(70, 70), (1, 1), (2, 2), (20, 85), (3, 130)]
    batch = PrefillBatch(100, 6, 130, block_size, 2, 2, dim, dtype, device, first_key=1)
    batch.refill(chunks)
    batch.attend(batch.rows(chunks))
    batch.check()


@pytest.mark.parametrize(
    ("block_size", "dim", "is_narrow", "window"),
    [
        (128, 128, False, 0), (48, 160, False, 0), (64, 64, True, 0), (64, 64, False, 150),
    ],
)  # fmt: skip
def test_a_query_has_the_bits_of_a_decode_row(
    block_size, dim, is_narrow, window, device, matrix_units, monkeypatch
):
    """With parts of one length: in whatever chunk it comes, beside whatever others. With a window
    no keys are divided. Break it: parts that are counted from the window's first key."""
    dtype = torch.bfloat16 if is_narrow else torch.float16
    part, positions = 128, torch.tensor([0, 1, 63, 64, 127, 128, 129, 200, 299], device=device)
    batch = PrefillBatch(300, 1, 300, block_size, 2, 3, dim, dtype, device, is_narrow=is_narrow,
                         window=window, has_sinks=window > 0)  # fmt: skip
    batch.refill([(300, 300)], query_scale=3.0)
    every, table = batch.query.clone(), batch.tables
    tile = tile_of(300, 6, dim, block_size, dtype, batch.query.device, in_parts=True)
    assert tile.keys == decode_tile(dim)
    whole_rows, divided = batch.schedule(tile=tile), batch.schedule(132, tile, part)
    divided.slots = 12

    def attend(*chunks, schedule=whole_rows):
        """Chunks of the sequence, as (first token, end), in one step."""
        sizes = [end - first for first, end in chunks]
        query = torch.cat([every[first:end] for first, end in chunks])
        lengths = torch.tensor([end for _, end in chunks], dtype=torch.int32, device=device)
        starts = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)
        schedule.update(lengths, starts, len(query), max(sizes), tile.keys)
        out, tables = torch.empty_like(query), table.repeat(len(chunks), 1)
        caches = batch.keys, batch.values
        paged_prefill_attention(
            query, *caches, tables, schedule, tile, batch.scale, out, part=part,
            scales=batch.scales, **batch.rules,
        )  # fmt: skip
        return list(out.split(sizes))

    (whole,) = attend((0, 300))
    batch.out.copy_(whole)
    batch.check()
    monkeypatch.setattr(prefill_schedule, "LEAST_KEYS", 64)
    kinds = set()
    for chunks in (
        [(0, 100), (250, 251), (128, 290)], [(1, 2)], [(127, 130), (60, 130)], [(0, 300)],
        [(299, 300), (200, 240)], [(299, 300), (200, 300)],
    ):  # fmt: skip
        for schedule in (whole_rows,) if window else (whole_rows, divided):
            for (first, end), found in zip(chunks, attend(*chunks, schedule=schedule), strict=True):
                assert torch.equal(found, whole[first:end])
        slots = []
        for row, *_, nth, programs, slot, parts in divided.units[:, :11].tolist():
            if row >= 0:
                kinds.add(programs)
                slots += range(slot, slot + parts) if programs > 1 and nth == 0 else ()
        assert len(set(slots)) == len(slots), "each part of a divided tile has a slot of its own"
        assert max(slots, default=0) < divided.slots
    assert window or kinds == {1, 2, 3}, "of some tiles the keys are divided"
    assert not divided._parts.arrived.any()
    with processors(132):
        workspace = DecodeWorkspace(len(positions), 6, 2, dim, every.device, 1, part, 300, window)
    workspace.schedule.update((positions + 1).int())
    assert workspace.schedule.splits[:, 1].max() > 1, "of some rows the parts have programs each"
    out = torch.empty_like(every[positions])
    tables = table.repeat(len(positions), 1)
    paged_decode_attention(
        every[positions], batch.keys, batch.values, tables, batch.scale, workspace, out,
        scales=batch.scales, sinks=batch.sinks,
    )  # fmt: skip
    assert torch.equal(out, whole[positions])


@pytest.fixture
def warpgroups(monkeypatch):
    """The warpgroups' kernel; emulated where there is no GPU."""
    if INTERPRETED:
        kernel = EmulatedKernel(kernel_module, "warpgroup_attention_kernel", (1, 2))
        monkeypatch.setattr(launch_module, "warpgroup_attention_kernel", kernel)
        monkeypatch.setattr(launch_module, "launch_options", lambda x: {"overlap": True})


@pytest.mark.parametrize(
    ("chunks", "block_size", "kv_heads", "group", "dim"),
    [
        ([(300, 300)], 64, 1, 3, 64),
        ([(130, 700), (1, 257), (5, 5)], 128, 1, 4, 128),
        ([(40, 256), (33, 512), (3, 640)], 64, 2, 2, 128),
    ],
)
@pytest.mark.parametrize(
    ("query_scale", "is_narrow", "window"),
    [(1.0, False, 0), (30.0, False, 0), (3.0, True, 0), (3.0, False, 129)],
)
def test_warpgroups_have_the_bits_of_other_rows(
    chunks, block_size, kv_heads, group, dim, query_scale, is_narrow, window, device, matrix_units,
    warpgroups,
):  # fmt: skip
    """In parts of one length. Break it: `shrink` or the sums of a part kept over its border; parts
    counted from a window's first tile."""
    tokens = 20 + sum(query for query, _ in chunks)
    longest = max(kv for _, kv in chunks)
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    rows = len(chunks) + 1
    sizes = tokens, rows, longest, block_size, kv_heads, group, dim, dtype, device
    batch = PrefillBatch(*sizes, is_narrow=is_narrow, window=window, has_sinks=window > 0)
    batch.refill(chunks, query_scale, first=9)
    check_same_bits(batch)


def check_same_bits(batch, part=256):
    """Triton's kernel and the warpgroups' on the rows of a batch, as a captured step has them."""
    rows, found, caches = batch.rows(), [], (batch.keys, batch.values)
    is_narrow = batch.scales is not None
    tokens, heads, dim = batch.query.shape
    sizes = heads, dim, batch.block_size, batch.query.dtype, batch.query.device
    for launch, tile in (
        (paged_prefill_attention, tile_of(tokens, *sizes, in_parts=True)),
        (
            warpgroup_prefill_attention,
            warpgroup_tile_of(dim, batch.block_size, in_parts=True, is_narrow=is_narrow),
        ),
    ):
        schedule = batch.schedule(0, tile)
        batch.plan(schedule, rows, tile)
        out = torch.full_like(batch.query, float("nan"))
        launch(
            batch.query, *caches, rows.block_tables, schedule, tile, batch.scale, out, part=part,
            scales=batch.scales, sinks=batch.sinks, window=batch.window,
        )  # fmt: skip
        batch.out.copy_(out)
        batch.check()
        found.append(out[batch.first : batch.tokens])
    assert torch.equal(*found)


@pytest.mark.parametrize("change", [{"first_key": 1}, {"part": 96}])
def test_parts_that_cannot_be(change, device):
    batch = PrefillBatch(8, 1, 8, 64, 1, 1, 64, torch.float16, device)
    rows = batch.rows(batch.refill([(8, 8)]))
    schedule = batch.schedule()
    tile = batch.plan(schedule, rows)
    caches = batch.keys, batch.values, batch.tables
    with pytest.raises(ValueError, match=r"parts of .* keys want"):
        paged_prefill_attention(
            batch.query, *caches, schedule, tile, 1.0, batch.out, **{"part": 128} | change
        )


def test_only_dummy_rows(device):
    batch = PrefillBatch(20, 3, 64, 64, 1, 1, 32, torch.float32, device)
    batch.refill([])
    batch.attend(batch.rows())
    batch.check()


def test_scores_far_from_zero(device):
    """Scores of some hundreds, whose exponentials overflow: only differences may be taken."""
    batch = PrefillBatch(30, 1, 60, 16, 1, 2, 32, torch.float16, device)
    batch.refill([(30, 60)], query_scale=100.0)
    batch.attend(batch.rows([(30, 60)]))
    batch.check()


def test_rows_do_not_depend_on_each_other(device):
    """A row's result is the same bits beside other rows, for an equal bound of query lengths."""
    batch = PrefillBatch(40, 2, 64, 16, 2, 2, 32, torch.float32, device)
    batch.refill([(20, 50), (20, 64)])
    batch.attend(batch.rows())
    together = batch.out.clone()
    batch.out.fill_(float("nan"))
    rows = batch.rows()
    batch.attend(
        replace(
            rows, block_tables=rows.block_tables[1:], kv_lengths=rows.kv_lengths[1:],
            starts=rows.starts[1:],
        )
    )  # fmt: skip
    assert batch.out[:20].isnan().all()
    assert torch.equal(batch.out[20:], together[20:])


def test_shapes_that_do_not_match(interpreter):
    batch = PrefillBatch(8, 2, 16, 16, 2, 2, 32, torch.float32, "cpu")
    batch.refill([(1, 4), (2, 2)])
    rows = batch.rows()
    schedule = batch.schedule()
    arguments = {
        "query": batch.query,
        "key_cache": batch.keys,
        "value_cache": batch.values,
        "block_tables": rows.block_tables,
        "schedule": schedule,
        "tile": batch.tile(),
        "scale": 1.0,
        "out": batch.out,
    }
    with pytest.raises(ValueError, match="2 rows want 3 starts, found 2"):
        batch.plan(schedule, replace(rows, starts=rows.starts[:2]))
    with pytest.raises(ValueError, match=r"0 rows .* needs no schedule"):
        batch.plan(schedule, replace(rows, kv_lengths=rows.kv_lengths[:0]))
    schedule.rows = 2
    for name, wrong, message in (
        ("query", batch.query[:, :3], "does not fit caches"),
        ("key_cache", batch.keys[..., :16], "does not fit caches"),
        ("value_cache", batch.values[..., :1, :], "does not fit caches"),
        ("block_tables", rows.block_tables[:1], "2 block tables, found 1"),
        ("out", batch.out[:4], "like query"),
        ("tile", Tile(64, 32, 2), r"2 KV heads of 2 .* 32 queries of 32; here are 2 of 2, 64 and"),
    ):
        with pytest.raises(ValueError, match=message):
            paged_prefill_attention(**{**arguments, name: wrong})
    schedule = batch.schedule(4)
    assert batch.plan(schedule, rows) == batch.tile()
    with pytest.raises(ValueError, match="first_key=1 and window=0 do not allow; make"):
        paged_prefill_attention(**{**arguments, "schedule": schedule, "first_key": 1})


@pytest.mark.gpu
class TestOnGpu:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize(
        ("dtype", "block_size"), [(torch.bfloat16, 64), (torch.float16, 256), (torch.float32, 16)]
    )
    @pytest.mark.parametrize(
        ("kv_heads", "group", "dim"), [(3, 3, 64), (8, 4, 128), (2, 2, 80), (1, 8, 256)]
    )
    def test_a_thousand_random_batches(self, dtype, block_size, kv_heads, group, dim):
        rng = random.Random(dim + block_size)
        batch = PrefillBatch(700, 6, 1500, block_size, kv_heads, group, dim, dtype, "cuda")
        for number in range(84):
            filled = batch.refill(random_chunks(rng, 6, 700, 1500))
            batch.attend(batch.rows(filled if number % 2 else ()))
            batch.check()

    @pytest.mark.parametrize(
        ("kv_heads", "group", "dim", "block_size", "is_narrow"),
        [
            (3, 3, 64, 256, False), (8, 4, 128, 256, False), (2, 8, 128, 64, False),
            (3, 5, 64, 64, False), (8, 4, 128, 256, True), (3, 3, 64, 64, True),
        ],
    )  # fmt: skip
    def test_warpgroups_in_parts_of_random_batches(
        self, kv_heads, group, dim, block_size, is_narrow
    ):
        rng = random.Random(dim + block_size)
        dtype = torch.bfloat16 if block_size == 256 else torch.float16
        sizes = 700, 6, 4000, block_size, kv_heads, group, dim, dtype, "cuda"
        batch = PrefillBatch(*sizes, is_narrow=is_narrow)
        for number in range(40):
            batch.refill(random_chunks(rng, 6, 700, 4000), query_scale=1.0 + number % 4)
            check_same_bits(batch)

    def test_graph_replays_with_other_rows(self):
        rng = random.Random(0)
        batch = PrefillBatch(256, 8, 2000, 64, 3, 3, 64, torch.bfloat16, "cuda")
        batch.refill([])
        rows = batch.rows()
        batch.attend(rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            batch.attend(rows)
        for _ in range(20):
            batch.refill(random_chunks(rng, 8, 256, 2000))
            graph.replay()
            batch.check()

    def test_cache_beyond_32_bit_offsets(self):
        """Elements past 2**31: offsets must be 64 bits wide."""
        if torch.cuda.mem_get_info()[0] < 24e9:
            pytest.skip("needs 24 GB free")
        batch = PrefillBatch(64, 1, 100, 64, 8, 1, 128, torch.bfloat16, "cuda")
        batch.refill([(64, 100)])
        batch.attend(batch.rows([(64, 100)]))
        near = batch.out.clone()
        blocks = 33_000
        for name in ("keys", "values"):
            small = getattr(batch, name)
            large = torch.empty((blocks, *small.shape[1:]), dtype=small.dtype, device="cuda")
            large[-len(small) :] = small
            setattr(batch, name, large)
        batch.tables += blocks - 2
        batch.attend(batch.rows([(64, 100)]))
        assert torch.equal(batch.out, near)
