"""Loops over rows give what their references give, for every kind of row."""

from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_async.ops.cpu import compiler
from megatron_async.ops.linear.activations import swiglu
from megatron_async.ops.linear.cpu import eight_bit
from megatron_async.ops.linear.cpu.eight_bit import EightBitWeight
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.ops.recurrent.gated_norms import gated_head_norm, gated_rms_norm

pytestmark = pytest.mark.skipif(
    not compiler.compiles(), reason="Numba is not here, or switched off"
)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def is_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6, equal_nan=True)


def test_other_gates_are_the_references() -> None:
    y, weight = torch.randn(5, 32), torch.randn(8)
    double = y.double(), y.double(), weight.double(), 1e-6
    assert torch.equal(gated_head_norm.on("cpu")(*double), gated_head_norm.reference(*double))
    with pytest.raises(ValueError, match="z must be like it"):
        gated_head_norm.on("cpu")(y, torch.randn(5, 33), weight, 1e-6)


def test_ends_of_the_range() -> None:
    """The exponential neither overflows into NaN nor hides one."""
    gates = torch.tensor([-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4, torch.inf, torch.nan])
    x = torch.stack((gates, torch.ones(9))).reshape(1, 18)
    is_near(swiglu.on("cpu")(x), swiglu.reference(x))


def all_of(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (
        add_rms_norm.on("cpu")(x, x, weight, 1e-5)[0],
        swiglu.on("cpu")(x),
        gated_rms_norm.on("cpu")(x, x, weight, 2, 1e-5),
        gated_head_norm.on("cpu")(x, x, weight[:14].clone(), 1e-5),
    )


def test_a_row_depends_on_no_other() -> None:
    x, weight = torch.randn(9, 70), torch.randn(70)
    x[4], x[6, 3] = torch.nan, torch.inf
    together = all_of(x, weight)
    for row in range(9):
        one = x[row : row + 1].clone()
        alone = all_of(one, weight)
        for found, expected in zip(alone, together, strict=True):
            assert np.array_equal(found[0].numpy(), expected[row].numpy(), equal_nan=True)


def test_what_the_loops_do_not_take_goes_to_the_references() -> None:
    """16 bits, strided rows, partial sums."""
    x, weight = torch.randn(4, 64), torch.randn(64)
    strided = torch.randn(64, 4).T
    is_near(swiglu.on("cpu")(strided), swiglu.reference(strided))
    half = x.bfloat16()
    assert torch.equal(swiglu.on("cpu")(half), swiglu.reference(half))
    parts = torch.randn(2, 4, 64)
    for found, expected in zip(
        add_rms_norm.on("cpu")(parts, x, weight, 1e-5),
        add_rms_norm.reference(parts, x, weight, 1e-5),
        strict=True,
    ):
        is_near(found, expected)


def test_eight_bits_with_and_without_loops() -> None:
    """Sums of integers are equal: only the scales round otherwise."""
    with mock.patch.object(eight_bit, "multiplies_integers", return_value=False):
        packed = EightBitWeight(torch.randn(96, 200))
    x = torch.randn(5, 1, 200)
    found = packed.product(x)
    with mock.patch("megatron_async.ops.linear.cpu.eight_bit.compiles", return_value=False):
        torch.testing.assert_close(found, packed.product(x), rtol=1e-5, atol=1e-4)
