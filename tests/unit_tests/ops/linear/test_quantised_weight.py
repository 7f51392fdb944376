"""Weights that are kept in fewer bits: the numbers that they mean, and products by them."""

import pytest
import torch

from megatron_async.ops.linear.product_kernel import Wants
from megatron_async.ops.linear.products import WIDENED, WeightShape, choose, product
from megatron_async.ops.linear.quantised_weight import (
    BLOCK,
    Form,
    QuantisedWeight,
    quantise_rows,
)


def test_rows_have_scales_of_their_own():
    rows = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    codes, scales = quantise_rows(rows)
    assert codes.shape == (3, 300)
    assert scales.shape == (3, 3)
    alone = quantise_rows(rows[1:2])
    assert torch.equal(alone[0].float(), codes[1:2].float())
    assert torch.equal(alone[1], scales[1:2])
    assert codes[0, :BLOCK].float().abs().max() == 448
    back = codes.float() * scales.repeat_interleave(BLOCK, -1)[:, :300]
    assert (back - rows).abs().max() <= rows.abs().max() / 16


def test_rows_beyond_a_scale_of_the_file_are_the_largest_number():
    codes, scales = quantise_rows(torch.tensor([[1000.0, -1e6, 3.0]]), torch.tensor(2.0))
    assert codes.float().tolist() == [[448, -448, 1.5]]
    assert scales.tolist() == [[2]]
    zeros, _ = quantise_rows(torch.zeros(2, BLOCK))
    assert torch.equal(zeros.float(), torch.zeros(2, BLOCK))


def test_values_of_each_form():
    fp8 = QuantisedWeight(
        torch.full((130, 256), 2.0).to(torch.float8_e4m3fn),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        Form("FP8", BLOCK, BLOCK),
        torch.bfloat16,
    )
    found = fp8.values()
    assert fp8.shape == (130, 256)
    assert [found[0, 0], found[0, 128], found[129, 0], found[129, 255]] == [2, 4, 6, 8]
    codes = torch.tensor([[0x21, 0xF3]], dtype=torch.uint8)  # 1, 2, 3, 15
    zeros = torch.tensor([[1, 4]], dtype=torch.uint8)
    scales = torch.tensor([[2.0, 0.5]])
    given = Form("INT4", 1, 2, has_zeros=True)
    assert QuantisedWeight(codes, scales, given, torch.float32, zeros).values().tolist() == [
        [0, 2, -0.5, 5.5]
    ]
    plain = QuantisedWeight(codes, scales, Form("INT4", 1, 2), torch.float32)
    assert plain.values().tolist() == [[-14, -12, -2.5, 3.5]]
    exponents = torch.tensor([[128, 126]], dtype=torch.uint8)
    outer = torch.tensor([10.0])
    fp4 = QuantisedWeight(codes, exponents, Form("FP4", 1, 2), torch.float32, outer=outer)
    assert fp4.values().tolist() == [[10, 20, 7.5, -30]]


@pytest.mark.parametrize("rounds", [False, True])
def test_product_takes_rounded_rows(rounds):
    generator = torch.Generator().manual_seed(1)
    weight = QuantisedWeight(
        torch.randn(64, 256, generator=generator).to(torch.float8_e4m3fn),
        torch.rand(64, 1, generator=generator),
        Form("FP8", rounds_rows=rounds),
        torch.float32,
    )
    x = torch.randn(5, 256, generator=generator)
    rows = weight.rounded(x)
    assert torch.equal(rows, x) is not rounds
    expected = rows @ weight.values().T
    assert torch.allclose(product.reference(x, weight), expected, rtol=1e-6)
    bias = torch.ones(64)
    assert torch.allclose(product.reference(x, weight, bias), expected + 1, rtol=1e-6)


def test_a_form_without_a_kernel_is_widened():
    shape = WeightShape(4096, 4096, torch.bfloat16, form=Form("INT4", 1, 96))
    assert choose(shape, Wants(7, norm=True)).kernel is WIDENED
    refused = choose(shape, Wants(7, invariant=True))
    assert not refused.met.invariant
