"""Weights in groups of 32 inputs with scales and offsets, and the forms that loops multiply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
"""Inputs of a group, as in GGUF's blocks."""
ROW_FLOATS = 5
"""float32 numbers behind a group of a row: the scales of its halves, the sum of its inputs as
rounded, and the sums of its halves."""


class Groups(NamedTuple):
    """Numbers of some outputs of a weight: `integers * scales + offsets`, exactly.

    Attributes:
        integers: uint8 `[outputs, groups, 32]`, on a CPU.
        scales, offsets: float32 `[outputs, groups, 1]`, or `[..., 2]`: of the halves of a group.
    """

    integers: Tensor
    scales: Tensor
    offsets: Tensor

    def values(self) -> Tensor:
        """float32 `[outputs, inputs]`, each rounded once."""
        parts = self.integers.unflatten(-1, (self.scales.size(-1), -1))
        # float64 holds products and sums of these numbers.
        exact = parts * self.scales[..., None].double() + self.offsets[..., None]
        return exact.flatten(1).float()


class GroupForm(NamedTuple):
    """What a product's numbers are.

    Attributes:
        bits: of a weight: 4 or 8, from 0 on.
        scales: scales of a group, and as many offsets: 1, or 2, one for each half.
        is_half: whether these are float16, else float32.
        is_fine: whether rows have 16 bits, else 8.
    """

    bits: int
    scales: int
    is_half: bool
    is_fine: bool = False

    @property
    def row_group_bytes(self) -> int:
        """Bytes of a row's group: integers, of 16 bits all first bytes before all second ones, and
        `ROW_FLOATS`."""
        return GROUP * (1 + self.is_fine) + 4 * ROW_FLOATS

    @property
    def bytes_of_group(self) -> int:
        """Bytes of an output's group: weights, scales, offsets."""
        return GROUP * self.bits // 8 + 2 * self.scales * (2 if self.is_half else 4)

    @classmethod
    def of_all(cls, forms: Sequence[GroupForm]) -> GroupForm:
        """The form that holds weights of several forms exactly, of `FORMS`."""
        scales = max(form.scales for form in forms)
        bits = 8 if scales == 2 else max(form.bits for form in forms)
        return cls(bits, scales, scales == 1 and all(form.is_half for form in forms))


FORMS = tuple(
    GroupForm(bits, scales, is_half, is_fine)
    for is_fine in (False, True)
    for bits, scales, is_half in (
        (4, 1, True), (4, 1, False), (8, 1, True), (8, 1, False), (8, 2, False),
    )
)  # fmt: skip
"""All forms: loops know a form by its place here."""


class StoredGroups(NamedTuple):
    """A weight `[outputs, k]` that can be read in parts.

    Attributes:
        form: of all parts, but for the rows.
        read: outputs from first to last - 1.
    """

    outputs: int
    k: int
    form: GroupForm
    read: Callable[[int, int], Groups]

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers."""
        return self.outputs * (self.k // GROUP) * self.form.bytes_of_group


def widened(groups: Groups, form: GroupForm) -> Groups:
    """Groups with as many scales as a form has."""
    numbers = (each.expand(-1, -1, form.scales) for each in groups[1:])
    return Groups(groups.integers, *numbers)


def joined(parts: Sequence[Groups]) -> Groups:
    """Outputs one after the other."""
    return Groups(*map(torch.cat, zip(*parts, strict=True)))
