"""Formats of quantised weights as published files store them, and the numbers that they mean.

A format is a row of `FORMATS`: the tensors of a layer, which values an entry of each covers, and
how their numbers make a weight `[n, k]` (outputs, inputs), or `[e, n, k]` of all experts:

    (code - zero) * scale * outer     # or / outer

A `StoredWeight` is one weight in a format. It cuts a region of the weight out of each stored
tensor, wherever the region begins, and makes float32 values of the slices on their device.

The formats are those of compressed-tensors' compressors, NVIDIA's Model-Optimizer, AutoAWQ and
GPTQModel; numbers of 4 and 8 bits are those of the OCP MX specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Region = tuple[slice, ...]
Shape = tuple[int, ...]
CODES, SCALE, ZERO, OUTER = "codes", "scale", "zero", "outer"
ORDER, SIZES = "order", "sizes"
"""What a tensor is to a weight: its numbers; what they are multiplied by, less what, and a second
factor of all; the group of each input; the weight's shape, which is read before all others."""
GRAIN = 0
"""An entry of an axis covers as many values as the scales of this weight have there."""
Grain = tuple[int, int]
"""Outputs and inputs that a scale covers; 0: all of them."""
TENSOR, CHANNEL = (0, 0), (1, 0)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NATURAL = tuple(range(8))
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of eight neighbouring outputs."""

_E4M3, _E8M0, _BYTE, _WORD = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.int32
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Axis(NamedTuple):
    """An axis of a stored tensor: the weight's axis ("e", "n" or "k"), values of it that an entry
    covers, and whether the entry holds these values, as digits of 4 bits."""

    name: str
    covers: int = 1
    is_packed: bool = False


class Part(NamedTuple):
    """A stored tensor of a weight: its name after the layer's, or the names that it may have;
    dtypes; axes; and how many entries each place of the last axis has (1 without an axis)."""

    ends: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    axes: tuple[Axis, ...] = ()
    inner: int = 1

    def dims(self, shape: Shape) -> list[int | None] | None:
        """The dimension of a stored tensor that each axis is, or None for one that is left out, as
        its size is 1; None as a whole: the tensor has too many dimensions."""
        count = len(self.axes)
        if self.inner > 1:
            fits = len(shape) == count + 1 and shape[-1] == self.inner
            return list(range(count)) if fits else None
        if count and len(shape) == 2 * count and set(shape[1::2]) == {1}:
            return list(range(0, 2 * count, 2))  # a grid of blocks, as Model-Optimizer writes it
        if len(shape) <= max(count, 1) and (count or set(shape) <= {1}):
            return [*range(min(len(shape), count)), *[None] * (count - len(shape))]
        return None


class StoredFormat(NamedTuple):
    """A format of stored weights.

    Attributes:
        name: in words.
        bits: of a code.
        methods: of `quantization_config`, whose files have it.
        parts: the stored tensors, by what they are to a weight.
        optional: those that may be missing.
        is_divided: `OUTER` divides.
        zero: of a weight that has none stored.
        zero_offset: what stored zeros are less than they mean.
        order: place in a word of each of eight digits.
    """

    name: str
    bits: int
    methods: tuple[str, ...]
    parts: Mapping[str, Part]
    optional: tuple[str, ...] = (ZERO, ORDER)
    is_divided: bool = False
    zero: int = 0
    zero_offset: int = 0
    order: tuple[int, ...] = NATURAL

    @property
    def takes_grain(self) -> bool:
        """Whether its scales cover what the configuration or their shape says."""
        return any(axis.covers == GRAIN for axis in self.parts[SCALE].axes)


_N, _K, _NIBBLES, _WORDS = Axis("n"), Axis("k"), Axis("k", 2, True), Axis("k", 8, True)
_BY_GRAIN = (Axis("n", GRAIN), Axis("k", GRAIN))
_GROUPS, _OUTPUT_WORDS = Axis("k", GRAIN), Axis("n", 8, True)
_GPTQ = {
    CODES: Part((".qweight",), (_WORD,), (_WORDS, _N)),
    SCALE: Part((".scales",), _FLOATS, (_GROUPS, _N)),
    ZERO: Part((".qzeros",), (_WORD,), (_GROUPS, _OUTPUT_WORDS)),
    ORDER: Part((".g_idx",), (_WORD,), (_K,)),
}
FORMATS = (
    StoredFormat(
        "FP8",
        8,
        ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt"),
        {
            CODES: Part((".weight",), (_E4M3,), (_N, _K)),
            SCALE: Part((".weight_scale_inv", ".weight_scale"), (*_FLOATS, _E8M0), _BY_GRAIN),
        },
    ),
    StoredFormat(
        "MXFP8",
        8,
        ("compressed-tensors", "modelopt"),
        {
            CODES: Part((".weight",), (_E4M3,), (_N, _K)),
            SCALE: Part((".weight_scale",), (_BYTE, _E8M0), (_N, Axis("k", 32))),
        },
    ),
    StoredFormat(
        "NVFP4",
        4,
        ("compressed-tensors",),
        {
            CODES: Part((".weight_packed",), (_BYTE,), (_N, _NIBBLES)),
            SCALE: Part((".weight_scale",), (_E4M3,), (_N, Axis("k", 16))),
            OUTER: Part((".weight_global_scale",), _FLOATS),
        },
        is_divided=True,
    ),
    StoredFormat(
        "NVFP4",
        4,
        ("modelopt",),
        {
            CODES: Part((".weight",), (_BYTE,), (_N, _NIBBLES)),
            SCALE: Part((".weight_scale",), (_E4M3,), (_N, Axis("k", 16))),
            OUTER: Part((".weight_scale_2",), _FLOATS),
        },
    ),
    StoredFormat(
        "MXFP4",
        4,
        ("compressed-tensors",),
        {
            CODES: Part((".weight_packed",), (_BYTE,), (_N, _NIBBLES)),
            SCALE: Part((".weight_scale",), (_BYTE, _E8M0), (_N, Axis("k", 32))),
        },
    ),
    StoredFormat(
        "MXFP4",
        4,
        ("mxfp4",),
        {
            CODES: Part(("_blocks",), (_BYTE,), (Axis("e"), _N, Axis("k", 32, True)), inner=16),
            SCALE: Part(("_scales",), (_BYTE, _E8M0), (Axis("e"), _N, Axis("k", 32))),
        },
    ),
    StoredFormat(
        "INT4",
        4,
        ("compressed-tensors",),
        {
            CODES: Part((".weight_packed",), (_WORD,), (_N, _WORDS)),
            SCALE: Part((".weight_scale",), _FLOATS, (_N, _GROUPS)),
            ZERO: Part((".weight_zero_point",), (_WORD,), (_OUTPUT_WORDS, _GROUPS)),
            ORDER: Part((".weight_g_idx",), (_WORD,), (_K,)),
            SIZES: Part((".weight_shape",), (torch.int64, _WORD)),
        },
        zero=8,
    ),
    StoredFormat(
        "INT4",
        4,
        ("awq",),
        {
            CODES: Part((".qweight",), (_WORD,), (_K, _OUTPUT_WORDS)),
            SCALE: Part((".scales",), _FLOATS, (_GROUPS, _N)),
            ZERO: Part((".qzeros",), (_WORD,), (_GROUPS, _OUTPUT_WORDS)),
        },
        optional=(),
        order=AWQ_ORDER,
    ),
    StoredFormat("INT4", 4, ("gptq",), _GPTQ, optional=(ORDER,), zero_offset=1),
    StoredFormat("INT4", 4, ("gptq_v2",), _GPTQ, optional=(ORDER,)),
)
"""Formats that are read. Which one a weight has follows from its tensors, but for the method."""


def format_of(
    tensors: Mapping[str, torch.dtype], method: str
) -> tuple[StoredFormat, dict[str, str]]:
    """The format of a layer's tensors, and the ends of their names by what they are to a weight.

    Args:
        tensors: their dtypes, by the ends of their names.
        method: of `quantization_config`.

    Raises:
        ValueError: they are no whole weight in any format of the method.
    """
    wanted = []
    for each in FORMATS:
        if method in each.methods:
            roles = {
                role: end
                for role, part in each.parts.items()
                for end in part.ends
                if tensors.get(end) in part.dtypes
            }
            needed = each.parts.keys() - {*each.optional}
            if roles.keys() >= needed and len(roles) == len(tensors):
                return each, roles
            parts = [each.parts[role] for role in each.parts if role in needed]
            wanted.append(f"{each.name}: " + ", ".join("/".join(part.ends) for part in parts))
    have = ", ".join(f"{end} ({str(dtype)[6:]})" for end, dtype in sorted(tensors.items()))
    raise ValueError(f"{have} are no whole weight of {method} ({'; '.join(wanted)})")


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
        """`decode` of what is read, in a dtype, once all of its values are known to be finite.

        Raises:
            StoredWeightError: some are not, or not in that dtype, or as `decode`.
        """
        slices = {role: read(role, part) for role, part in self.cut(region).items()}
        found = self.decode(slices, region).to(dtype)
        if found.is_meta:
            return found
        if self.format.is_divided and not self._is_good(OUTER, slices[OUTER]):
            raise StoredWeightError(OUTER, "is no number to divide by")  # infinity leaves zeros
        if not bool(found.isfinite().all()):
            bad = [role for role in slices if not self._is_good(role, slices[role])]
            if bad:
                raise StoredWeightError(bad[0], "has values that are no finite numbers")
            raise StoredWeightError(SCALE, f"makes weights that are too large for {dtype}")
        return found

    def fill(self, place: Tensor, region: Region, read: Read) -> None:
        """Fill a place with a region, `SLICE_VALUES` at a time, along the axis that is the first in
        the files; raises as `values`.

        Args:
            place: of any dtype and as many values, in order; of the shape `[.., rows, columns]`, or
                `[groups, rows / groups, columns]`.
            region: as for `decode`.
            read: a region of a stored tensor, by what it is to the weight, on the place's device.
        """
        *lead, rows, columns = region
        if lead:
            (experts,) = lead
            place = place[0] if place.dim() == 4 else place
            for expert, of_expert in zip(range(experts.start, experts.stop), place, strict=True):
                self._fill(of_expert[None], (slice(expert, expert + 1),), rows, columns, read)
        else:
            self._fill(place if place.dim() == 3 else place[None], (), rows, columns, read)

    def _fill(self, place: Tensor, lead: Region, rows: slice, columns: slice, read: Read) -> None:
        """Into `[groups, rows / groups, columns]`."""
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if self.format.parts[CODES].axes[0].name == "k":
            step = max(SLICE_VALUES // height // 128, 1) * 128
            for first in range(0, width, step):
                last = min(first + step, width)
                part = slice(columns.start + first, columns.start + last)
                values = self.values((*lead, rows, part), read, place.dtype)
                place[..., first:last] = values.reshape(*place.shape[:2], -1)
            return
        step, each = max(SLICE_VALUES // width // 128, 1) * 128, place.size(1)
        for first in range(0, height, step):
            last = min(first + step, height)
            part = slice(rows.start + first, rows.start + last)
            values = self.values((*lead, part, columns), read, place.dtype)
            values = values.reshape(last - first, -1)
            for group in range(first // each, -(-last // each)):
                start, stop = max(first, group * each), min(last, (group + 1) * each)
                at = slice(start - group * each, stop - group * each)
                place[group, at] = values[start - first : stop - first]

    def _is_good(self, role: str, stored: Tensor) -> bool:
        """Whether all numbers are finite, and a divisor is not 0."""
        if role == CODES and self.format.name.endswith("FP4"):
            return True
        numbers = _numbers(stored, is_fp4=False)
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

    def _values(self, role: str, stored: Tensor, region: Region) -> Tensor:
        """A slice of a stored tensor as float32 that can be broadcast over the region."""
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
                stored = _digits(stored, at, self.format.order)
        numbers = _numbers(stored, is_fp4=role == CODES and self.format.name.endswith("FP4"))
        names = [axis.name for axis in part.axes]
        for at, axis in enumerate(part.axes):
            span, covers = spans[axis.name], self._covers(axis)
            if covers == 1 or (numbers.size(at) == 1 and not axis.is_packed):
                continue
            if not axis.is_packed:
                sizes = [*numbers.shape[: at + 1], covers, *numbers.shape[at + 1 :]]
                numbers = numbers.unsqueeze(at + 1).expand(sizes).flatten(at, at + 1)
            numbers = numbers.narrow(at, span.start % covers, span.stop - span.start)
        return numbers.permute([names.index(name) for name in spans])


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


def _numbers(stored: Tensor, is_fp4: bool) -> Tensor:
    """Float32 of stored numbers; bytes are exponents (E8M0), or numbers of 4 bits (E2M1), in which
    every number has its own code."""
    if is_fp4:
        table = torch.tensor(E2M1, device=stored.device)  # sync-ok: at load
        return table[stored.to(torch.int32)]
    if stored.dtype in (_BYTE, _E8M0):
        bits = stored.view(_BYTE).to(torch.int32)
        # 2^-127 has no exponent of its own; 255 is NaN, and becomes infinite.
        return torch.where(bits == 0, 1 << 22, bits << 23).view(torch.float32)
    return stored.to(torch.float32)
