"""The kernel whose weights wait in shared memory: emulated, and compiled for a GPU."""

import re

import pytest
import torch
import triton
from triton.experimental.gluon._runtime import GluonASTSource

from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.ops.linear import warpgroup as kernel_module
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.linear.warpgroup import (
    HALVES_IN_SHARED_MEMORY,
    IN_SHARED_MEMORY,
    WarpgroupPlan,
    warpgroup_kernel,
    warpgroup_product,
)
from tests.unit_tests.ops.linear.gluon_emulator import EmulatedKernel
from tests.unit_tests.ops.linear.test_products import (
    BRAIN,
    HALF,
    assert_close,
    check_rows_alone,
    choose_plan,
    expected_product,
    multiply,
    random,
    weight_of,
)
from tests.unit_tests.ops.linear.test_resident_kernel import (
    HOPPER,
    TYPES,
    products_of,
    spilled_bytes,
)
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

compiles = pytest.mark.skipif(INTERPRETED, reason="compiles")

CASES = [
    (64, 100, 576, WarpgroupPlan(64, 32, 1, 128, 5, 5)),
    (17, 33, 384, WarpgroupPlan(64, 16, 1, 64, 6, 2)),  # a ring that is filled three times
    (1, 64, 64, WarpgroupPlan(64, 64, 1, 128, 1, 1)),  # a chunk that reaches beyond the inputs
    (50, 72, 1024, WarpgroupPlan(64, 32, 1, 256, 4, 3)),
    (129, 40, 192, WarpgroupPlan(64, 32, 1, 64, 3, 3)),  # three blocks of rows, one of one row
    (200, 72, 320, WarpgroupPlan(128, 64, 1, 64, 5, 2)),
]


@pytest.fixture
def emulated(monkeypatch):
    kernel = EmulatedKernel(kernel_module, "warpgroup_kernel")
    monkeypatch.setattr(kernel_module, "warpgroup_kernel", kernel)
    monkeypatch.setattr(kernel_module, "launch_options", lambda x: {"overlap": True})


@pytest.fixture(autouse=True)
def same_numbers(poisoned_memory):
    torch.manual_seed(0)


def check_partial_sums(rows, device):
    x, weight = random(rows, 320, dtype=BRAIN, device=device), weight_of(72, 320, BRAIN, device)
    plan = WarpgroupPlan(64, 32, 2, 64, 3, 3)
    parts = warpgroup_product(x, weight, None, "", plan)
    assert parts.shape == (2, rows, 72)
    assert_close(parts[0], expected_product(x[:, :192], weight[:, :192]), BRAIN)
    assert_close(parts.sum(0), expected_product(x, weight), BRAIN)


def check_squares(rows, device):
    """Rows that are divided by their root mean square behind the product."""
    x, weight = random(rows, 192, dtype=BRAIN, device=device), weight_of(48, 192, BRAIN, device)
    squares = x.float().square().view(rows, 1, 3, 64).sum(3)
    norm = Stream(x, None, torch.ones(192, device=device), 1e-5, squares=squares)
    found = warpgroup_product(norm, weight, None, "", WarpgroupPlan(64, 32, 1, 64, 3, 3))
    normed = torch.nn.functional.rms_norm(x.float(), (192,), eps=1e-5).to(BRAIN)
    assert_close(found, expected_product(normed, weight), BRAIN)


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
@pytest.mark.parametrize(("rows", "n", "k", "plan"), CASES)
def test_emulated(rows, n, k, plan, activation, dtype, emulated):
    check_rows_alone(warpgroup_product, rows, n, k, plan, activation, dtype, "cpu")


@pytest.mark.parametrize("rows", [40, 150])
def test_emulated_partial_sums(rows, emulated):
    check_partial_sums(rows, "cpu")


@pytest.mark.parametrize("rows", [40, 150])
def test_emulated_squares(rows, emulated):
    check_squares(rows, "cpu")


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("dtype", [HALF, BRAIN])
    @pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
    @pytest.mark.parametrize(("rows", "n", "k", "plan"), CASES)
    def test_small_shapes(self, rows, n, k, plan, activation, dtype):
        check_rows_alone(warpgroup_product, rows, n, k, plan, activation, dtype, "cuda")

    @pytest.mark.parametrize("rows", [40, 150])
    def test_partial_sums_and_squares(self, rows):
        check_partial_sums(rows, "cuda")
        check_squares(rows, "cuda")

    @pytest.mark.parametrize("rows", [65, 100, 256, 511, 768])
    def test_products_of_models(self, rows):
        """By the rule, cuBLAS's among them."""
        for name in ("smollm2-135m", "granite-4.0-h-350m", "qwen3-0.6b"):
            for outputs, k, gated, normed in products_of(DUMMY_SHAPES[name]):
                weight = weight_of((1 + gated) * outputs, k, BRAIN, "cuda")
                x = random(rows, k, dtype=BRAIN, device="cuda")
                if gated:
                    found = multiply(x, weight, activation="swiglu")
                else:
                    found = multiply(x, weight, may_split=not normed)
                whole = found if found.dim() == 2 else found.sum(0)
                activation = "swiglu" if gated else ""
                assert_close(whole, expected_product(x, weight, activation=activation), BRAIN)


def compiled(plan, gated, parts=0, heads=(0, 0, 0), places=TYPES):
    constants = {"chunks": plan.chunks, "ring": plan.ring, "gated": gated, "squared": False}
    constants |= {"parts": parts, "block_parts": triton.next_power_of_2(parts)}
    constants |= {"has_bias": False, "overlap": True}
    constants |= dict(zip(("kv_heads", "group", "dim"), heads, strict=True))
    types = {
        name: f"tensordesc<bf16[{lines}, {plan.chunk}],{IN_SHARED_MEMORY!r}>"
        for name, lines in (("x_chunks", plan.block_m), ("weight_chunks", plan.block_n))
    }
    if heads[2]:
        block = f"bf16[2, {plan.block_n // 2}, {plan.chunk}]"
        types["weight_chunks"] = f"tensordesc<{block},{HALVES_IN_SHARED_MEMORY!r}>"
    types |= places | {"rows": "i32", "n": "i32", "k": "i32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*bf16")
        for name in warpgroup_kernel.arg_names
    }
    source = GluonASTSource(warpgroup_kernel, signature, constants, {})
    return triton.compile(
        source, target=HOPPER, options={"num_warps": plan.block_m // 16, "launch_pdl": True}
    )


def cases():
    for name in ("smollm2-135m", "granite-4.0-h-350m", "qwen3-0.6b"):
        for outputs, k, gated, normed in products_of(DUMMY_SHAPES[name]):
            for rows in (64, 128, 256, 512):
                plan = choose_plan(rows, outputs, k, torch.bfloat16, gated, not normed)
                assert isinstance(plan, WarpgroupPlan) or (rows > 128 and plan is None)
                if plan is not None:
                    yield plan, gated


@compiles
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


@compiles
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
