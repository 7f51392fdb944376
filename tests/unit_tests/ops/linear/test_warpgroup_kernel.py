"""The kernel whose weights wait in shared memory, compiled for a GPU, which needs none."""

import re

import pytest
import torch
import triton
from test_resident_kernel import HOPPER, products_of, spilled_bytes
from triton.experimental.gluon._runtime import GluonASTSource
from triton_interpreter import INTERPRETED

from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.ops.linear.skinny_plan import WarpgroupPlan, choose_plan
from megatron_async.ops.linear.warpgroup_kernel import IN_SHARED_MEMORY, warpgroup_kernel

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")


def compiled(plan, gated, parts=0):
    constants = {"chunks": plan.chunks, "ring": plan.ring, "gated": gated, "squared": False}
    constants |= {"parts": parts, "block_parts": triton.next_power_of_2(parts)}
    constants |= {"has_bias": False, "overlap": True}
    types = {"x_chunks": f"tensordesc<bf16[64, {plan.chunk}],{IN_SHARED_MEMORY!r}>"}
    types["weight_chunks"] = types["x_chunks"].replace("[64", f"[{plan.block_n}")
    types |= {"rows": "i32", "n": "i32", "k": "i32", "eps": "fp32", "squares": "*fp32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*bf16")
        for name in warpgroup_kernel.arg_names
    }
    source = GluonASTSource(warpgroup_kernel, signature, constants, {})
    return triton.compile(source, target=HOPPER, options={"num_warps": 4, "launch_pdl": True})


def cases():
    for name in ("smollm2-135m", "granite-4.0-h-350m", "qwen3-0.6b"):
        for outputs, k, gated, normed in products_of(DUMMY_SHAPES[name]):
            plan = choose_plan(64, outputs, k, torch.bfloat16, gated, not normed)
            assert isinstance(plan, WarpgroupPlan)
            yield plan, gated


@pytest.mark.parametrize(("plan", "gated"), sorted(set(cases()), key=str))
def test_weights_come_before_the_wait(plan, gated, tmp_path):
    kernel = compiled(plan, gated)
    before, after = kernel.asm["ptx"].split("griddepcontrol.wait")
    copy = r"cp\.async\.bulk\.tensor"
    assert len(re.findall(copy, before)) == plan.chunks * (1 + gated)
    assert len(re.findall(copy, after)) == plan.chunks
    products = plan.chunks * plan.chunk // 16 * (1 + gated)
    assert len(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64", after)) == products
    assert "wgmma" not in before
    assert kernel.metadata.shared <= 227 * 1024
    assert spilled_bytes(kernel.asm, tmp_path) == 0


def test_squares_are_read_before_the_first_product(tmp_path):
    """out_proj of Granite's Mamba-2 layers."""
    shape = DUMMY_SHAPES["granite-4.0-h-350m"]
    inner = shape.mamba_num_heads * shape.mamba_head_dim
    plan = choose_plan(64, shape.hidden_size, inner, torch.bfloat16, False, True)
    kernel = compiled(plan, False, parts=96)
    assert spilled_bytes(kernel.asm, tmp_path) == 0
    behind = kernel.asm["ptx"].split("griddepcontrol.wait")[1]
    assert "ld.global" in behind[: behind.index("wgmma")]
    assert "ld.global" not in behind[behind.index("wgmma") :]
