"""Products by weights that are kept in FP8 and 4 bits, on the matrix units."""

import pytest
import torch
import triton
import triton.language as tl

from megatron_async.ops.linear import tile
from megatron_async.ops.linear.load_tile import load_tile, step_of
from megatron_async.ops.linear.product_kernel import Wants
from megatron_async.ops.linear.products import WIDENED, WeightShape, choose, product_gpu
from megatron_async.ops.linear.quantised_weight import Form, QuantisedWeight
from megatron_async.ops.linear.rms_norm import add_rms_norm_gpu
from megatron_async.ops.linear.tile import TILE, TilePlan, tile_product
from megatron_async.ops.linear.widen import widen_gpu
from tests.support.compiled_kernels import record
from tests.unit_tests.ops.linear.kept_weights import FORMS, kept_weight
from tests.unit_tests.ops.linear.test_products import assert_close, expected_product, random
from tests.unit_tests.ops.triton_interpreter import EXACT_16_BIT

HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def same_numbers(poisoned_memory):
    torch.manual_seed(0)


@triton.jit
def numbers_kernel(
    units: tl.tensor,
    out: tl.tensor,
    some: tl.tensor,
    count: tl.constexpr,
    form: tl.constexpr,
    part: tl.constexpr,
    in_pairs: tl.constexpr,
) -> None:
    """Numbers of a part of `count` units, float32."""
    at = tl.arange(0, 2)[:, None] * (count // 2) + tl.arange(0, count // 2)[None, :]
    dtype: tl.constexpr = some.dtype.element_ty
    numbers = load_tile(tl.load(units + at), at, at, part, form, False, dtype, in_pairs)
    tl.store(out + at, numbers.to(tl.float32))


@pytest.mark.parametrize("numbers", ["FP8", "FP4", "INT4"])
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_all_numbers_are_exact(numbers, dtype, device):
    form = Form(numbers)
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 1)
    codes[1] = codes[0].flip(0)  # each byte is the first of a unit and the second of one
    codes = codes.t().reshape(1, -1).contiguous()
    weight = QuantisedWeight(
        codes.view(torch.float8_e4m3fn) if numbers == "FP8" else codes,
        torch.ones(1, 1),
        form,
        dtype,
    )
    per = 16 // form.bits
    expected = weight.values().view(-1, per)
    units = codes.view(torch.int16).to(device)
    for part in range(per):
        out = torch.empty(units.numel(), device=device)
        some = torch.empty(0, dtype=dtype, device=device)
        numbers_kernel[(1,)](units, out, some, units.numel(), form, part, device == "cuda")
        wanted = expected[:, part]
        if numbers == "INT4":
            wanted = wanted + 8 + (0 if dtype == HALF else 128)
        is_number = wanted.isfinite()  # what E4M3 has for NaN is 480 here
        assert torch.equal(out.cpu()[is_number], wanted[is_number])
        assert is_number.sum() >= len(wanted) - 2


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("rows", "activation"), [(5, ""), (1, "swiglu"), (20, "squared_relu")])
def test_tiles_of_each_form(name, rows, activation, device):
    """Odd sizes, rows that are not adjacent, a bias."""
    n, k = 40, 320
    for dtype in EXACT_16_BIT:
        weight = kept_weight(
            name, 2 * n if activation == "swiglu" else n, k, dtype=dtype, device=device
        )
        x = random(rows, k + 24, dtype=dtype, device=device)[:, 8 : k + 8]
        plan = TilePlan(32 if rows > 16 else 16, 32, step_of(weight.form), 1, 2, 3, True, 0)
        found = tile_product(x, weight, None, activation, plan)
        assert_close(found, expected_product(x, weight.values(), activation=activation), dtype)
        if not activation:
            bias = random(n, dtype=dtype, device=device)
            found = tile_product(x, weight, bias, "", plan)
            assert_close(found, expected_product(x, weight.values(), bias), dtype)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("rows", "k", "activation"), [(2, 600, "swiglu"), (9, 1024, "")])
def test_shares_of_a_step(name, rows, k, activation, device):
    """Each warp has inputs of its own; the last step may be no whole one."""
    n = 40
    weight = kept_weight(name, 2 * n if activation else n, k, device=device)
    x = random(rows, k, dtype=HALF, device=device)
    for shares in (2, 4):
        plan = TilePlan(16, 32, step_of(weight.form), 1, shares, 2, True, 0, shares)
        found = tile_product(x, weight, None, activation, plan)
        assert_close(found, expected_product(x, weight.values(), activation=activation), HALF)


@pytest.mark.parametrize(("name", "k"), [("FP8 blocks", 640), ("INT4", 512), ("MXFP4", 448)])
def test_partial_sums_of_forms(name, k, device):
    rows, n = 3, 72
    weight = kept_weight(name, n, k, device=device)
    x = random(rows, k, dtype=HALF, device=device)
    parts = tile_product(x, weight, None, "", TilePlan(16, 32, 128, 3, 2, 3, True, 128))
    assert parts.shape == (3, rows, n)
    assert_close(parts.sum(0), expected_product(x, weight.values()), HALF)
    residual, norm = random(rows, n, dtype=HALF, device=device), torch.ones(n, device=device)
    found = add_rms_norm_gpu(parts, residual, norm.half(), 1e-5)
    assert not found[0].isnan().any()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("lead", [(), (3,)])
def test_widened_weights_have_the_bits_of_their_values(name, lead, device):
    weight = kept_weight(name, *lead, 150, 320, device=device)
    assert torch.equal(widen_gpu(weight), weight.values(HALF))


def test_plans_of_forms():
    """Few rows have a kernel; many are multiplied by a widened weight, and so are those of forms
    that no kernel knows."""
    form = FORMS["INT4"][0]

    def kernel(form, rows, dtype=BRAIN, **wants):
        return choose(WeightShape(4096, 4096, dtype, form=form), Wants(rows, **wants))

    for rows in (1, 2, 16, 64):
        found = kernel(form, rows, split=True)
        assert found.kernel is TILE
        assert found.plan.block_m >= rows
        assert found.plan.swap
    assert kernel(form, 1, split=True).plan.splits > 1
    assert kernel(form, 1, split=True, bias=True).plan.splits == 1
    assert kernel(form, 5, activation="swiglu").met.activation
    assert kernel(form, 65, split=True).plan == kernel(form, 64).plan
    assert kernel(form, 129).kernel is WIDENED
    assert kernel(form, 1, torch.float32).kernel is WIDENED
    assert kernel(form._replace(inputs=96), 1).kernel is WIDENED
    assert kernel(Form("FP8", rounds_rows=True), 1).kernel is not TILE
    assert not kernel(form, 1, invariant=True).met.invariant


def test_rows_that_are_not_whole_words_are_refused():
    weight = kept_weight("INT4", 16, 128)
    x = random(2, 130, dtype=HALF)[:, :128]
    plan = TilePlan(16, 16, 128, 1, 1, 2, True, 0)
    with pytest.raises(ValueError, match="multiples of 8 bytes"):
        tile_product(x, weight, None, "", plan)
    with pytest.raises(ValueError, match="do not multiply"):
        tile_product(
            torch.ones(2, 128), kept_weight("INT4", 16, 128, dtype=torch.float32), None, "", plan
        )


def test_products_by_the_rule(device):
    """Products as layers ask for them: with a bias, without one, beyond the rows of the kernel."""
    weight = kept_weight("INT4", 96, 256, device=device)
    for rows in (1, 9, 70, 130):
        x = random(rows, 256, dtype=HALF, device=device)
        choice = choose(WeightShape(96, 256, HALF, form=weight.form), Wants(rows))
        if rows > 128 and device == "cpu":
            continue  # PyTorch's product of the CPU adds up otherwise
        assert_close(
            product_gpu(x, weight, None, choice), expected_product(x, weight.values()), HALF
        )


@pytest.mark.parametrize(("name", "rows"), [("FP8 blocks", 64), ("INT4 zeros", 3), ("NVFP4", 17)])
def test_kernels_compile_for_hopper(name, rows, monkeypatch):
    """Rows of a warpgroup, and of warps that share a step; two numbers are widened at a time."""
    (recorder,) = record(monkeypatch, (tile, "tile_kernel"))
    weight = kept_weight(name, 96, 512, dtype=BRAIN)
    x = torch.empty(rows, 512, dtype=BRAIN)
    plan = choose(WeightShape(96, 512, BRAIN, form=weight.form), Wants(rows)).plan
    tile_product(x, weight, None, "", plan)
    ptx = recorder.launches[0].compiled().asm["ptx"]
    assert ("wgmma.mma_async" in ptx) == (rows > 16)
    assert "lop3.b32" in ptx
