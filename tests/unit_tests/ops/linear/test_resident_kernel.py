"""The kernel of resident weights, compiled for a GPU, which needs none: what makes it fast."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.ops.linear.resident import (
    RESIDENT_ROWS,
    ResidentPlan,
    resident_kernel,
    segments_of,
)
from tests.unit_tests.ops.linear.test_products import choose_plan
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

HOPPER = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
NUMBERS = {"x_stride", "residual_stride", "rows", "n"}
pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")


TYPES = {
    "eps": "fp32", "squares": "*fp32", "cos": "*fp32", "sin": "*fp32", "position_ids": "*i64",
    "write_index": "*i64", "cache_scales": "*fp32",
}  # fmt: skip

NARROW_TYPES = TYPES | dict.fromkeys(("key_cache", "value_cache"), "*fp8e4nv")


def compiled(k, plan, *, gated=False, normed=False, parts=0, heads=(0, 0, 0), types=TYPES):
    segments = segments_of(k, plan.warps)
    constants = {
        "k": k, "segments": segments, "warps": plan.warps, "block_m": plan.block_m,
        "block_n": plan.block_n, "gated": gated, "squared": False, "has_norm": normed,
        "has_residual": normed, "parts": parts, "block_parts": triton.next_power_of_2(parts),
        "has_bias": False, "overlap": True,
        **dict(zip(("kv_heads", "group", "dim"), heads, strict=True)),
    }  # fmt: skip
    signature, attributes = {}, {}
    for place, name in enumerate(resident_kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = "i32" if name in NUMBERS else types.get(name, "*bf16")
        if name not in ("eps", "rows"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(resident_kernel, signature, constants, attributes)
    options = {"num_warps": plan.warps, "launch_pdl": True}
    return triton.compile(source, target=HOPPER, options=options).asm


def spilled_bytes(asm, folder):
    (folder / "kernel.cubin").write_bytes(asm["cubin"])
    command = [TOOLS / "cuobjdump", "-res-usage", folder / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", said)[1])


def products_of(shape):
    """(outputs, k, gated, behind a norm) of a layer."""
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    heads = shape.num_attention_heads * shape.kv_channels
    qkv = heads + 2 * shape.num_query_groups * shape.kv_channels
    yield from ((qkv, hidden, False, True), (hidden, heads, False, False))
    yield from ((ffn, hidden, True, True), (hidden, ffn, False, False))


def cases():
    for name in ("smollm2-135m", "granite-4.0-h-350m", "qwen3-0.6b"):
        for outputs, k, gated, normed in products_of(DUMMY_SHAPES[name]):
            for rows in (2, 16, RESIDENT_ROWS):
                plan = choose_plan(rows, outputs, k, torch.bfloat16, gated, True)
                if isinstance(plan, ResidentPlan):
                    yield k, plan, gated, normed


@pytest.mark.parametrize("k", [16, 200, 576, 768, 1536, 2560, 3072])
@pytest.mark.parametrize("warps", [1, 2, 4, 8])
def test_segments(k, warps):
    segments = segments_of(k, warps)
    inputs = [size for size, _ in segments]
    assert inputs == sorted(inputs, reverse=True)
    assert sum(inputs[:-1]) < k <= sum(inputs)
    for size, width in segments:
        assert size & (size - 1) == 0
        # A warp's four threads of a line load `width` each, for a product's two halves of inputs.
        assert size // warps % (8 * width) == 0
        assert width in (2, 4, 8)


@pytest.mark.parametrize(("k", "plan", "gated", "normed"), sorted(set(cases()), key=str))
def test_weights_come_before_the_wait(k, plan, gated, normed, tmp_path):
    asm = compiled(k, plan, gated=gated, normed=normed)
    assert asm["ptx"].count("griddepcontrol.wait") == 1
    before, behind = asm["ptx"].split("griddepcontrol.wait")
    loads = re.findall(r"ld\.global(?:\.v(\d))?\.b(\d+)", before)
    found = sum(int(count or 1) * int(bits) // 8 for count, bits in loads)
    assert found * 32 * plan.warps >= plan.block_n * k * (1 + gated) * 2, "not all weights"
    assert len(loads) <= found / 4, "a load of less than 4 bytes"
    behind_loads = behind[: behind.index("mma.sync")]
    assert len(re.findall(r"ld\.global", behind)) == len(re.findall(r"ld\.global", behind_loads))
    assert "ld.local" not in asm["ptx"]
    assert behind.count("bar.sync") <= 5, "one meeting for each of: sums, up, squares"
    assert spilled_bytes(asm, tmp_path) == 0


@pytest.mark.parametrize("rows", [2, RESIDENT_ROWS])
def test_squares_are_read_with_the_rows(rows, tmp_path):
    """out_proj of Granite's Mamba-2 layers: dividing costs no round of its own, and fits."""
    shape = DUMMY_SHAPES["granite-4.0-h-350m"]
    inner = shape.mamba_num_heads * shape.mamba_head_dim
    plan = choose_plan(rows, shape.hidden_size, inner, torch.bfloat16, False, False)
    asm = compiled(inner, plan, parts=96)
    assert spilled_bytes(asm, tmp_path) == 0
    behind = asm["ptx"].split("griddepcontrol.wait")[1]
    first_use = behind.index("mma.sync")
    assert len(re.findall("ld.global", behind)) == len(re.findall("ld.global", behind[:first_use]))
