"""Loops over rows give what their references give, for every kind of row."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_async.ops.attention.rope_append import rope_append
from megatron_async.ops.cpu import compiler
from megatron_async.ops.linear.eight_bit import EightBitWeight
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.ops.linear.swiglu import swiglu
from megatron_async.ops.recurrent.gated_norms import gated_head_norm, gated_rms_norm

pytestmark = pytest.mark.skipif(
    not compiler.compiles(), reason="Numba is not here, or switched off"
)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def is_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (1, 576), (7, 100), (3, 33)])
def test_norms(shape: tuple[int, int]) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    before = x.clone(), residual.clone()
    for stream in (residual, None):
        for found, expected in zip(
            add_rms_norm.on("cpu")(x, stream, weight, 1e-5),
            add_rms_norm.reference(x, stream, weight, 1e-5),
            strict=True,
        ):
            is_near(found, expected)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (1, 3072), (5, 66)])
def test_swiglu(shape: tuple[int, int]) -> None:
    x = 20 * torch.randn(shape)
    is_near(swiglu.on("cpu")(x), swiglu.reference(x))


@pytest.mark.parametrize(
    ("rows_", "groups", "size"), [(0, 1, 8), (1, 1, 1536), (5, 4, 33), (3, 1, 1)]
)
def test_gated_norms(rows_: int, groups: int, size: int) -> None:
    """The gate is a strip of longer rows."""
    channels = groups * size
    y, wide = torch.randn(rows_, channels), 5 * torch.randn(rows_, channels + 7)
    for z in (wide[:, :channels], wide[:, 7:]):
        weight = torch.randn(channels)
        is_near(
            gated_rms_norm.on("cpu")(y, z, weight, groups, 1e-5),
            gated_rms_norm.reference(y, z, weight, groups, 1e-5),
        )
        weight = torch.randn(size)
        is_near(
            gated_head_norm.on("cpu")(y, z, weight, 1e-6),
            gated_head_norm.reference(y, z, weight, 1e-6),
        )
    double = y.double(), z.double(), weight.double(), 1e-6
    assert torch.equal(gated_head_norm.on("cpu")(*double), gated_head_norm.reference(*double))
    with pytest.raises(ValueError, match="z must be like it"):
        gated_head_norm.on("cpu")(y, wide, weight, 1e-6)


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


@pytest.mark.parametrize("rotated", [2, 6, 16])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("has_gate", [False, True])
def test_rope_append(rotated: int, has_norm: bool, has_gate: bool) -> None:
    tokens, kv_heads, group, dim = 5, 2, 3, 16
    heads = group * (2 if has_gate else 1) + 2
    qkv = torch.randn(tokens, kv_heads * heads * dim)
    cos, sin = torch.randn(40, rotated), torch.randn(40, rotated)
    weights = (torch.randn(dim), torch.randn(dim)) if has_norm else (None, None)
    positions, places = torch.tensor([0, 39, 7, 7, 1]), torch.tensor([31, 0, 5, 6, 17])
    results = []
    for op in (rope_append.on("cpu"), rope_append.reference):
        caches = torch.zeros(4, 8, kv_heads, dim), torch.zeros(4, 8, kv_heads, dim)
        query = op(qkv, cos, sin, positions, places, *caches, *weights, 1e-5, has_gate)
        results.append((query, *caches))
    for found, expected in zip(*results, strict=True):
        is_near(found, expected)


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
    """The same sums of integers: only the scales round otherwise."""
    with mock.patch("megatron_async.ops.linear.eight_bit.widens", return_value=False):
        packed = EightBitWeight(torch.randn(96, 200))
    x = torch.randn(5, 1, 200)
    found = packed.product(x)
    with mock.patch("megatron_async.ops.linear.eight_bit.compiles", return_value=False):
        torch.testing.assert_close(found, packed.product(x), rtol=1e-5, atol=1e-4)
