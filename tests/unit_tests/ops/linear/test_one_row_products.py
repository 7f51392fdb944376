"""Products of one row against torch: short and long rows, with a norm, with a residual."""

import pytest
import torch
import torch.nn.functional as F

from megatron_async.ops.linear.long_row import LongRowPlan, long_row_product
from megatron_async.ops.linear.one_row import OneRowPlan, one_row_product
from megatron_async.ops.linear.stream import Stream
from tests.unit_tests.ops.linear.test_products import (
    assert_close,
    check_product,
    expected_product,
    random,
    weight_of,
)


@pytest.fixture(autouse=True)
def same_numbers(poisoned_memory):
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("product", "n", "k", "plan"),
    [
        (one_row_product, 64, 64, OneRowPlan(4, 64, 2, 0)),
        (one_row_product, 37, 200, OneRowPlan(4, 256, 2, 0)),
        (one_row_product, 50, 576, OneRowPlan(2, 1024, 2, 0)),
        # several steps, the last one ragged
        (one_row_product, 41, 576, OneRowPlan(8, 256, 4, 512)),
        # fewer outputs than a program takes
        (one_row_product, 6, 512, OneRowPlan(8, 128, 4, 0)),
        # the last round has fewer tiles, the last tile less
        (long_row_product, 37, 1000, LongRowPlan(4, 4, 2, 3)),
        # a part of one tile, fewer outputs than a program takes
        (long_row_product, 3, 64, LongRowPlan(4, 4, 3, 1)),
        (long_row_product, 50, 2688, LongRowPlan(8, 4, 11, 7)),
    ],
)
@pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
def test_one_row(product, n, k, plan, activation, dtype, device):
    check_product(product, 1, n, k, plan, activation, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("product", "plan"),
    [(one_row_product, OneRowPlan(4, 128, 2, 0)), (long_row_product, LongRowPlan(4, 4, 2, 3))],
)
def test_added_to_the_residual(product, plan, dtype, device):
    """The product is rounded, then the sum: the same bits as a product and an addition."""
    weight, x = weight_of(37, 200, dtype, device), random(1, 200, dtype=dtype, device=device)
    stream = random(1, 40, dtype=dtype, device=device)[:, :37]
    rounded = product(x, weight, None, "", plan)
    found = product(x, weight, None, "", plan, stream)
    assert torch.equal(found, (rounded.float() + stream.float()).to(dtype))
    with pytest.raises(ValueError, match=r"must be \(1, 37\)"):
        product(x, weight, None, "", plan, stream[:, :36])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("k", [256, 200])
@pytest.mark.parametrize("block_k", [64, 256])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
def test_one_row_with_norm(k, block_k, with_residual, activation, dtype, device):
    plan = OneRowPlan(4, block_k, 2, 0)
    weight = weight_of(60, k, dtype, device)
    x, residual = random(2, 1, k, dtype=dtype, device=device)
    norm = random(k, dtype=dtype, device=device)
    unnormed = Stream(x, residual if with_residual else None, norm, 1e-5)
    found = one_row_product(unnormed, weight, None, activation, plan)
    total = residual + x if with_residual else x
    normed = F.rms_norm(total.double(), (k,), norm.double(), 1e-5)
    assert torch.equal(unnormed.total, total)
    assert with_residual or unnormed.total is x
    assert_close(found, expected_product(normed, weight, activation=activation), dtype)
    one_program = Stream(x, residual, norm, 1e-5)
    one_row_product(one_program, weight[:3], None, "", plan)
    assert torch.equal(one_program.total, residual + x)
