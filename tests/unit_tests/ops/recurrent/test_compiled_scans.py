"""The scans, and kernels whose types the interpreter does not check, as Triton compiles them for a
GPU, which needs none."""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_async.device_state import state_table
from megatron_async.ops.recurrent import delta_scan, flush, mamba_scan
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

HOPPER = GPUTarget("cuda", 90, 32)
pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")
NUMBERS = {"tokens", "section_field", "decode_rows", "prefill_rows", "num_dests", "dummy_row"}
NUMBERS |= {"rows"}
ENDS_OF_NUMBERS = "_stride", "_layer", "_row"
FLOATS = {"dt_in", "gates", "state", "ring_gates", "a_log", "d"}
INTEGERS = {"starts", "first_positions", "read_rows", "write_rows", "base_after", "chunk_dest"}
INTEGERS |= {"base_before", "saves", "words", "entry", "row_of_slot", "row_slots", "row_index"}
INTEGERS |= {"out_rows", "out_reads", "out_saves", "out_dests"}
SIZES = {"ring": 17, "conv_ring": 4, "share": 107, "share_tile": 128, "chunks_tile": 16}


def compiled(kernel, constants, warps, stages):
    """Triton's last form of a kernel of bfloat16 activations before machine code."""
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        number = name in NUMBERS or name.endswith(ENDS_OF_NUMBERS)
        kind = "*fp32" if name in FLOATS else "*i32" if name in INTEGERS else "*bf16"
        signature[name] = "i32" if number else kind
        attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
    return triton.compile(source, target=HOPPER, options=options).asm["ttgir"]


def products(text):
    """How many products stand in loops, and how many of these in branches of theirs."""
    regions, in_loops, in_branches = [], 0, 0
    for line in text.splitlines():
        code = line.strip()
        if code.startswith("}"):
            regions.pop()
        if "warp_group_dot " in code or "tt.dot " in code:
            in_loops += "scf.for" in regions
            in_branches += "scf.for" in regions and "scf.if" in regions[regions.index("scf.for") :]
        if code.endswith("{"):
            regions.append(next((kind for kind in ("scf.for", "scf.if") if kind in code), ""))
    return in_loops, in_branches


@pytest.mark.parametrize("has_dest", [False, True])
@pytest.mark.parametrize(("lanes", "stages"), [(64, 2), (32, 3)])
def test_mamba(has_dest, lanes, stages):
    """A product in a branch of a pipelined loop reads what the next turn's loads have overwritten
    (Triton 3.6; seen on an H200 as states of zeros)."""
    constants = SIZES | {"heads": 64, "head_dim": 64, "d_state": 128, "d_inner": 4096}
    constants |= {"bc_dim": 1024, "tile": 64, "lanes": lanes, "window": 16, "is_exact": False}
    constants |= {"has_dest": has_dest, "overlap": True}
    in_loops, in_branches = products(compiled(mamba_scan._scan_kernel, constants, 4, stages))
    assert in_loops >= 5
    assert in_branches == 0


@pytest.mark.parametrize("has_dest", [False, True])
def test_gated_delta(has_dest):
    constants = SIZES | {"key_heads": 16, "key_dim": 128, "value_heads": 32, "value_dim": 128}
    constants |= {"tile": 64, "lanes": 32, "has_dest": has_dest, "is_exact": False, "overlap": True}
    in_loops, in_branches = products(compiled(delta_scan._scan_kernel, constants, 4, 2))
    assert in_loops >= 6
    assert in_branches == 0


@pytest.mark.parametrize("has_saves", [False, True])
def test_flush(has_saves):
    constants = {"heads": 64, "head_dim": 64, "columns": 128, "channels": 5120, "ring": 17}
    constants |= {"gates": 2, "parts": 16, "lanes": 32, "entries": 16, "turns": 1, "inputs": 24576}
    constants |= {"has_saves": has_saves, "is_exact": False, "block": 4, "overlap": True}
    text = compiled(flush._flush_kernel, constants, 4, 3)
    in_loops, in_branches = products(text)
    assert in_loops >= 1
    assert in_branches == 0
    assert "griddepcontrol.wait" in text or "gdc_wait" in text
    early = "griddepcontrol.launch_dependents" in text or "gdc_launch_dependents" in text
    assert not early, "layers read states before their wait"


def test_state_table():
    constants = {"counts": 3, "tile": 128, "overlap": True}
    assert "tt.store" in compiled(state_table._unpack_states_kernel, constants, 4, 3)
