"""Prefill attention on warpgroups: emulated, compiled for a GPU, and on one."""

import random
import re
import subprocess

import pytest
import torch
import triton
from gluon_emulator import EmulatedKernel
from prefill_batch import PrefillBatch, random_chunks
from test_resident_kernel import HOPPER, TOOLS, spilled_bytes
from triton.experimental.gluon._runtime import GluonASTSource
from triton_interpreter import INTERPRETED

from megatron_async.ops.attention import warpgroup_attention as launch_module
from megatron_async.ops.attention import warpgroup_attention_kernel as kernel_module
from megatron_async.ops.attention.warpgroup_attention import (
    IN_SHARED_MEMORY,
    WarpgroupTile,
    tile_of,
    warpgroup_prefill_attention,
)
from megatron_async.ops.attention.warpgroup_attention_kernel import warpgroup_attention_kernel

BRAIN, HALF = torch.bfloat16, torch.float16
compiles = pytest.mark.skipif(INTERPRETED, reason="compiles")

CASES = [
    # chunks, block size, KV heads, group, head dimension
    ([(1, 1)], 128, 1, 1, 128),
    ([(130, 130)], 128, 1, 1, 128),  # a tile of queries that begins inside a tile of keys
    ([(5, 700), (40, 40), (1, 128)], 256, 2, 4, 128),
    ([(150, 400)], 128, 1, 3, 64),
    ([(64, 64), (64, 129), (200, 513)], 64, 1, 2, 64),
    ([(100, 100), (3, 450)], 192, 2, 4, 128),  # three warpgroups, tiles of 64 keys
]


def attend(batch, rows, tile=None):
    warpgroup_prefill_attention(
        batch.query, batch.keys, batch.values, rows.block_tables, rows.kv_lengths, rows.starts,
        rows.max_query_length, batch.scale, batch.out, tile,
    )  # fmt: skip


def check(chunks, block_size, kv_heads, group, dim, dtype, device, captured, tile=None):
    """Captured: behind nine decode tokens, with two dummy rows, seven padding tokens, and no
    lengths on the host."""
    tokens, rows = sum(query for query, _ in chunks), len(chunks)
    if captured:
        tokens, rows = tokens + 7 + 9, rows + 2
    longest = max(kv for _, kv in chunks)
    batch = PrefillBatch(tokens, rows, longest, block_size, kv_heads, group, dim, dtype, device)
    batch.refill(chunks, first=9 if captured else 0)
    attend(batch, batch.rows(() if captured else chunks), tile)
    batch.check()


@pytest.fixture
def emulated(monkeypatch):
    kernel = EmulatedKernel(kernel_module, "warpgroup_attention_kernel", (1, 2))
    monkeypatch.setattr(launch_module, "warpgroup_attention_kernel", kernel)
    monkeypatch.setattr(launch_module, "launch_options", lambda x: {"overlap": True})
    return kernel


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("chunks", "block_size", "kv_heads", "group", "dim"), CASES)
def test_emulated(chunks, block_size, kv_heads, group, dim, captured, emulated):
    for seed, dtype in enumerate((BRAIN, HALF)):
        emulated.seed = seed
        check(chunks, block_size, kv_heads, group, dim, dtype, "cpu", captured)


@pytest.mark.parametrize(
    "tile",
    [
        WarpgroupTile(2, 64, 1),  # each tile waits for the one before it
        WarpgroupTile(2, 64, 4),
        WarpgroupTile(3, 128, 2),
        WarpgroupTile(3, 128, 2, in_turns=False),
    ],
)
def test_emulated_tiles(tile, emulated):
    for seed in range(4):
        emulated.seed = seed
        check([(70, 400), (3, 140)], 128, 1, 2, 64, BRAIN, "cpu", True, tile)


def test_emulated_random_batches(emulated):
    rng = random.Random(0)
    batch = PrefillBatch(300, 4, 700, 128, 1, 3, 64, BRAIN, "cpu")
    for number in range(8):
        emulated.seed = number
        filled = batch.refill(random_chunks(rng, 4, 300, 700))
        attend(batch, batch.rows(filled if number % 2 else ()))
        batch.check()


def test_tiles_that_no_query_sees_are_not_loaded(emulated):
    check([(256, 384), (64, 512)], 128, 2, 1, 64, BRAIN, "cpu", True)
    tiles = (2 + 3) + 4  # two tiles of queries, and one that needs all keys
    assert emulated.copies == 2 * tiles * 2  # keys and values, of two heads


def test_emulated_dummy_rows_and_scores_far_from_zero(emulated):
    """Scores of some hundreds, whose exponentials overflow: only differences may be taken."""
    batch = PrefillBatch(30, 2, 160, 64, 1, 2, 64, HALF, "cpu")
    batch.refill([])
    attend(batch, batch.rows())
    batch.check()
    batch.refill([(30, 160)], query_scale=100.0)
    attend(batch, batch.rows())
    batch.check()


def test_tiles_that_do_not_exist():
    assert tile_of(96, 128) is None
    assert tile_of(128, 48) is None
    for dim, dtype, block_size in ((80, BRAIN, 64), (64, torch.float32, 64), (64, BRAIN, 48)):
        batch = PrefillBatch(8, 2, 16, block_size, 1, 2, dim, dtype, "cpu")
        with pytest.raises(ValueError, match=f"no tile for {dtype}, heads of {dim} and blocks of"):
            attend(batch, batch.rows())
    batch = PrefillBatch(8, 2, 16, 64, 1, 2, 64, BRAIN, "cpu")
    with pytest.raises(ValueError, match="no tile"):
        attend(batch, batch.rows(), WarpgroupTile(2, 128, 2))
    batch.starts = batch.starts[:2]
    with pytest.raises(ValueError, match="2 rows want 3 starts"):
        attend(batch, batch.rows())
    batch.keys = batch.keys[..., :16]
    with pytest.raises(ValueError, match="does not fit caches"):
        attend(batch, batch.rows())


def compiled(dim, block_size, group):
    tile = tile_of(dim, block_size)
    constants = {
        "block_size": block_size, "group": group, "kv_heads": 8, "rows_tile": 16,
        "warpgroups": tile.warpgroups, "stages": tile.stages, "registers": tile.registers,
        "in_turns": tile.in_turns, "overlap": True,
    }  # fmt: skip
    block = f"tensordesc<bf16[{tile.keys}, {dim}],{IN_SHARED_MEMORY!r}>"
    types = {"key_chunks": block, "value_chunks": block, "scale": "fp32"}
    types |= dict.fromkeys(("tables", "kv_lengths", "starts"), "*i32")
    types |= dict.fromkeys(("table_stride", "rows"), "i32")
    names = warpgroup_attention_kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "*bf16") for n in names}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in ("query", "out")}
    source = GluonASTSource(warpgroup_attention_kernel, signature, constants, aligned)
    options = {"num_warps": 4, "launch_pdl": True}
    return tile, triton.compile(source, target=HOPPER, options=options)


def instructions(kernel, folder):
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    command = [TOOLS / "nvdisasm", "-c", folder / "kernel.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@compiles
@pytest.mark.parametrize(
    ("dim", "block_size", "group"), [(128, 256, 4), (64, 256, 3), (128, 64, 4), (64, 64, 3)]
)
def test_weights_are_computed_beside_a_product(dim, block_size, group, tmp_path):
    """Break it: no second wait for the values, which are there."""
    tile, kernel = compiled(dim, block_size, group)
    assert kernel.metadata.shared <= 227 * 1024
    assert spilled_bytes(kernel.asm, tmp_path) <= 32
    loops = 2 * tile.warpgroups  # with a mask and without
    text = instructions(kernel, tmp_path)
    # From the end of the scores' product to that of the values'.
    between = re.findall(
        r"DEPBAR\.LE gsb0, 0x1\b(.*?)WARPGROUP\.DEPBAR\.LE gsb0, 0x0", text, re.DOTALL
    )
    assert len(between) == loops
    for part in between:
        assert part.count("MUFU.EX2") == tile.keys // 2 + 2
        assert "HGMMA" not in part
    before, after = kernel.asm["ptx"].split("griddepcontrol.wait")
    assert not re.search(r"(ld|st)\.[\w.]*global|cp\.async", before)
    assert "griddepcontrol.launch_dependents" in after


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    @pytest.mark.parametrize("dtype", [BRAIN, HALF])
    @pytest.mark.parametrize("captured", [False, True])
    @pytest.mark.parametrize(("chunks", "block_size", "kv_heads", "group", "dim"), CASES)
    def test_cases(self, chunks, block_size, kv_heads, group, dim, dtype, captured):
        check(chunks, block_size, kv_heads, group, dim, dtype, "cuda", captured)

    @pytest.mark.parametrize(
        ("kv_heads", "group", "dim", "block_size"),
        [(3, 3, 64, 256), (8, 4, 128, 256), (2, 8, 128, 64), (3, 3, 64, 64)],
    )
    def test_random_batches(self, kv_heads, group, dim, block_size):
        rng = random.Random(dim + block_size)
        batch = PrefillBatch(700, 6, 1500, block_size, kv_heads, group, dim, BRAIN, "cuda")
        for number in range(84):
            filled = batch.refill(random_chunks(rng, 6, 700, 1500))
            attend(batch, batch.rows(filled if number % 2 else ()))
            batch.check()
