"""Products with weights in groups: exact integers, and the same bits whatever the tile is."""

from typing import Any
from unittest import mock

import llvmlite.binding as llvm
import pytest
import torch
from torch import Tensor

from megatron_async.ops.cpu import compiler
from megatron_async.ops.linear.cpu import helpers
from megatron_async.ops.linear.cpu.group_form import FORMS, GroupForm, Groups, StoredGroups
from megatron_async.ops.linear.cpu.grouped_weight import GroupedWeight

pytestmark = pytest.mark.skipif(not compiler.multiplies_integers(), reason="no Numba or no AVX2")
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 19]
MOST = {False: 127, True: 127 * 256 + 127}
"""The largest input as an integer, by whether rows have 16 bits."""
FINER = {False: 1, True: 256}
of_each_form = pytest.mark.parametrize("form", FORMS, ids=str)


def draw(outputs: int, k: int, rows: int, form: GroupForm, seed: int = 0) -> tuple[Groups, Tensor]:
    """A weight whose scales are 1, and rows whose scales are 1; all products are exact."""
    generator, most = torch.Generator().manual_seed(seed), MOST[form.is_fine]
    integers = torch.randint(0, 2**form.bits, (outputs, k // 32, 32), generator=generator)
    offsets = torch.randint(-9, 3, (outputs, k // 32, form.scales), generator=generator).float()
    x = torch.randint(-most, most + 1, (rows, k), generator=generator).float()
    x[:, ::16] = most
    return Groups(integers.to(torch.uint8), torch.ones_like(offsets), offsets), x


def kept(groups: Groups, form: GroupForm) -> GroupedWeight:
    outputs, count, size = groups.integers.shape
    stored = StoredGroups(
        outputs, count * size, form, lambda first, last: Groups(*(n[first:last] for n in groups))
    )
    return GroupedWeight(stored, form.is_fine)


def scaled(groups: Groups, seed: int) -> Groups:
    """With random scales, which float16 has."""
    generator = torch.Generator().manual_seed(seed)
    return groups._replace(
        scales=torch.rand(groups.scales.shape, generator=generator).half().float()
    )


def rounded(x: Tensor, is_fine: bool = False) -> Tensor:
    """Rows as integers times the scales of their groups, float64."""
    groups = x.double().unflatten(-1, (-1, 32 if is_fine else 16))
    scales = groups.abs().amax(-1, keepdim=True) / MOST[is_fine]
    return ((groups / scales).round() * scales).flatten(-2)


def product(weight: Any, x: Tensor, pool: helpers.Helpers) -> Tensor:
    with mock.patch("megatron_async.ops.linear.cpu.grouped_weight.helpers_of", return_value=pool):
        found: Tensor = weight.product(x)
    return found


@of_each_form
@pytest.mark.parametrize(("outputs", "k"), [(1, 32), (7, 64), (16, 32), (40, 96), (5, 512)])
def test_exact(outputs: int, k: int, form: GroupForm) -> None:
    for rows in ROWS:
        groups, x = draw(outputs, k, rows, form, seed=rows)
        found = product(kept(groups, form), x, helpers.Helpers(0))
        exact = x.double() @ groups.values().double().T
        # float32 rounds sums of 16 bits by 8, group by group.
        assert torch.equal(found, exact) or ((found - exact).norm() / exact.norm() < 3e-7 and (
            form.is_fine or form.bits == 8
        ))  # fmt: skip


@of_each_form
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_do_not_saturate(sign: int, form: GroupForm) -> None:
    """The largest weights and inputs there are: 16 x 15 x 127 in 16 bits, 32 x 255 x 32,639 in
    32."""
    most, levels = MOST[form.is_fine], 2**form.bits - 1
    integers = torch.full((16, 4, 32), levels, dtype=torch.uint8)
    ones = torch.ones(16, 4, form.scales)
    found = kept(Groups(integers, ones, 0 * ones), form).product(
        torch.full((5, 128), most * 1.0 * sign)
    )
    assert (found / (128.0 * levels * most) - sign).abs().max() < 1e-6


@of_each_form
def test_near_float32(form: GroupForm) -> None:
    """Rows lose what their bits lose, also beside an input that dwarfs its group; sums lose
    nothing."""
    groups, _ = draw(80, 576, 1, form)
    groups = scaled(groups, 0)
    groups = groups._replace(offsets=-(2.0 ** (form.bits - 1)) * groups.scales)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 576, generator=generator)
    x[:, 3] = 60.0
    bias = torch.randn(80, generator=generator)
    found, weight = kept(groups, form).product(x, bias).double(), groups.values().double()
    exact = rounded(x, form.is_fine) @ weight.T + bias
    assert ((found - exact).norm() / exact.norm()) < 1e-6
    expected = x.double() @ weight.T + bias
    error, least = (found - expected).norm() / expected.norm(), 1e-3 / FINER[form.is_fine]
    assert least < error < 20 * least


@pytest.mark.parametrize("is_fine", [False, True])
def test_who_shares_and_how_many_rows_change_no_bit(
    is_fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "LEAST_SHARED", 0)
    monkeypatch.setattr(helpers, "CHUNK_BYTES", 1)
    pool, alone, form = helpers.Helpers(2), helpers.Helpers(0), GroupForm(4, 1, True, is_fine)
    groups, _ = draw(200, 96, 1, form)
    weight = kept(scaled(groups, 1), form)
    x = torch.randn(19, 96, generator=torch.Generator().manual_seed(1))
    together = product(weight, x, alone)
    for rows in ROWS * 15:
        assert torch.equal(product(weight, x[:rows], pool), together[:rows])


def tile_kinds() -> list[tuple[int, bool]]:
    """Kinds of tiles of this CPU: lanes, and whether VNNI is used."""
    features = llvm.get_host_cpu_features()
    wide = features.get("avx512vnni", False) and features.get("avx512bw", False)
    return [(8, False)] + [(8, True)] * bool(features.get("avxvnni")) + [(16, True)] * bool(wide)


@of_each_form
def test_all_kinds_of_tiles_give_the_same_bits(form: GroupForm) -> None:
    """AVX2 is every host's here: its instructions are tested where others are chosen."""
    from numba import njit

    from megatron_async.ops.linear.cpu.group_products import tile
    from megatron_async.ops.linear.cpu.group_rows import round_groups, row_bytes
    from megatron_async.ops.linear.cpu.group_tile import TileKind
    from megatron_async.ops.linear.cpu.grouped_weight import pack_groups

    k, outputs, number = 160, 16, FORMS.index(form)
    groups, _ = draw(outputs, k, 1, form)
    groups = scaled(groups, 0)
    for rows in (1, 4):
        x, expected = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)), None
        stride = row_bytes(k, form.is_fine)
        given = torch.empty(rows * stride, dtype=torch.uint8)
        round_groups(x.data_ptr(), rows, k, form.is_fine, given.data_ptr())
        exact = rounded(x, form.is_fine) @ groups.values().double().T
        for kind in (TileKind(*kind) for kind in tile_kinds()):
            one = tile(rows, kind)

            @njit(error_model="numpy")
            def multiply(x, stride, k, weight, out, columns):  # type: ignore[no-untyped-def]
                one(x, stride, k, weight, out, columns, weight, 0, number)  # noqa: B023

            size = kind.group_bytes(form)
            packed = torch.empty((outputs // kind.lanes, k // 32, size), dtype=torch.uint8)
            pack_groups(groups, form, kind.lanes, packed)
            out = torch.empty(rows, outputs)
            for block in range(outputs // kind.lanes):
                addresses = packed[block].data_ptr(), out[:, block * kind.lanes :].data_ptr()
                multiply(given.data_ptr(), stride, k, addresses[0], addresses[1], outputs)
            assert ((out - exact).norm() / exact.norm()) < 1e-6
            assert expected is None or torch.equal(out, expected)
            expected = out
