"""Stored weights: the numbers that a quantised weight of a file means.

A `StoredWeight` is one weight in a format (`stored_formats.py`). It cuts a region of the weight out
of each stored tensor, wherever the region begins, and makes float32 values of the slices on their
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from megatron_async.ops.linear.stored_formats import (
    CODES,
    E2M1,
    GRAIN,
    NATURAL,
    ORDER,
    OUTER,
    SCALE,
    TENSOR,
    ZERO,
    Axis,
    Grain,
    Shape,
    StoredFormat,
)

Region = tuple[slice, ...]
Read = Callable[[str, Region], Tensor]
SLICE_VALUES = 1 << 22
"""Values that are decoded at once: 16 MiB of float32, and a few times as much on the way."""


class StoredWeightError(ValueError):
    """A stored tensor that cannot be decoded; `role` is what it is to the weight."""

    def __init__(self, role: str, problem: str) -> None:
        super().__init__(problem)
        self.role = role


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a format.

    Attributes:
        format: its row.
        shape: `[n, k]` or `[e, n, k]`.
        grain: outputs and inputs that a scale covers, where that is not the format's.
        stored: shapes of the stored tensors.
    """

    format: StoredFormat
    shape: Shape
    grain: Grain
    stored: Mapping[str, Shape]

    @classmethod
    def of(
        cls,
        format: StoredFormat,
        stored: Mapping[str, Shape],
        grains: Sequence[Grain],
        shape: Shape | None = None,
    ) -> StoredWeight:
        """A weight by the shapes of its tensors.

        Args:
            format: its row.
            stored: the shapes, by what the tensors are to a weight, but for `SIZES`.
            grains: those that scales may have.
            shape: of the weight, where a tensor tells it; None: it follows from the codes'.

        Raises:
            ValueError: shapes that do not fit to one another, or to any of `grains`.
        """
        part, found = format.parts[CODES], stored[CODES]
        if len(found) != len(part.axes) + (part.inner > 1) or 0 in found:
            raise ValueError(f"codes of shape {list(found)} are no matrix")
        sizes = {
            axis.name: size * axis.covers for axis, size in zip(part.axes, found, strict=False)
        }
        whole = tuple(sizes[name] for name in "enk" if name in sizes)
        if shape is not None and len(shape) != len(whole):
            raise ValueError("a tensor that should tell its shape tells none")
        misfits: list[str] = []
        for grain in (format.takes_grain and grains) or (TENSOR,):
            weight = cls(format, shape or whole, grain, dict(stored))
            misfits = [role for role in stored if not weight._fits(role)]
            if not misfits:
                return weight
        shapes = ", ".join(f"{role} {list(stored[role])}" for role in misfits)
        known = f", scales: {' or '.join(map(grain_words, grains))}" if format.takes_grain else ""
        raise ValueError(
            f"{shapes} of it do not fit a weight {list(shape or whole)} ({format.name}, codes "
            f"{list(found)}{known})"
        )

    @property
    def scale_covers(self) -> Grain:
        """Outputs and inputs that a scale covers."""
        return self.covers(SCALE, "n"), self.covers(SCALE, "k")

    @property
    def words(self) -> str:
        """The format, in words."""
        scales = f", scales: {grain_words(self.grain)}" if self.format.takes_grain else ""
        return self.format.name + scales

    def cut(self, region: Region) -> dict[str, Region]:
        """The slices of the stored tensors, each in its own dimensions, from which `decode` makes
        a region of the weight. Where the region ends within a block, a group or a word, all of it
        is in the slices."""
        spans, found = self._spans(region), {}
        for role, shape in self.stored.items():
            part = self.format.parts[role]
            dims = part.dims(shape)
            assert dims is not None
            slices = [slice(0, size) for size in shape]
            for axis, dim in zip(part.axes, dims, strict=True):
                if dim is not None:
                    span, covers = spans[axis.name], self._covers(axis)
                    slices[dim] = slice(span.start // covers, -(-span.stop // covers))
            found[role] = tuple(slices)
        return found

    def decode(self, slices: Mapping[str, Tensor], region: Region) -> Tensor:
        """Float32 values of a region, of its shape, on the device of the slices.

        Args:
            slices: what `cut` says of each stored tensor, in its stored dtype.
            region: a slice of each axis of the weight, with start and stop.

        Raises:
            StoredWeightError: inputs whose groups are not in order (act-order).
        """
        if ORDER in slices:
            self._check_order(slices[ORDER], region[-1])
        values = self._values(CODES, slices[CODES], region)
        if ZERO in slices:
            zero = self._values(ZERO, slices[ZERO], region)
            values = values - (zero + self.format.zero_offset)
        elif self.format.zero:
            values = values - self.format.zero
        values = values * self._values(SCALE, slices[SCALE], region)
        if OUTER not in slices:
            return values
        outer = slices[OUTER].to(torch.float32).reshape(())
        return values / outer if self.format.is_divided else values * outer

    def values(self, region: Region, read: Read, dtype: torch.dtype = torch.float32) -> Tensor:
        """`checked` numbers of what is read."""
        slices = {role: read(role, part) for role, part in self.cut(region).items()}
        return self.checked(slices, region, dtype)

    def checked(self, slices: Mapping[str, Tensor], region: Region, dtype: torch.dtype) -> Tensor:
        """`decode` in a dtype, once all of its values are known to be finite.

        Raises:
            StoredWeightError: some are not, or not in that dtype, or as `decode`.
        """
        found = self.decode(slices, region).to(dtype)
        if found.is_meta:
            return found
        if self.format.is_divided and not self._is_good(OUTER, slices[OUTER]):
            problem = "is no number to divide by: fetch the file again"  # infinity leaves zeros
            raise StoredWeightError(OUTER, problem)
        if not bool(found.isfinite().all()):
            bad = [role for role in slices if not self._is_good(role, slices[role])]
            if bad:
                problem = "has values that are no finite numbers: fetch the file again"
                raise StoredWeightError(bad[0], problem)
            problem = f"makes weights that are too large for {dtype}: use another dtype"
            raise StoredWeightError(SCALE, problem)
        return found

    def fill(self, place: Tensor, region: Region, read: Read) -> None:
        """Fill a place with a region, piece by piece; raises as `checked`.

        Args:
            place: of any dtype and as many values, in order; of the shape `[.., rows, columns]`,
                `[groups, rows / groups, columns]`, or `[1, experts, groups, rows / groups,
                columns]`.
            region: as for `decode`.
            read: a region of a stored tensor, by what it is to the weight, on the place's device.
        """
        for part, at in self.pieces(region):
            put(place, at, self.values(part, read, place.dtype), len(region) == 3)

    def pieces(self, region: Region, inputs: int = 1) -> Iterator[tuple[Region, Place]]:
        """A region in pieces of `SLICE_VALUES`, of one expert each, along the axis that is the
        first in the files, and where each is in the region. Rows begin at multiples of 128 and
        columns at multiples of 128 and `inputs`, counted from the region's."""
        *lead, rows, columns = region
        height, width = rows.stop - rows.start, columns.stop - columns.start
        tall, wide = height, width
        if self.format.parts[CODES].axes[0].name == "k":
            unit = lcm(128, inputs)
            wide = max(SLICE_VALUES // height // unit, 1) * unit
        else:
            tall = max(SLICE_VALUES // width // 128, 1) * 128
        experts = range(lead[0].start, lead[0].stop) if lead else range(1)
        for number, expert in enumerate(experts):
            own = (slice(expert, expert + 1),) if lead else ()
            for top in range(0, height, tall):
                for left in range(0, width, wide):
                    down = slice(top, min(top + tall, height))
                    along = slice(left, min(left + wide, width))
                    yield (
                        (
                            *own,
                            slice(rows.start + down.start, rows.start + down.stop),
                            slice(columns.start + along.start, columns.start + along.stop),
                        ),
                        (number, down, along),
                    )

    def _is_good(self, role: str, stored: Tensor) -> bool:
        """Whether all numbers are finite, and a divisor is not 0."""
        if role == CODES and self.format.name.endswith("FP4"):
            return True
        numbers = numbers_of(stored, is_fp4=False)
        if role == OUTER and self.format.is_divided:
            numbers = 1 / numbers + numbers
        return bool(numbers.isfinite().all())

    def _spans(self, region: Region) -> dict[str, slice]:
        return dict(zip("enk"[-len(region) :], region, strict=True))

    def _covers(self, axis: Axis) -> int:
        if axis.covers != GRAIN:
            return axis.covers
        dim = "nk".index(axis.name)
        return self.grain[dim] or self.shape[dim - 2]

    def _fits(self, role: str) -> bool:
        """Whether a stored tensor has just the entries that cover the weight."""
        part, shape = self.format.parts[role], self.stored[role]
        dims = part.dims(shape)
        if dims is None:
            return False
        whole = self._spans(tuple(slice(0, size) for size in self.shape))
        return all(
            -(-whole[axis.name].stop // self._covers(axis)) == (1 if dim is None else shape[dim])
            for axis, dim in zip(part.axes, dims, strict=True)
        )

    def _check_order(self, groups: Tensor, span: slice) -> None:
        expected = torch.arange(span.start, span.stop, device=groups.device)
        expected = expected // (self.grain[1] or self.shape[-1])
        if not torch.equal(groups.reshape(-1).to(torch.int64), expected):
            raise StoredWeightError(
                ORDER,
                "has inputs in the order of their activations (act-order: not k // group_size), "
                "which is not read: quantise the model with desc_act = False",
            )

    def entries(self, role: str, stored: Tensor, region: Region) -> Tensor:
        """A slice of a stored tensor with the axes of the region: of packed axes the numbers, one
        for each value; of others the entries as they are."""
        part, spans = self.format.parts[role], self._spans(region)
        counts = []
        for axis in part.axes:
            span, covers = spans[axis.name], self._covers(axis)
            counts.append(-(-span.stop // covers) - span.start // covers)
        if part.inner > 1:
            counts[-1] *= part.inner
        stored = stored.reshape(counts)
        for at, axis in enumerate(part.axes):
            if axis.is_packed:
                span, covers = spans[axis.name], self._covers(axis)
                digits = _digits(stored, at, self.format.order)
                stored = digits.narrow(at, span.start % covers, span.stop - span.start)
        names = [axis.name for axis in part.axes]
        return stored.permute([names.index(name) for name in spans])

    def covers(self, role: str, name: str) -> int:
        """Values along an axis ("e", "n" or "k") that one of the `entries` covers."""
        axis = next(axis for axis in self.format.parts[role].axes if axis.name == name)
        return 1 if axis.is_packed else self._covers(axis)

    def _values(self, role: str, stored: Tensor, region: Region) -> Tensor:
        """A slice of a stored tensor as float32 that can be broadcast over the region."""
        entries = self.entries(role, stored, region)
        numbers = numbers_of(entries, is_fp4=role == CODES and self.format.name.endswith("FP4"))
        for at, (name, span) in enumerate(self._spans(region).items()):
            covers = self.covers(role, name)
            if covers == 1 or numbers.size(at) == 1:
                continue
            sizes = [*numbers.shape[: at + 1], covers, *numbers.shape[at + 1 :]]
            numbers = numbers.unsqueeze(at + 1).expand(sizes).flatten(at, at + 1)
            numbers = numbers.narrow(at, span.start % covers, span.stop - span.start)
        return numbers


Place = tuple[int, slice, slice]
"""Number of an expert, rows and columns."""


def put(place: Tensor, at: Place, values: Tensor, of_experts: bool) -> None:
    """Write a piece of a region into the region's place (`StoredWeight.fill`). `at`: where it is
    in the region; `of_experts`: the region has an axis of experts."""
    expert, rows, columns = at
    if of_experts:
        place = (place[0] if place.dim() >= 4 else place)[expert]
    whole = place if place.dim() == 3 else place[None]
    each, first, last = whole.size(1), rows.start, rows.stop
    values = values.reshape(last - first, -1)
    if first % each == 0 and last % each == 0:  # whole groups, as many as there may be
        inside = slice(first // each, last // each)
        whole[inside, :, columns] = values.view(-1, each, values.size(1))
        return
    for group in range(first // each, -(-last // each)):
        start, stop = max(first, group * each), min(last, (group + 1) * each)
        inside = slice(start - group * each, stop - group * each)
        whole[group, inside, columns] = values[start - first : stop - first]


def grain_words(grain: Grain) -> str:
    """What a scale covers, in words."""
    rows, columns = grain
    if not rows:
        return "one"
    if rows > 1:
        return f"blocks of {rows} x {columns}"
    return f"groups of {columns}" if columns else "one an output"


def _digits(packed: Tensor, dim: int, order: tuple[int, ...]) -> Tensor:
    """Digits of 4 bits, along the axis in which they are packed: two in a byte, the low one first,
    or eight in a word."""
    count = 2 * packed.element_size()
    places = order if count == 8 else NATURAL[:count]
    shifts = torch.tensor(places, dtype=packed.dtype, device=packed.device)  # sync-ok: at load
    shifts = 4 * shifts.view(-1, *[1] * (packed.dim() - dim - 1))
    return ((packed.unsqueeze(dim + 1) >> shifts) & 15).flatten(dim, dim + 1)


def numbers_of(stored: Tensor, is_fp4: bool) -> Tensor:
    """Float32 of stored numbers; bytes are exponents (E8M0), or numbers of 4 bits (E2M1), in which
    every number has its own code."""
    if is_fp4:
        table = torch.tensor(E2M1, device=stored.device)  # sync-ok: at load
        return table[stored.to(torch.int32)]
    if stored.dtype in (torch.uint8, torch.float8_e8m0fnu):
        bits = stored.view(torch.uint8).to(torch.int32)
        # 2^-127 has no exponent of its own; 255 is NaN, and becomes infinite.
        return torch.where(bits == 0, 1 << 22, bits << 23).view(torch.float32)
    return stored.to(torch.float32)
