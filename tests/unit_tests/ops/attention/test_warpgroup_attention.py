"""Prefill attention on warpgroups: emulated, compiled for a GPU, and on one."""

import random
import re
import subprocess

import pytest
import torch
import triton
from triton.experimental.gluon._runtime import GluonASTSource

from megatron_async.ops.attention import prefill_schedule
from megatron_async.ops.attention import warpgroup_attention as launch_module
from megatron_async.ops.attention import warpgroup_attention_kernel as kernel_module
from megatron_async.ops.attention.warpgroup_attention import (
    WarpgroupTile,
    warpgroup_prefill_attention,
    warpgroup_tile_of,
)
from megatron_async.ops.attention.warpgroup_attention_kernel import warpgroup_attention_kernel
from megatron_async.ops.attention.warpgroup_tiles import IN_SHARED_MEMORY, words_in_shared_memory
from tests.unit_tests.ops.attention.prefill_batch import PrefillBatch, random_chunks
from tests.unit_tests.ops.attention.schedule_reference import ReferenceKernel
from tests.unit_tests.ops.linear.gluon_emulator import EmulatedKernel
from tests.unit_tests.ops.linear.test_resident_kernel import HOPPER, TOOLS, spilled_bytes
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

PARTIAL = (10, 11, 12, 13)
"""Arguments of partial results, which launches share."""
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


def attend(batch, rows, tile=None, processors=0, schedule=None, is_settled=False, part=0):
    """The schedule, which is made if there is none."""
    dim, is_narrow = batch.query.size(2), batch.scales is not None
    tile = tile or warpgroup_tile_of(dim, batch.block_size, rows.tokens, part > 0, is_narrow)
    schedule = schedule or batch.schedule(processors, tile)
    batch.plan(schedule, rows, tile)
    warpgroup_prefill_attention(
        batch.query, batch.keys, batch.values, rows.block_tables, schedule, tile, batch.scale,
        batch.out, is_settled, part, batch.scales, batch.sinks, batch.window,
    )  # fmt: skip
    return schedule


def check(
    chunks, block_size, kv_heads, group, dim, dtype, device, captured, tile=None, processors=0,
    is_narrow=False, query_scale=1.0, **rules,
):  # fmt: skip
    """Captured: behind nine decode tokens, with two dummy rows, seven padding tokens, and no
    lengths on the host. Twice, as counters and partial results are left over."""
    tokens, rows = sum(query for query, _ in chunks), len(chunks)
    if captured:
        tokens, rows = tokens + 7 + 9, rows + 2
    longest = max(kv for _, kv in chunks)
    sizes = tokens, rows, longest, block_size, kv_heads, group, dim, dtype, device
    batch = PrefillBatch(*sizes, is_narrow=is_narrow, **rules)
    schedule = None
    for number in range(2 if processors else 1):
        batch.refill(chunks, query_scale, first=9 if captured else 0)
        schedule = attend(
            batch, batch.rows(() if captured else chunks), tile, processors, schedule, number > 0
        )
        batch.check()
    if processors:
        assert not schedule._parts.arrived.any(), "counters are zeros between two launches"
        assert (schedule.units[:, 8] > 1).any()


@pytest.fixture
def emulated(monkeypatch):
    kernel = EmulatedKernel(kernel_module, "warpgroup_attention_kernel", (1, 2), PARTIAL)
    monkeypatch.setattr(launch_module, "warpgroup_attention_kernel", kernel)
    monkeypatch.setattr(launch_module, "launch_options", lambda x: {"overlap": True})
    monkeypatch.setattr(prefill_schedule, "_schedule_kernel", ReferenceKernel())
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


PARTS = [
    # chunks, block size, KV heads, group, head dimension, processors
    ([(3, 2100)], 128, 2, 4, 128, 8),
    ([(150, 1600), (40, 40)], 64, 1, 1, 64, 7),
    ([(30, 1537), (1, 1100), (5, 9)], 128, 1, 3, 64, 12),
    ([(30, 3585)], 128, 1, 1, 128, 8),
    ([(1100, 1110)], 64, 1, 1, 64, 24),  # the first queries see nothing of a part
    ([(600, 600), (2, 1300)], 64, 1, 1, 128, 14),  # and fewer tiles of keys than parts
]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("chunks", "block_size", "kv_heads", "group", "dim", "processors"), PARTS)
def test_emulated_parts(chunks, block_size, kv_heads, group, dim, processors, captured, emulated):
    """Break it: parts counted by all warpgroups together, a counter left as it is, the part that
    comes last joined without its own sums."""
    for seed, dtype in enumerate((BRAIN, HALF)):
        emulated.seed = seed
        sizes = block_size, kv_heads, group, dim
        check(chunks, *sizes, dtype, "cpu", captured, processors=processors)


@pytest.mark.parametrize(
    ("case", "dtype", "processors", "query_scale", "captured"),
    [
        (CASES[1], BRAIN, 0, 1e6, False),
        (CASES[2], BRAIN, 0, 1e-20, True),
        (CASES[3], HALF, 0, 1.0, False),
        (PARTS[1][:5], BRAIN, 7, 1.0, True),
    ],
)
def test_emulated_narrow_caches(case, dtype, processors, query_scale, captured, emulated):
    """Break it: queries of bfloat16 as they are; the place of a tile asked for before all threads
    have read it; a tile widened over one that is still multiplied."""
    for emulated.seed in range(3):
        check(
            *case, dtype, "cpu", captured, None, processors, is_narrow=True, query_scale=query_scale
        )


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize(
    ("window", "processors", "chunks", "block_size", "group", "dim"),
    [
        (64, 0, [(129, 129), (70, 333), (1, 65)], 64, 2, 64),
        (65, 0, [(300, 300), (5, 700)], 128, 1, 128),
        (1, 0, [(64, 128), (1, 1)], 64, 3, 64),
        (500, 0, [(20, 1000), (130, 600)], 64, 4, 128),
        (0, 8, [(3, 2100)], 128, 4, 128),
    ],
)
def test_emulated_windows_and_sinks(
    window, processors, chunks, block_size, group, dim, is_narrow, emulated
):
    """Break it: a sink in each part of the keys, tiles from the last query's window on."""
    check(chunks, block_size, 2, group, dim, HALF, "cpu", True, None, processors, is_narrow,
          window=window, has_sinks=True)  # fmt: skip


def test_emulated_random_batches(emulated):
    rng = random.Random(0)
    batch = PrefillBatch(300, 4, 700, 128, 1, 3, 64, BRAIN, "cpu")
    for number in range(8):
        emulated.seed = number
        filled = batch.refill(random_chunks(rng, 4, 300, 700))
        attend(batch, batch.rows(filled if number % 2 else ()), processors=number // 2 * 4)
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


def test_tiles_that_do_not_exist(emulated):
    assert warpgroup_tile_of(96, 128) is None
    assert warpgroup_tile_of(128, 48) is None
    tile = WarpgroupTile(2, 64, 2)
    for dim, dtype, block_size in ((80, BRAIN, 64), (64, torch.float32, 64), (64, BRAIN, 48)):
        batch = PrefillBatch(8, 2, 16, block_size, 1, 2, dim, dtype, "cpu")
        batch.refill([])
        with pytest.raises(ValueError, match=f"64 keys for {dtype}, heads of {dim} and blocks of"):
            attend(batch, batch.rows(), tile)
    batch = PrefillBatch(8, 2, 16, 64, 1, 2, 64, BRAIN, "cpu")
    batch.refill([])
    with pytest.raises(ValueError, match="no tile of 128 keys for"):
        attend(batch, batch.rows(), WarpgroupTile(2, 128, 2))
    for part, processors, keys in ((96, 0, 64), (256, 4, 64), (256, 0, 32)):
        problem = f"parts of {part} .*={processors} and tiles of {keys}"
        with pytest.raises(ValueError, match=problem):
            attend(batch, batch.rows(), WarpgroupTile(2, keys, 2), processors, part=part)
    with pytest.raises(ValueError, match=r"tiles of 128 queries of 64; here are .* 192"):
        attend(batch, batch.rows(), WarpgroupTile(3, 64, 2), schedule=batch.schedule(0, tile))
    with pytest.raises(ValueError, match=r"a tile that widens for caches of torch.bfloat16: make"):
        attend(batch, batch.rows(), tile._replace(widens=True))
    batch.keys = batch.keys[..., :16]
    with pytest.raises(ValueError, match="does not fit caches"):
        attend(batch, batch.rows(), tile)


def compiled(dim, block_size, group, divides, part=0, is_narrow=False, window=0):
    """With a window there are sinks too."""
    tile = warpgroup_tile_of(dim, block_size, 128 if divides else 8192, part > 0, is_narrow)
    constants = {
        "block_size": block_size, "group": group, "kv_heads": 8, "divides": divides,
        "dim": dim, "key_tile": tile.keys,
        "warpgroups": tile.warpgroups, "stages": tile.stages, "registers": tile.registers,
        "in_turns": tile.in_turns, "part": part, "window": window,
        "is_settled": True, "overlap": True,
    }  # fmt: skip
    if not window:
        constants["sinks"] = None
    block = f"tensordesc<bf16[{tile.keys}, {dim}],{IN_SHARED_MEMORY.value!r}>"
    if is_narrow:
        block = f"tensordesc<i32[{tile.keys}, {dim // 4}],{words_in_shared_memory(dim)!r}>"
    else:
        constants["scales"] = None
    types = {"key_chunks": block, "value_chunks": block, "scale": "fp32"}
    types |= dict.fromkeys(("tables", "units", "arrived"), "*i32")
    types |= dict.fromkeys(("part_output", "part_maximum", "part_total"), "*fp32")
    types |= {"scales": "*fp32", "sinks": "*fp32"}
    types |= dict.fromkeys(("table_stride", "slots"), "i32")
    names = warpgroup_attention_kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "*bf16") for n in names}
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]] for n in ("query", "out", "part_output")
    }
    source = GluonASTSource(warpgroup_attention_kernel, signature, constants, aligned)
    options = {"num_warps": 4, "launch_pdl": True}
    return tile, triton.compile(source, target=HOPPER, options=options)


def instructions(kernel, folder):
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    command = [TOOLS / "nvdisasm", "-c", folder / "kernel.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


SIZES = [(128, 256, 4), (64, 256, 3), (128, 64, 4), (64, 64, 3)]
KINDS = [(False, 0), (True, 0), (False, 256)]


@compiles
@pytest.mark.parametrize(
    ("dim", "block_size", "group", "divides", "part", "is_narrow", "window"),
    [
        *((*size, *kind, False, 0) for size in SIZES for kind in KINDS),
        (128, 256, 4, False, 0, True, 0),
        *((*SIZES[n], False, part, False, 128) for n in (0, 3) for part in (0, 256)),
    ],
)
def test_weights_are_computed_beside_a_product(
    dim, block_size, group, divides, part, is_narrow, window, tmp_path
):
    """Break it: no second wait for the values, which are there; tiles that are widened by halves of
    words (which spills)."""
    tile, kernel = compiled(dim, block_size, group, divides, part, is_narrow, window)
    assert kernel.metadata.shared <= 227 * 1024
    assert spilled_bytes(kernel.asm, tmp_path) <= 32
    # With a mask and without, and where a window begins.
    loops = (3 if window else 2) * tile.warpgroups
    text = instructions(kernel, tmp_path)
    # From the end of the scores' product to the end of the values'.
    between = re.findall(
        r"DEPBAR\.LE gsb0, 0x1\b(.*?)WARPGROUP\.DEPBAR\.LE gsb0, 0x0", text, re.DOTALL
    )
    assert len(between) == loops
    for code in between:
        # In parts, what sums shrink by comes behind the wait.
        assert code.count("MUFU.EX2") == tile.keys // 2 + (0 if part else 2)
        assert "HGMMA" not in code
    before, after = kernel.asm["ptx"].split("griddepcontrol.wait")
    assert not re.search(r"st\.[\w.]*global|cp\.async", before)
    # The unit: its part and parts where keys are divided, its first tile where there is no window.
    loads = (9 if divides else 7) - (window > 0)
    assert len(re.findall(r"ld\.[\w.]*global", before)) == loads
    if is_narrow:
        # By 128 threads, two numbers an instruction, of keys and values.
        assert text.count("F2FP.F16.E4M3") == tile.keys * dim * 2 // 2 // 128
        assert "F2F." not in text
    assert "griddepcontrol.launch_dependents" in after
    # A part is counted once all threads of its warpgroup have stored it.
    *stored, _ = kernel.asm["ptx"].split("atom.global.gpu.acq_rel.add")
    assert len(stored) == (tile.warpgroups if divides else 0)
    for code in stored:
        assert "bar.sync" in code[code.rindex("st.global") :]


@pytest.mark.gpu
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
    @pytest.mark.parametrize("is_narrow", [False, True])
    def test_random_batches(self, kv_heads, group, dim, block_size, is_narrow):
        rng = random.Random(dim + block_size)
        batch = PrefillBatch(
            700, 6, 1500, block_size, kv_heads, group, dim, BRAIN, "cuda", is_narrow=is_narrow
        )
        for number in range(42 if is_narrow else 84):
            filled = batch.refill(random_chunks(rng, 6, 700, 1500))
            attend(batch, batch.rows(filled if number % 2 else ()))
            batch.check()
