"""Products with 4-bit weights in groups: exact integers, and the same bits whatever the tile is."""

from typing import Any
from unittest import mock

import llvmlite.binding as llvm
import pytest
import torch
from torch import Tensor

from megatron_async.ops.cpu import compiler
from megatron_async.ops.linear.cpu import helpers

pytestmark = pytest.mark.skipif(not compiler.multiplies_integers(), reason="no Numba or no AVX2")
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 19]


def draw(outputs: int, k: int, rows: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Integers and offsets of a weight, and rows whose scales are 1; all products are exact."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(0, 16, (outputs, k // 32, 32), generator=generator).to(torch.uint8)
    offsets = torch.randint(-9, 3, (outputs, k // 32), generator=generator).float()
    x = torch.randint(-127, 128, (rows, k), generator=generator).float()
    x[:, ::16] = 127
    return integers, offsets, x


def as_float(integers: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    return (integers * scales[..., None] + offsets[..., None]).flatten(1)


def rounded(x: Tensor) -> Tensor:
    """Rows as 8-bit integers times the scales of their groups of 16, float64."""
    groups = x.double().unflatten(-1, (-1, 16))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scales).round() * scales).flatten(-2)


def product(weight: Any, x: Tensor, pool: helpers.Helpers) -> Tensor:
    with mock.patch("megatron_async.ops.linear.cpu.grouped_weight.helpers_of", return_value=pool):
        found: Tensor = weight.product(x)
    return found


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "k"), [(1, 32), (7, 64), (16, 32), (40, 96), (5, 2048)])
def test_exact(outputs: int, k: int, rows: int) -> None:
    from megatron_async.ops.linear.cpu.grouped_weight import GroupedWeight

    integers, offsets, x = draw(outputs, k, rows, seed=rows)
    scales = torch.ones_like(offsets)
    weight = GroupedWeight(integers, scales, offsets)
    expected = x @ as_float(integers, scales, offsets).T
    assert torch.equal(product(weight, x, helpers.Helpers(0)), expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_do_not_saturate(sign: int) -> None:
    """The largest weights and inputs there are: 16 x 15 x 127 in 16 bits."""
    from megatron_async.ops.linear.cpu.grouped_weight import GroupedWeight

    integers, ones = torch.full((16, 4, 32), 15, dtype=torch.uint8), torch.ones(16, 4)
    weight = GroupedWeight(integers, ones, 0 * ones)
    found = weight.product(torch.full((5, 128), 127.0 * sign))
    assert found.eq(128 * 15 * 127 * sign).all()


def test_near_float32() -> None:
    """Rows lose what 8 bits lose, also beside an input that dwarfs its group; sums lose nothing."""
    from megatron_async.ops.linear.cpu.grouped_weight import GroupedWeight

    generator = torch.Generator().manual_seed(0)
    integers, _, _ = draw(80, 576, 1)
    scales = torch.rand(80, 18, generator=generator) / 100
    offsets = -7.3 * scales
    x = torch.randn(8, 576, generator=generator)
    x[:, 3] = 60.0
    bias = torch.randn(80, generator=generator)
    weight = as_float(integers, scales, offsets)
    found = GroupedWeight(integers, scales, offsets).product(x, bias).double()
    exact = rounded(x) @ weight.double().T + bias
    assert ((found - exact).norm() / exact.norm()) < 1e-6
    expected = x.double() @ weight.double().T + bias
    assert 1e-3 < ((found - expected).norm() / expected.norm()) < 0.02


def test_who_shares_and_how_many_rows_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_async.ops.linear.cpu.grouped_weight import GroupedWeight

    monkeypatch.setattr(helpers, "LEAST_SHARED", 0)
    monkeypatch.setattr(helpers, "CHUNK_BYTES", 1)
    pool, alone = helpers.Helpers(2), helpers.Helpers(0)
    generator = torch.Generator().manual_seed(1)
    integers, offsets, _ = draw(200, 96, 1)
    weight = GroupedWeight(integers, torch.rand(200, 3, generator=generator), offsets)
    x = torch.randn(19, 96, generator=generator)
    together = product(weight, x, alone)
    for rows in ROWS * 30:
        assert torch.equal(product(weight, x[:rows], pool), together[:rows])


def tile_kinds() -> list[tuple[int, bool]]:
    """Kinds of tiles of this CPU: lanes, and whether VNNI is used."""
    features = llvm.get_host_cpu_features()
    wide = features.get("avx512vnni", False) and features.get("avx512bw", False)
    return [(8, False)] + [(8, True)] * bool(features.get("avxvnni")) + [(16, True)] * bool(wide)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_all_kinds_of_tiles_give_the_same_bits(rows: int) -> None:
    """AVX2 is every host's here: its instructions are tested where others are chosen."""
    from numba import njit

    from megatron_async.ops.linear.cpu.group_products import tile
    from megatron_async.ops.linear.cpu.group_rows import round_groups, row_bytes
    from megatron_async.ops.linear.cpu.group_tile import TileKind
    from megatron_async.ops.linear.cpu.grouped_weight import pack_groups

    generator = torch.Generator().manual_seed(rows)
    k, outputs = 160, 16
    integers, offsets, _ = draw(outputs, k, rows)
    scales = torch.rand(outputs, k // 32, generator=generator)
    x, expected = torch.randn(rows, k, generator=generator), None
    given = torch.empty(rows * row_bytes(k), dtype=torch.uint8)
    round_groups(x.data_ptr(), rows, k, given.data_ptr())
    exact = rounded(x) @ as_float(integers, scales, offsets).double().T
    for kind in (TileKind(*kind) for kind in tile_kinds()):
        one = tile(rows, kind)

        @njit(error_model="numpy")
        def multiply(x, stride, k, weight, out, columns):  # type: ignore[no-untyped-def]
            one(x, stride, k, weight, out, columns, weight, 0)  # noqa: B023

        packed, out = pack_groups(integers, scales, offsets, kind.lanes), torch.empty(rows, outputs)
        for block in range(outputs // kind.lanes):
            addresses = packed[block].data_ptr(), out[:, block * kind.lanes :].data_ptr()
            multiply(given.data_ptr(), row_bytes(k), k, addresses[0], addresses[1], outputs)
        assert ((out - exact).norm() / exact.norm()) < 1e-6
        assert expected is None or torch.equal(out, expected)
        expected = out
