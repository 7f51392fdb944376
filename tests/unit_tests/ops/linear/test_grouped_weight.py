"""Weights kept as a file's blocks: the gguf package's numbers, exactly, of each type and mixed."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from megatron_async.ops.cpu import compiler
from megatron_async.ops.linear.cpu.group_form import GroupForm, StoredGroups, joined, widened
from megatron_async.ops.linear.cpu.grouped_weight import GroupedWeight
from megatron_async.ops.linear.gguf_blocks import BLOCKS, groups_of
from tests.support.gguf_blocks import blocks_of

Kind = GGMLQuantizationType
pytestmark = pytest.mark.skipif(not compiler.multiplies_integers(), reason="no Numba or no AVX2")


def values(rows: np.ndarray, kind: Kind) -> Tensor:
    return torch.from_numpy(quants.dequantize(rows, kind).astype(np.float32))


def stored(rows: np.ndarray, kind: Kind, k: int) -> StoredGroups:
    def read(first: int, last: int) -> object:
        return groups_of(torch.from_numpy(rows[first:last]), kind)

    return StoredGroups(len(rows), k, BLOCKS[kind].form, read)  # type: ignore[arg-type]


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("is_fine", [False, True])
def test_types(kind: Kind, is_fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that fill no block, read in several pieces."""
    monkeypatch.setattr("megatron_async.ops.linear.cpu.grouped_weight.PIECE", 512 * 32)
    rows = blocks_of(kind, 75, 512)
    weight, expected = GroupedWeight(stored(rows, kind, 512), is_fine), values(rows, kind)
    numbers = torch.tensor([0, 74, 31, 16, 74, 3])
    assert torch.equal(weight.rows(numbers), expected[numbers])
    # Each input alone has one integer and its scale, whatever the bits of a row.
    x = torch.zeros(6, 512)
    for row, column in enumerate((0, 15, 16, 255, 300, 511)):
        x[row, column] = 2.0**row
    found = weight.product(x)
    assert relative_error(found, x.double() @ expected.double().T) < 1e-6
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    error = relative_error(weight.product(x), x.double() @ expected.double().T)
    assert error < 5e-5 if is_fine else 1e-3 < error < 0.02
    part = weight.first(20)
    assert torch.equal(part.product(x), weight.product(x)[:, :20])
    assert torch.equal(part.rows(numbers[:1]), expected[:1])


def test_rows_that_there_are_not_are_zeros() -> None:
    weight = GroupedWeight(stored(blocks_of(Kind.Q4_1, 40, 64), Kind.Q4_1, 64))
    assert weight.rows(torch.tensor([-1, 40, 2**40])).eq(0).all()


@pytest.mark.parametrize(
    ("kinds", "bytes_of_group"),
    [
        ((Kind.Q4_0, Kind.Q4_1), 20),
        ((Kind.Q4_1, Kind.Q8_0), 36),
        ((Kind.Q4_0, Kind.Q4_K), 24),
        ((Kind.Q4_K, Kind.Q6_K), 48),
        ((Kind.Q8_0, Kind.Q6_K, Kind.Q5_K), 48),
    ],
)
def test_mixed(kinds: tuple[Kind, ...], bytes_of_group: int) -> None:
    """A weight of several tensors has a form that holds all of them."""
    parts = [(blocks_of(kind, 32, 256, seed), kind) for seed, kind in enumerate(kinds)]
    form = GroupForm.of_all([BLOCKS[kind].form for kind in kinds])
    whole = joined([widened(groups_of(torch.from_numpy(r), kind), form) for r, kind in parts])
    source = StoredGroups(
        32 * len(kinds), 256, form, lambda first, last: type(whole)(*(n[first:last] for n in whole))
    )
    weight = GroupedWeight(source, is_fine=True)
    expected = torch.cat([values(rows, kind) for rows, kind in parts])
    assert torch.equal(weight.rows(torch.arange(len(expected))), expected)
    assert weight.nbytes == source.nbytes == len(expected) * 256 // 32 * bytes_of_group
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    assert relative_error(weight.product(x), x.double() @ expected.double().T) < 5e-5


@pytest.mark.parametrize(
    ("kind", "scale"), [(Kind.Q4_1, np.inf), (Kind.Q8_0, 600), (Kind.Q4_K, np.nan)]
)
def test_scales_that_cannot_be_kept(kind: Kind, scale: float) -> None:
    """An offset of Q8_0 is 128 scales."""
    rows = blocks_of(kind, 16, 256)
    rows[5, :2] = np.array([scale], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="scales that are not finite, or that float16 does not"):
        GroupedWeight(stored(rows, kind, 256))
