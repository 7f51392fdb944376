"""Products that end Mamba-2's norm: they divide by root mean squares that they are given."""

import pytest
import torch

from megatron_async.ops.linear.one_row import OneRowPlan, one_row_product
from megatron_async.ops.linear.products import choose_for, product
from megatron_async.ops.linear.resident import ResidentPlan, resident_product
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.linear.warpgroup import MOST_ROWS, WarpgroupPlan, warpgroup_product
from tests.unit_tests.ops.linear.test_products import (
    BRAIN,
    HALF,
    WHOLE,
    assert_close,
    expected_product,
    multiply,
    random,
    weight_of,
)

EPS = 1e-5


def divided_product(rows, k, groups, parts, dtype, device, product, outputs=24):
    """Found and expected of a product that divides; squares are of other values than x, as they are
    before the norm's weight."""
    x, weight = random(rows, k, dtype=dtype, device=device), weight_of(outputs, k, dtype, device)
    squares = 2 * k / groups / parts * torch.rand(rows, groups, parts, device=device)
    root = (squares.double().sum(2) / (k // groups) + EPS).sqrt()
    divided = (x.double().unflatten(1, (groups, -1)) / root[..., None]).flatten(1)
    found = product(Stream(x, None, weight[0], EPS, squares), weight)
    return found, expected_product(divided, weight)


def test_reference():
    found, expected = divided_product(3, 32, 2, 3, WHOLE, "cpu", product.reference)
    assert_close(found, expected, WHOLE)
    ones = torch.ones(2, 8, dtype=BRAIN)
    assert not choose_for(ones, ones, squares=1).met.squares  # no GPU


@pytest.mark.parametrize("dtype", [WHOLE, HALF])
@pytest.mark.parametrize(
    ("k", "parts", "plan"),
    [(200, 5, OneRowPlan(4, 256, 2, 0)), (512, 16, OneRowPlan(2, 128, 4, 0))],
)
def test_one_row(k, parts, plan, dtype, device):
    def product(x, weight):
        return one_row_product(x, weight, None, "", plan)

    found, expected = divided_product(1, k, 1, parts, dtype, device, product, 37)
    assert_close(found, expected, dtype)


@pytest.mark.parametrize(
    ("squares", "residual", "activation"),
    [
        (torch.ones(2, 1, 4), None, ""),
        (torch.ones(1, 1, 4).half(), None, ""),
        (torch.ones(1, 4), None, ""),
        (torch.ones(1, 1, 4), torch.ones(1, 8), ""),
        (torch.ones(1, 1, 4), None, "squared_relu"),
    ],
)
def test_bad_squares(squares, residual, activation):
    x = Stream(torch.ones(1, 8), residual, torch.ones(8), EPS, squares)
    with pytest.raises(ValueError, match="squares must be float32"):
        one_row_product(x, torch.ones(4, 8), None, activation, OneRowPlan(4, 64, 2, 0))


def test_products_that_take_none():
    x = Stream(torch.ones(2, 8), None, torch.ones(8), EPS, torch.ones(2, 2, 4))
    with pytest.raises(ValueError, match="does not serve squares"):
        multiply(x, torch.ones(4, 8))  # there is no plan without a GPU
    half = Stream(x.value.to(BRAIN), None, x.weight, EPS, x.squares)
    for launch, plan in (
        (resident_product, ResidentPlan(8, 16, 4)),
        (warpgroup_product, WarpgroupPlan(64, 32, 1, 128, 1, 1)),
    ):
        with pytest.raises(ValueError, match="squares must be"):
            launch(half, torch.ones(4, 8, dtype=BRAIN), None, "", plan)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("k", [1536, 2048])
def test_one_group(rows, k):
    """By each kernel that the plan may choose."""
    weight = torch.ones(768, k, dtype=BRAIN, device="cuda")
    assert choose_for(weight[:rows], weight, squares=1, split=True).met.squares

    def product(x, weight):
        y = multiply(x, weight, may_split=True)
        return y if y.dim() == 2 else y.sum(0)

    found, expected = divided_product(rows, k, 1, 96, BRAIN, "cuda", product, 768)
    assert_close(found, expected, BRAIN)


@pytest.mark.gpu
def test_which_products_divide():
    narrow = torch.ones(800, 1536, dtype=BRAIN, device="cuda")
    wide = torch.ones(2688, 4096, dtype=BRAIN, device="cuda")
    for rows, groups, weight, taken in (
        (1, 1, narrow, True), (64, 1, narrow, True), (65, 1, narrow, True), (8, 2, narrow, False),
        (MOST_ROWS + 1, 1, narrow, False),
        (1, 8, wide, False), (1, 1, wide, True), (2, 1, wide, False),
    ):  # fmt: skip
        found = choose_for(weight[:rows], weight, squares=groups, split=True).met.squares
        assert bool(found) is taken
    half = narrow.to(HALF)
    assert not choose_for(half[:1], half, squares=1, split=True).met.squares
