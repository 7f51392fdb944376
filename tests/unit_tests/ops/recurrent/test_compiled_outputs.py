"""Kernels of Mamba-2's outputs, by the matrix units and of one row, compiled for a GPU, which needs
none."""

import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from megatron_async.ops.recurrent.mamba_outputs import WARPS, _products_kernel
from megatron_async.ops.recurrent.mamba_row import _row_kernel, warps_of
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

HOPPER = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
KINDS = {
    "weights": "*fp32", "decays": "*fp32", "row_index": "*i64", "positions": "*i64",
    "bases": "*i32", "xb_stride": "i32", "state_stride": "i32", "out_stride": "i32",
}  # fmt: skip
KINDS_OF_ROW = KINDS | {
    "ring_gates": "*fp32", "a_log": "*fp32", "d": "*fp32", "input_stride": "i32",
    "gates_stride": "i32", "conv_stride": "i32",
}  # fmt: skip
NANO = {"heads": 64, "head_dim": 64, "d_state": 128, "d_inner": 4096, "bc_dim": 1024}
NANO_9B = {"heads": 128, "head_dim": 80, "d_state": 128, "d_inner": 10240, "bc_dim": 1024}
GRANITE = {"heads": 48, "head_dim": 32, "d_state": 128, "d_inner": 1536, "bc_dim": 128}
TINY = {"heads": 8, "head_dim": 16, "d_state": 32, "d_inner": 128, "bc_dim": 64}
pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")


@pytest.mark.pairs
@pytest.mark.parametrize("shape", [NANO, NANO_9B, GRANITE, TINY])
@pytest.mark.parametrize(("width", "window"), [(1, 16), (4, 32), (8, 32)])
@pytest.mark.parametrize("state", ["*fp32", "*bf16"])
def test_the_state_comes_before_the_wait_and_stays_in_registers(
    shape, width, window, state, tmp_path
):
    sizes = {"width": width, "window": window, "ring": 16 + width, "warps": WARPS, "overlap": True}
    constants = shape | sizes
    signature, attributes = {}, {}
    for place, name in enumerate(_products_kernel.arg_names):
        kind = state if name == "state" else KINDS.get(name, "*bf16")
        signature[name] = "constexpr" if name in constants else kind
        if name not in constants:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(_products_kernel, signature, constants, attributes)
    options = {"num_warps": WARPS, "launch_pdl": True}
    compiled = triton.compile(source, target=HOPPER, options=options)
    ptx = compiled.asm["ptx"]
    before, _behind = ptx.split("griddepcontrol.wait")
    element = 4 if state == "*fp32" else 2
    loads = re.findall(r"ld\.global\.cg(?:\.v(\d))?\.b(\d+)", before)
    found = sum(int(count or 1) * int(bits) // 8 for count, bits in loads)
    assert found == 16 * shape["d_state"] * element // 32, "bytes of a thread"
    assert len(loads) <= found // (16 if shape["d_state"] > 32 else 8), "narrow loads of the state"
    # No thread waits for another one, and no bits of the state or of the weights are lost.
    assert compiled.metadata.shared == 0
    assert "bar.sync" not in ptx
    products = shape["d_state"] // 16 * (2 if state == "*fp32" else 1) + window // 16 * 2
    assert ptx.count("mma.sync") == products
    assert keeps_registers(compiled, tmp_path)


def keeps_registers(compiled, folder):
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [TOOLS / "cuobjdump", "-res-usage", folder / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return "STACK:0" in said


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("window", [16, 32])
@pytest.mark.parametrize("d_state", [32, 64, 128, 256])
def test_one_row_waits_for_its_own_inputs_alone(d_state, window, dtype, tmp_path):
    constants = {"heads": 64, "groups": 8, "head_dim": 64, "d_state": d_state, "ring": window + 1}
    constants |= {"conv_ring": 4, "window": window, "tile": 16, "overlap": True}
    signature, attributes = {}, {}
    for place, name in enumerate(_row_kernel.arg_names):
        kind = "*fp32" if name == "state" else KINDS_OF_ROW.get(name, dtype)
        signature[name] = "constexpr" if name in constants else kind
        if name not in constants:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(_row_kernel, signature, constants, attributes)
    options = {"num_warps": warps_of(d_state, window), "launch_pdl": True}
    compiled = triton.compile(source, target=HOPPER, options=options)
    before, behind = compiled.asm["ptx"].split("griddepcontrol.wait")
    assert "ld.global.cg" in before, "the state"
    assert "ld.global.cg" not in behind
    assert "st.global" not in before
    assert keeps_registers(compiled, tmp_path)
