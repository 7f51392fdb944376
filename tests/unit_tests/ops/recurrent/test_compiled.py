"""Kernels whose types, loops or registers the interpreter does not check, as Triton compiles them
for a GPU, which needs none; and how many compiled kernels steps of all kinds need."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton

from megatron_async.device_state import state_table
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.recurrent import (
    delta_decode,
    delta_factors,
    delta_prefill,
    delta_replay,
    flush,
    mamba_decode,
    mamba_inputs,
    mamba_outputs,
    mamba_prefill,
    mamba_replay,
    mamba_row,
    prefill_parts,
)
from megatron_async.ops.recurrent.mamba_pools import make_gating
from megatron_async.ops.recurrent.recurrent_pools import (
    DecodeRows,
    FlushRule,
    PrefillRows,
    RecurrentPools,
    replaying_rule,
)
from tests.support.compiled_kernels import record
from tests.unit_tests.ops.recurrent.recurrent_layers import DeltaLayer, MambaLayer
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
NANO = {"heads": 64, "head_dim": 64, "groups": 8, "d_state": 128}
NANO_9B = {"heads": 128, "head_dim": 80, "groups": 8, "d_state": 128}
GRANITE = {"heads": 48, "head_dim": 32, "groups": 1, "d_state": 128}
RULE = FlushRule()
TINY = {"heads": 8, "head_dim": 16, "groups": 2, "d_state": 32}
QWEN = {"key_heads": 16, "key_dim": 128, "value_heads": 32, "value_dim": 128}


def pools_of(layer, rule, width=1, state_dtype=torch.float32, layers=()):
    """Pools of three rows."""

    def empty(*size, dtype=layer.dtype):
        return torch.zeros((*layers, 3, *size), dtype=dtype)

    ring = rule.ring_length(width)
    return RecurrentPools(
        empty(*layer.state_size, dtype=state_dtype),
        empty(ring, layer.ring_dim),
        empty(ring, layer.gates, layer.state_size[0], dtype=torch.float32),
        empty(rule.conv_length(width), layer.conv_dim),
    )


def rows_of(rows, width=1, at=0):
    """Decode rows whose tensors begin at the element `at` of longer ones."""

    def strip(size, dtype):
        return torch.zeros(size + at, dtype=dtype)[at:]

    positions = strip(rows * width, torch.int64)
    return DecodeRows(strip(rows, torch.int64), positions, strip(rows, torch.int32), width)


def chunks_of(chunks, at=0):
    """Prefill chunks, as `rows_of`."""
    starts, *others = (torch.zeros(chunks + 1 + at, dtype=torch.int32)[at:] for _ in range(5))
    return PrefillRows(starts, *(numbers[:chunks] for numbers in others))


def products(compiled):
    """How many products stand in loops, and how many of these in branches of theirs."""
    regions, in_loops, in_branches = [], 0, 0
    for line in compiled.asm["ttgir"].splitlines():
        code = line.strip()
        if code.startswith("}"):
            regions.pop()
        if "warp_group_dot " in code or "tt.dot " in code:
            in_loops += "scf.for" in regions
            in_branches += "scf.for" in regions and "scf.if" in regions[regions.index("scf.for") :]
        if code.endswith("{"):
            regions.append(next((kind for kind in ("scf.for", "scf.if") if kind in code), ""))
    return in_loops, in_branches


def resources(compiled, folder):
    """Registers of a thread, and bytes of its stack."""
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [TOOLS / "cuobjdump", "-res-usage", folder / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [found] = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    return tuple(map(int, found))


def keeps_registers(compiled, folder):
    return resources(compiled, folder)[1] == 0


PREFILL = {
    "mamba": (mamba_prefill.mamba_prefill_gpu, (mamba_prefill, "_scan_kernel")),
    "delta": (delta_prefill.delta_prefill_gpu, (delta_prefill, "_scan_kernel")),
}
OTHERS = (prefill_parts, "_conv_kernel"), (delta_factors, "_factors_kernel")


def prefill(layer, chunks, has_dest, tokens=320, at=0, rule=RULE):
    """A step of chunks with recorders in place of kernels."""
    inputs = layer.inputs(tokens)
    dest = torch.zeros(64, dtype=torch.int32) if has_dest else None
    base, rows = torch.zeros(chunks + at, dtype=torch.int32)[at:], chunks_of(chunks, at)
    pools, out = pools_of(layer, rule), torch.zeros(tokens, layer.outputs, dtype=layer.dtype)
    PREFILL[layer.kind][0](inputs, layer.params, pools, rows, base, rule, out, dest)


@pytest.mark.parametrize("has_dest", [False, True])
@pytest.mark.parametrize(
    ("kind", "chunks", "lanes", "stages", "count"),
    [("mamba", 2, 64, 2, 5), ("mamba", 1, 32, 3, 5), ("delta", 1, 32, 2, 6)],
)
def test_scans_have_no_product_in_a_branch(
    kind, chunks, lanes, stages, count, has_dest, monkeypatch
):
    """A product in a branch of a pipelined loop reads what the next turn's loads have overwritten
    (Triton 3.6; seen on an H200 as states of zeros)."""
    layer = MambaLayer(**NANO, dtype=torch.bfloat16)
    if kind == "delta":
        layer = DeltaLayer(**QWEN, dtype=torch.bfloat16)
    scan, *_others = record(monkeypatch, PREFILL[kind][1], *OTHERS)
    prefill(layer, chunks, has_dest)
    [launch] = scan.launches
    assert (launch.options["lanes"], launch.options["num_stages"]) == (lanes, stages)
    in_loops, in_branches = products(launch.compiled())
    assert in_loops >= count
    assert in_branches == 0


@pytest.mark.parametrize("kind", PREFILL)
def test_other_kernels_of_prefill_compile(kind, monkeypatch):
    layer = {"mamba": MambaLayer, "delta": DeltaLayer}[kind](dtype=torch.bfloat16)
    _scan, *others = record(monkeypatch, PREFILL[kind][1], *OTHERS)
    prefill(layer, 3, False)
    assert sum(len(kernel.launches) for kernel in others) == (1 if kind == "mamba" else 2)
    for kernel in others:
        for launch in kernel.launches:
            assert "tt.store" in launch.compiled().asm["ttgir"]


def flushes(monkeypatch, layer, saves, rows=(3,), ats=(0,), rule=RULE):
    """Launches of the flush of two layers."""
    [kernel] = record(monkeypatch, (flush, "_flush_kernel"))
    pools = pools_of(layer, rule, layers=(2,))
    for count in rows:
        for at in ats:
            index, _positions, bases, _width = rows_of(count, at=at)
            flush.flush_gpu(pools, index, bases, bases, rule, bases if saves else None)
    return kernel.launches


@pytest.mark.parametrize("has_saves", [False, True])
def test_flush(has_saves, monkeypatch):
    [launch] = flushes(monkeypatch, MambaLayer(**NANO, dtype=torch.bfloat16), has_saves)
    compiled = launch.compiled()
    in_loops, in_branches = products(compiled)
    assert in_loops >= 1
    assert in_branches == 0
    text = compiled.asm["ttgir"]
    assert "griddepcontrol.wait" in text or "gdc_wait" in text
    early = "griddepcontrol.launch_dependents" in text or "gdc_launch_dependents" in text
    assert not early, "layers read states before their wait"


DECODE = {
    "mamba": (
        mamba_decode.mamba_decode_gpu,
        (mamba_inputs, "_inputs_kernel"),
        (mamba_decode, "_outputs_kernel"),
    ),
    "delta": (
        delta_decode.delta_decode_gpu,
        (delta_decode, "_inputs_kernel"),
        (delta_decode, "_outputs_kernel"),
    ),
}


@pytest.mark.parametrize(
    ("kind", "width", "is_gated", "dtype"),
    [
        ("mamba", 1, False, torch.bfloat16),
        ("mamba", 1, True, torch.bfloat16),
        ("mamba", 3, False, torch.float32),
        ("delta", 1, False, torch.bfloat16),
        ("delta", 3, False, torch.float32),
    ],
)
def test_kernels_of_decode_wait_before_they_write(kind, width, is_gated, dtype, monkeypatch):
    layer = {"mamba": MambaLayer, "delta": DeltaLayer}[kind](dtype=dtype)
    op, *kernels = DECODE[kind]
    recorders, rule = record(monkeypatch, *kernels), FlushRule()
    step, pools = rows_of(2, width), pools_of(layer, rule, width)
    gating = ()
    if is_gated:
        weight = torch.zeros(layer.outputs, dtype=layer.dtype)
        gating = (None, make_gating(weight, 2, layer.groups, layer.heads, layer.head_dim))
    op(layer.inputs(2 * width), layer.params, pools, step, rule, *gating)
    for recorder in recorders:
        [launch] = recorder.launches
        for path in launch.compiled().asm["ptx"].split("griddepcontrol.wait")[:1]:
            assert "st.global" not in path


def sums(compiled):
    """Layouts of what is added up in float32 over threads."""
    text = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    added = re.findall(r"^ *\}\) : \(tensor<([\dx]+xf32), (#\w+)>\)", text, re.MULTILINE)
    return {(size, layouts[layout]) for size, layout in added}


@pytest.mark.parametrize("width", [1, 4])
def test_a_replay_of_gated_deltanet(width, monkeypatch, tmp_path):
    """Norms are added up in one layout by chunks and by decode steps: another is another order. No
    product is in a branch of a loop, nothing is written before the wait, and the state stays in
    registers."""
    layer, rule = DeltaLayer(**QWEN, dtype=torch.bfloat16), replaying_rule(0, DeltaLayer.tile)
    layer.gates = layer.replayed_gates
    kernels = (delta_replay, "_replay_kernel"), PREFILL["delta"][1]
    conv, replay, scan = record(monkeypatch, (prefill_parts, "_conv_kernel"), *kernels)
    record(monkeypatch, (delta_replay, "_factors_kernel"), (prefill_parts, "_entries_kernel"))
    pools, inputs, base = pools_of(layer, rule, width), layer.inputs(64), torch.zeros(1).int()
    op, given = delta_decode.delta_decode_gpu, (layer.params, pools)
    for rows in (16, 1):
        op(inputs[: rows * width], *given, rows_of(rows, width), rule)
    delta_prefill.delta_prefill_gpu(inputs, *given, chunks_of(1), base, rule)
    by_rows, by_row, by_chunks = (sums(launch.compiled()) for launch in conv.launches)
    assert by_rows == by_row == by_chunks
    assert len(by_rows) == 1
    assert [launch.options["makes"] for launch in replay.launches] == [False, width == 1]
    for launch in (*replay.launches, *scan.launches):
        compiled = launch.compiled()
        assert products(compiled)[1] == 0
        assert "st.global" not in compiled.asm["ptx"].split("griddepcontrol.wait")[0]
        assert keeps_registers(compiled, tmp_path)


@pytest.mark.pairs
@pytest.mark.parametrize("shape", [NANO, NANO_9B, GRANITE, TINY])
@pytest.mark.parametrize(("width", "window"), [(1, 16), (4, 32), (8, 32)])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_the_state_comes_before_the_wait_and_stays_in_registers(
    shape, width, window, state, monkeypatch, tmp_path
):
    [kernel] = record(monkeypatch, (mamba_outputs, "_products_kernel"))
    layer, rule, warps = MambaLayer(**shape, dtype=torch.bfloat16), FlushRule(), mamba_outputs.WARPS
    inputs = mamba_inputs.DecodeInputs(
        torch.zeros(2 * width, layer.shape.bc_dim, dtype=layer.dtype),
        torch.zeros(2 * width, layer.heads, window),
        *torch.zeros(2, 2 * width, layer.heads),
    )
    out = torch.zeros(2 * width, layer.outputs, dtype=layer.dtype)
    pools = pools_of(layer, rule, width, state)
    mamba_outputs.outputs_by_matrix_units(inputs, pools, rows_of(2, width), layer.shape, out, warps)
    compiled = kernel.launches[0].compiled()
    ptx = compiled.asm["ptx"]
    before, _behind = ptx.split("griddepcontrol.wait")
    loads = re.findall(r"ld\.global\.cg(?:\.v(\d))?\.b(\d+)", before)
    found = sum(int(count or 1) * int(bits) // 8 for count, bits in loads)
    assert found == 16 * shape["d_state"] * state.itemsize // 32, "bytes of a thread"
    assert len(loads) <= found // (16 if shape["d_state"] > 32 else 8), "narrow loads of the state"
    # No thread waits for another one, and no bits of the state or of the weights are lost.
    assert compiled.metadata.shared == 0
    assert "bar.sync" not in ptx
    parts = 2 if state == torch.float32 else 1
    assert ptx.count("mma.sync") == shape["d_state"] // 16 * parts + window // 16 * 2
    assert keeps_registers(compiled, tmp_path)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lag", [0, 16])
@pytest.mark.parametrize("d_state", [32, 64, 128, 256])
def test_one_row_waits_for_its_own_inputs_alone(d_state, lag, dtype, monkeypatch, tmp_path):
    [kernel] = record(monkeypatch, (mamba_row, "_row_kernel"))
    layer, rule = MambaLayer(**NANO | {"d_state": d_state}, dtype=dtype), FlushRule(lag=lag)
    pools = pools_of(layer, rule)
    mamba_decode.mamba_decode_gpu(layer.inputs(1), layer.params, pools, rows_of(1), rule)
    [launch] = kernel.launches
    assert launch.options["window"] == 16 + lag
    compiled = launch.compiled()
    before, behind = compiled.asm["ptx"].split("griddepcontrol.wait")
    assert "ld.global.cg" in before, "the state"
    assert "ld.global.cg" not in behind
    assert "st.global" not in before
    assert keeps_registers(compiled, tmp_path)


@pytest.mark.parametrize("kind", ["mamba", "delta"])
def test_a_kernel_is_compiled_once_for_all_steps(kind, monkeypatch):
    """Wherever rows begin in the step's tensors, and however many there are: only powers of two of
    chunks, for tiles that search them, and another tile where they are few, make a difference."""
    layer = {"mamba": MambaLayer, "delta": DeltaLayer}[kind](dtype=torch.bfloat16)
    op, *kernels = DECODE[kind]
    recorders, rule = record(monkeypatch, *kernels), FlushRule()
    pools = pools_of(layer, rule)
    for rows in (2, 3, 8, 16, 17):
        for at in (0, 1):
            op(layer.inputs(rows), layer.params, pools, rows_of(rows, at=at), rule)
    for recorder in recorders:
        assert len(recorder.launches) == 10
        assert len({launch.key for launch in recorder.launches}) == 1
    scan, *others = record(monkeypatch, PREFILL[kind][1], *OTHERS)
    for tokens, chunks in ((1, 1), (16, 1), (33, 2), (320, 16)):
        for at in (0, 1):
            prefill(layer, chunks, False, tokens, at)
    for recorder in (scan, *others):
        assert len({launch.key for launch in recorder.launches}) <= 1
    launches = flushes(monkeypatch, layer, True, (13, 14, 16, 33), (0, 1))
    assert len({launch.key for launch in launches}) == 1


def loose_products(ptx):
    """Sums of float32 products which one kernel's compilation might fuse, and another's not."""
    products = set(re.findall(r"mul(?:\.rn)?\.f32\s+(%r\d+)", ptx))
    sums = re.findall(r"(?:add|sub)(?:\.rn)?\.f32\s+%r\d+, (%r\d+), (%r\d+)", ptx)
    return [pair for pair in sums if products & set(pair)]


def running_sums(compiled):
    """Types of what a tile's running sums add up."""
    text = compiled.asm["ttgir"]
    return re.findall(r'"tt\.scan".*?\}\) : \(tensor<[\dx]+x(\w+),', text, re.DOTALL)


@pytest.mark.parametrize("shape", [NANO, GRANITE])
def test_a_tile_rounds_alike_in_all_kernels(shape, monkeypatch):
    """With a rule that replays. Only the products of the matrix units, sums of zeros and of whole
    numbers have other orders; no compiler fuses but where `tl.fma` says so."""
    layer, rule, found = MambaLayer(**shape, dtype=torch.bfloat16), replaying_rule(2), []
    scan, *others = record(
        monkeypatch, PREFILL["mamba"][1], *OTHERS, (prefill_parts, "_entries_kernel")
    )
    for chunks in (1, 3):
        prefill(layer, chunks, False, rule=rule)
    inputs, replays = record(
        monkeypatch, (mamba_inputs, "_inputs_kernel"), (mamba_replay, "_replay_kernel")
    )
    for width, lag in ((1, 0), (4, 2)):
        rule = replaying_rule(lag)
        pools = pools_of(layer, rule, width)
        rows = rows_of(3, width)
        mamba_decode.mamba_decode_gpu(layer.inputs(3 * width), layer.params, pools, rows, rule)
    tiles = [*scan.launches, *replays.launches, *flushes(monkeypatch, layer, False, rule=rule)]
    for launch in tiles:
        compiled = launch.compiled()
        found += running_sums(compiled)
        ptx = compiled.asm["ptx"]
        assert not loose_products(ptx)
        addends = re.findall(r"fma\.rn\.f32.*, (\S+);", ptx)
        lanes, rows = launch.options.get("lanes", 0), 64 if launch.kernel is scan.kernel else 16
        outputs = rows * lanes // (32 * launch.options["num_warps"])
        outputs *= 2 if launch.options.get("crosses") else 1
        assert len([each for each in addends if each != "0f00000000"]) == outputs
    for recorder in (inputs, *others):
        for launch in recorder.launches:
            compiled = launch.compiled()
            found += running_sums(compiled)
            assert not loose_products(compiled.asm["ptx"])
    # Two scans, a replay that may cross tiles, a flush, and two first kernels.
    assert found == ["i64"] * 6


@pytest.mark.parametrize("shape", [NANO, GRANITE])
def test_a_replay_asks_for_all_at_once(shape, monkeypatch, tmp_path):
    """Before the wait no thread waits for another one, or each load would be waited for by itself;
    and four programs of either kernel fit on a processor."""
    kernels = (mamba_inputs, "_inputs_kernel"), (mamba_replay, "_replay_kernel")
    recorders, rule = record(monkeypatch, *kernels), replaying_rule(0)
    layer = MambaLayer(**shape, dtype=torch.bfloat16)
    rows, pools = rows_of(3), pools_of(layer, rule)
    mamba_decode.mamba_decode_gpu(layer.inputs(3), layer.params, pools, rows, rule)
    for recorder in recorders:
        compiled = recorder.launches[0].compiled()
        before = compiled.asm["ptx"].split("griddepcontrol.wait")[0]
        assert "bar.sync" not in before
        assert 4 * compiled.metadata.shared < 227 * 1024
        registers, stack = resources(compiled, tmp_path)
        assert (registers <= 128, stack) == (True, 0)
    loads = re.findall(r"ld\.global\.cg\.v4\.b32", before)
    assert 16 * len(loads) == 4 * min(shape["head_dim"], 64) * shape["d_state"] // 128, "state"


def test_state_table(monkeypatch):
    [kernel] = record(monkeypatch, (state_table, "_unpack_states_kernel"))
    words, numbers = torch.zeros(2, 99, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    dims = BatchDimensions(3, is_captured=True, padded_prefill_rows=3, padded_prefill_tokens=300)
    out = state_table.StepStates(*(numbers.clone() for _ in range(4)))
    state_table.unpack_states(words, numbers, dims, numbers.long(), numbers, 8, out)
    assert "tt.store" in kernel.launches[0].compiled().asm["ttgir"]
