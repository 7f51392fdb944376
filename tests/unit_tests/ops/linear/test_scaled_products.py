"""Products of many rows in FP8, by cuBLASLt: what it is given, and what it gives."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from megatron_async.ops.linear import scaled_products
from megatron_async.ops.linear.product_ends import end_product
from megatron_async.ops.linear.product_kernel import Wants
from megatron_async.ops.linear.products import WeightShape, choose, product_gpu
from megatron_async.ops.linear.quantised_weight import quantise_rows
from megatron_async.ops.linear.rounded_rows import new_rounded
from megatron_async.ops.linear.scaled_products import PLAN, SCALED, scaled_product, scales_of
from megatron_async.ops.linear.stream import Stream
from tests.unit_tests.ops.linear.test_products import BRAIN, assert_close, random
from tests.unit_tests.ops.linear.test_streamed_fp8 import (
    FORMS,
    LLAMA,
    expected_product,
    on_a_cpu,
    weight_of,
)
from tests.unit_tests.ops.triton_interpreter import EXACT_16_BIT


@pytest.mark.parametrize(
    ("form", "n", "dtype", "shape"),
    [
        ("blocks", 384, BRAIN, (12, 3)),  # blocks of inputs: a multiple of 4
        ("blocks", 320, BRAIN, (320, 9)),
        ("rows of blocks", 384, BRAIN, (384, 9)),
        ("outputs", 384, BRAIN, (12, 3)),
        ("outputs", 384, torch.float16, (384, 9)),
    ],
)
def test_scales_are_columns(form, n, dtype, shape):
    weight = weight_of(n, 1152, FORMS[form], "cpu")
    scales, kind, is_left = scales_of(weight, dtype)
    is_grid = shape[0] == 12
    assert kind is (ScalingType.BlockWise128x128 if is_grid else ScalingType.BlockWise1x128)
    assert scales.shape == shape
    assert scales.stride() == (1, shape[0])
    values = scales[:9].T.repeat_interleave(128, 0) if is_grid else scales
    numbers = weight.codes.float() * values.repeat_interleave(128, 1)
    if is_left:
        assert form == "outputs"
        numbers = numbers * weight.scales
    assert torch.equal(numbers, weight.values())


@pytest.mark.parametrize("form", ["outputs", "rows of blocks"])
def test_rows_are_padded(form, monkeypatch):
    def multiply(a, b, scale_a, _kind, scale_b, of_b, bias, output_dtype):
        assert len(a) == 8
        assert scale_a.stride() == (1, 8)
        x = a.float() * scale_a.repeat_interleave(128, 1)
        if of_b is ScalingType.BlockWise128x128:
            scale_b = scale_b[:2].T.repeat_interleave(128, 0)
        y = x @ (b.float() * scale_b.repeat_interleave(128, 1).T)
        return (y if bias is None else y + bias).to(output_dtype)

    def padded(x, input_scale, multiple):
        assert multiple == 4
        rows = torch.cat((x, torch.full((3, x.size(1)), torch.nan, dtype=x.dtype)))
        return on_a_cpu(rows, input_scale)

    def ended(y, factors, bias, activation, rounded):
        y = y.float() * factors[:, 0]
        return y if bias is None else y + bias

    monkeypatch.setattr(scaled_products, "end_product", ended)
    monkeypatch.setattr(scaled_products.F, "scaled_mm", multiply)
    monkeypatch.setattr("megatron_async.ops.linear.streamed_fp8.round_rows", padded)
    weight = weight_of(128, 256, FORMS[form], "cpu")
    x, bias = random(5, 256, dtype=BRAIN), random(128, dtype=BRAIN)
    found = scaled_product(x, weight, bias, "", PLAN)
    assert_close(found, expected_product(x, weight, bias), BRAIN)


def test_which_products_are_scaled():
    for outputs, k, activation, split in LLAMA:
        shape = WeightShape(outputs, k, BRAIN, form=FORMS["blocks"])
        wants = Wants(257 if split else 129, norm=True, activation=activation, split=split)
        kernel, _plan, met = choose(shape, wants)
        assert kernel is SCALED
        assert met == wants
    assert choose(shape._replace(outputs=4104), Wants(129)).kernel is not SCALED


@pytest.mark.parametrize(
    ("activation", "has_factors", "has_bias", "rounds"),
    [
        ("", True, True, None),
        ("swiglu", True, True, None),
        ("swiglu", False, False, "own"),
        ("squared_relu", True, False, "file"),
    ],
)
def test_the_end_of_a_product(activation, has_factors, has_bias, rounds, device):
    rows, outputs = 5, 1216  # the last block is half of one
    width, dtype = 2 * outputs if activation == "swiglu" else outputs, EXACT_16_BIT[-1]
    y = random(rows, width + 8, dtype=dtype, device=device)[:, :width]
    factors = torch.rand(width, 1, device=device) if has_factors else None
    bias = random(width, dtype=dtype, device=device) if has_bias else None
    exact = y.double() * (1 if factors is None else factors[:, 0]) + (bias if has_bias else 0)
    if activation:
        gate, up = exact.chunk(2, 1) if activation == "swiglu" else (exact, None)
        exact = F.relu(exact) ** 2 if up is None else F.silu(gate) * up
    if rounds is None:
        found = end_product(y, factors, bias, activation)
        assert (found.data_ptr() == y.data_ptr()) == (not activation)
        assert_close(found, exact, dtype)
        return
    scale = torch.tensor(0.01, device=device) if rounds == "file" else None
    rounded = new_rounded(rows, outputs, torch.device(device), 4, scale)
    end_product(y, factors, bias, activation, rounded)
    codes, scales = quantise_rows(end_product(y, factors, bias, activation), scale)
    assert torch.equal(rounded.codes[:rows].float(), codes.float())
    assert torch.equal(rounded.scales[:, :rows].T, scales)


@pytest.mark.parametrize("rows", [64, 256])
def test_a_norm_adds_partial_sums(rows):
    shape = WeightShape(6144, 4096, BRAIN, form=FORMS["blocks"])
    assert choose(shape, Wants(rows, norm=True, parts=True)).met.norm
    of_16_bits = shape._replace(k=576, form=None)
    assert choose(of_16_bits, Wants(1, norm=True)).met.norm
    assert not choose(of_16_bits, Wants(1, norm=True, parts=True)).met.norm


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize(
        ("rows", "n", "k"), [(129, 512, 1152), (256, 4096, 4096), (5, 320, 640)]
    )
    def test_rows_alone(self, rows, n, k, form):
        weight = weight_of(n, k, FORMS[form], "cuda")
        x = random(rows, k + 8, dtype=BRAIN, device="cuda")[:, 8:]
        found = scaled_product(x, weight, None, "", PLAN)
        assert found.shape == (rows, n)
        assert_close(found, expected_product(x, weight), BRAIN)
        order = torch.randperm(rows, device="cuda")
        assert torch.equal(scaled_product(x[order], weight, None, "", PLAN), found[order])
        bias = random(n, dtype=BRAIN, device="cuda")
        found = scaled_product(x, weight, bias, "", PLAN)
        assert_close(found, expected_product(x, weight, bias), BRAIN)

    @pytest.mark.parametrize("rows", [3, 200])
    def test_behind_a_norm(self, rows):
        """Any kernel: a rounded norm is one kernel with the norm."""
        weight = weight_of(768, 1024, FORMS["blocks"], "cuda")
        x, residual = random(2, rows, 1024, dtype=BRAIN, device="cuda")
        norm = random(1024, dtype=BRAIN, device="cuda")
        stream = Stream(x, residual, norm, 1e-5)
        shape = WeightShape(768, 1024, BRAIN, form=weight.form)
        choice = choose(shape, Wants(rows, norm=True))
        assert choice.met.norm
        found = product_gpu(stream, weight, None, choice)
        total = (x.float() + residual.float()).bfloat16()
        assert torch.equal(stream.total, total)
        rows_of_norm = torch.nn.functional.rms_norm(total, (1024,), norm, 1e-5)
        assert_close(found, expected_product(rows_of_norm, weight), BRAIN, 2)
