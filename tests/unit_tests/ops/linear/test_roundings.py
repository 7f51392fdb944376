"""Kernels of one rounding give the same bits: all pairs of kernels that declare one order."""

import itertools

import pytest
import torch

from megatron_async.ops.linear import streamed, warpgroup
from megatron_async.ops.linear.cublas_lt import CUBLAS_LT
from megatron_async.ops.linear.products import CUBLAS, INVARIANT, PRODUCTS
from megatron_async.ops.linear.streamed import StreamedPlan
from megatron_async.ops.linear.tile import TILE, TilePlan
from megatron_async.ops.linear.warpgroup import WarpgroupPlan
from tests.unit_tests.ops.linear.gluon_emulator import EmulatedKernel
from tests.unit_tests.ops.linear.test_products import BRAIN, random, weight_of

PLANS = {
    "warpgroup": [WarpgroupPlan(64, 32, 1, 128, 3, 3), WarpgroupPlan(128, 64, 1, 64, 5, 2)],
    "streamed": [StreamedPlan((32, 16), 1, 2, 3, 128), StreamedPlan((8,), 1, 4, 2, 128)],
    "tile": [
        TilePlan(16, 32, 128, 1, 4, 2, False, 0),
        TilePlan(16, 64, 64, 1, 4, 2, True, 0),
        TilePlan(128, 64, 64, 1, 8, 2, False, 0),
    ],
}
"""Layouts of `[rows, 320]` by a weight of 90 outputs, none of them split."""
PAIRS = [
    (one, other)
    for one, other in itertools.combinations(PRODUCTS, 2)
    if one.rounding.order == other.rounding.order and one is not CUBLAS_LT  # test_cublas_lt.py
]


@pytest.fixture(autouse=True)
def same_numbers(poisoned_memory):
    torch.manual_seed(0)


def check_pair(one, other, rows, activation, device):
    weight = weight_of(180 if activation == "swiglu" else 90, 320, BRAIN, device)
    x = random(rows, 320, dtype=BRAIN, device=device)
    kernels = [(kernel, plan) for kernel in (one, other) for plan in PLANS[kernel.name]]
    found = [kernel.launch(x, weight, None, activation, plan) for kernel, plan in kernels]
    assert all(torch.equal(result, found[0]) for result in found[1:])


def test_which_kernels_share_a_rounding():
    """A kernel that joins an order has layouts above, so that it is compared too."""
    assert [kernel.name for kernel in INVARIANT] == ["cuBLASLt", "warpgroup", "streamed", "tile"]
    assert len(PAIRS) == 3
    assert all(kernel.name in PLANS for pair in PAIRS for kernel in pair)
    assert CUBLAS.rounding.order not in {kernel.rounding.order for kernel in PRODUCTS}


@pytest.mark.parametrize(("one", "other"), [pair for pair in PAIRS if TILE not in pair])
@pytest.mark.parametrize("rows", [17, 70])
@pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
def test_equal_bits_emulated(one, other, rows, activation, monkeypatch):
    for module, name in ((warpgroup, "warpgroup_kernel"), (streamed, "streamed_kernel")):
        monkeypatch.setattr(module, name, EmulatedKernel(module, name))
        monkeypatch.setattr(module, "launch_options", lambda x: {"overlap": True})
    check_pair(one, other, rows, activation, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("one", "other"), PAIRS)
@pytest.mark.parametrize("rows", [17, 64, 70, 128])
@pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
def test_equal_bits(one, other, rows, activation):
    check_pair(one, other, rows, activation, "cuda")
