"""How a weight is laid out that a device keeps in fewer bits, before there is memory for it; and
stored weights on their way into such a layout.

A layout follows from what a checkpoint holds, or from a setting, and from the part of the weight
that a rank has. Numbers are not changed on the way: two 4-bit numbers go into each byte, inputs
adjacent; a scale of a block, or of all, becomes one for each output where parts of a weight do not
begin and end with blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_async.ops.linear.quantised_weight import (
    BLOCK,
    E4M3_MAX,
    LEAST_MAXIMUM,
    Form,
    Numbers,
    QuantisedWeight,
)
from megatron_async.ops.linear.stored_formats import CODES, OUTER, SCALE, ZERO, Shape
from megatron_async.ops.linear.stored_weight import Read, Region, StoredWeight, numbers_of, put

E4M3 = torch.float8_e4m3fn
LEAST_INPUTS = 16
"""Inputs that a scale covers at least where ranks cut groups of inputs."""
_NUMBERS: dict[str, Numbers] = {
    "FP8": "FP8", "MXFP8": "FP8", "NVFP4": "FP4", "MXFP4": "FP4", "INT4": "INT4",
}  # fmt: skip
"""Names of stored formats -> of numbers."""


class Layout(NamedTuple):
    """Which tensors a weight is kept in.

    Attributes:
        form: of the weight.
        scales: dtype of its scales.
        has_input_scale: the files have a scale of input rows, by which these are rounded if they
            are at all (`Form.rounds_rows`).
    """

    form: Form
    scales: torch.dtype = torch.float32
    has_input_scale: bool = False

    def empty(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> QuantisedWeight:
        """A weight without numbers.

        Args:
            shape: `[n, k]` or `[experts, n, k]`.
            dtype: of the model.
            device: of its tensors.
        """
        form = self.form
        *lead, n, k = shape
        packed = (*lead, n, k * form.bits // 8)
        grid = (*lead, -(-n // form.rows), -(-k // form.inputs) if form.inputs else 1)
        has_input_scale = self.has_input_scale and form.rounds_rows

        def make(size: Shape, kind: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=kind, device=device)

        return QuantisedWeight(
            make(packed, E4M3 if form.bits == 8 else torch.uint8),
            make(grid, self.scales),
            form,
            dtype,
            zeros=make(grid, torch.uint8) if form.has_zeros else None,
            outer=make((*lead, n), torch.float32) if form.has_outer else None,
            input_scale=make((), torch.float32) if has_input_scale else None,
        )

    def to_json(self) -> list[Any]:
        """For another process: `of_json`."""
        return [*self.form, str(self.scales).removeprefix("torch."), self.has_input_scale]

    @classmethod
    def of_json(cls, values: list[Any]) -> Layout:
        """From `to_json`."""
        *form, scales, has_input_scale = values
        return cls(Form(*form), getattr(torch, scales), has_input_scale)


def layout_of(
    stored: StoredWeight,
    scales: torch.dtype,
    is_on_grid: bool,
    width: int,
    factor: float,
    in_blocks: bool = False,
) -> Layout:
    """The layout of a part of a stored weight.

    Args:
        stored: the weight.
        scales: dtype of its stored scales.
        is_on_grid: the part's rows begin and end with blocks of `BLOCK`.
        width: inputs of the part.
        factor: by which the model multiplies the weight.
        in_blocks: an FP8 scale of the whole weight becomes one of each block, with which products
            by FP8 rows take any number of rows without a kernel more.

    Raises:
        ValueError: the part ends within a group of inputs that is not cut.
    """
    numbers, (rows, inputs) = _NUMBERS[stored.format.name], stored.scale_covers
    height, whole = stored.shape[-2:]
    is_one = numbers == "FP8" and rows >= height and inputs >= whole
    if is_one and in_blocks and is_on_grid and width % BLOCK == 0:
        rows = inputs = BLOCK
    inputs = 0 if inputs >= whole else inputs
    if inputs and width != whole and width % inputs:
        inputs = gcd(inputs, width)
        if inputs < LEAST_INPUTS:
            raise ValueError(
                f"{width} of its {whole} inputs are no whole groups, which have "
                f"{stored.scale_covers[1]} ({stored.words})"
            )
    keeps_rows = numbers == "FP8" and (rows, inputs) == (BLOCK, BLOCK) and is_on_grid
    is_exponent = scales in (torch.uint8, torch.float8_e8m0fnu)
    if numbers == "FP8":
        kept = torch.uint8 if inputs and inputs < BLOCK and is_exponent else torch.float32
    else:
        kept = torch.uint8 if is_exponent else scales
    is_scaled = factor != 1
    if is_scaled and numbers != "FP4":
        kept = torch.float32
    form = Form(
        numbers,
        rows=BLOCK if keeps_rows else 1,
        inputs=inputs,
        has_zeros=ZERO in stored.stored,
        has_outer=OUTER in stored.stored or (is_scaled and numbers == "FP4"),
    )
    return Layout(form, kept)


def repacked(
    stored: StoredWeight,
    slices: Mapping[str, Tensor],
    region: Region,
    layout: Layout,
    factor: float = 1.0,
) -> dict[str, Tensor]:
    """A region of a stored weight in a layout, on the device of the slices.

    Args:
        stored: the weight.
        slices: as for `StoredWeight.decode`.
        region: of it; it begins with a block of rows and with a group of inputs of the layout. Of
            experts one.
        layout: from `layout_of`.
        factor: by which the model multiplies the weight.

    Returns:
        tensors `[rows, columns]` by the names of `QuantisedWeight`, `outer` with one column.
    """
    form, found = layout.form, dict[str, Tensor]()
    numbers = stored.entries(CODES, slices[CODES], region).flatten(0, -2)
    if form.bits == 4:
        numbers = (numbers[:, 0::2] | numbers[:, 1::2] << 4).to(torch.uint8)
    found["codes"] = numbers
    rows, columns = region[-2:]
    counts = []
    for span, step in ((rows, form.rows), (columns, form.inputs)):
        counts.append((span, step, -(-(span.stop - span.start) // step) if step else 1))

    def over(role: str) -> Tensor:
        """An entry for each scale of the layout."""
        entries = stored.entries(role, slices[role], region)
        entries = entries[0] if entries.dim() == 3 else entries
        for dim, (span, step, count) in enumerate(counts):
            covers = stored.covers(role, "nk"[dim])
            places = torch.arange(count, device=entries.device) * step + span.start % covers
            entries = entries.index_select(dim, places // covers)
        return entries

    scale = slices[SCALE]
    if scale.dtype == torch.float8_e8m0fnu or layout.scales.itemsize == 1:
        scale = scale.view(torch.uint8)
    slices = {**slices, SCALE: scale}
    scales = over(SCALE)
    if layout.scales.itemsize == 1:
        found["scales"] = scales.view(layout.scales)
    else:
        exact = numbers_of(scales, is_fp4=False) * factor
        found["scales"] = exact.to(layout.scales)
    if form.has_zeros:
        found["zeros"] = (over(ZERO) + stored.format.zero_offset).to(torch.uint8)
    if form.has_outer:
        outer = torch.full((), factor, device=numbers.device)
        if OUTER in slices:
            given = slices[OUTER].to(torch.float32).reshape(())
            outer = outer / given if stored.format.is_divided else outer * given
        found["outer"] = outer.expand(rows.stop - rows.start, 1)
    return found


def fill_quantised(
    stored: StoredWeight,
    places: Mapping[str, Tensor],
    region: Region,
    layout: Layout,
    dtype: torch.dtype,
    factor: float,
    read: Read,
) -> None:
    """Fill places in a quantised weight with a region of a stored one, piece by piece; raises as
    `StoredWeight.values`.

    Args:
        stored: the weight.
        places: in the weight's tensors by name, each as for `StoredWeight.fill`, `outer` with one
            column.
        region: as for `repacked`, but of any number of experts.
        layout: of the quantised weight.
        dtype: of the model, which can hold all numbers.
        factor: by which the model multiplies the weight.
        read: as for `StoredWeight.fill`.
    """
    form = layout.form
    for part, (expert, rows, columns) in stored.pieces(region, form.inputs or BLOCK):
        slices = {role: read(role, cut) for role, cut in stored.cut(part).items()}
        stored.checked(slices, part, dtype)
        for name, values in repacked(stored, slices, part, layout, factor).items():
            of_rows, covers = 1, form.inputs
            if name == "codes":
                covers = 8 // form.bits
            elif name == "outer":
                covers = 0
            else:
                of_rows = form.rows
            height = slice(rows.start // of_rows, -(-rows.stop // of_rows))
            width = slice(0, 1)
            if covers:
                width = slice(columns.start // covers, -(-columns.stop // covers))
            put(places[name], (expert, height, width), values, len(region) == 3)


def can_quantise(into: QuantisedWeight) -> bool:
    """Whether `quantise` takes a weight."""
    is_plain = into.form.numbers == "FP8" and not into.form.has_outer
    return is_plain and into.scales.dtype == torch.float32


def quantise(values: Tensor, into: QuantisedWeight) -> None:
    """Round a weight to FP8 in a quantised weight's memory: the largest of the numbers that a scale
    covers becomes 448. Nothing waits for the device.

    Args:
        values: `[n, k]` or `[experts, n, k]`, on its device.
        into: FP8, without `outer`, its scales float32.

    Raises:
        ValueError: another form.
    """
    form = into.form
    if not can_quantise(into):
        raise ValueError(f"weights are not rounded to {form.words}")
    tensors = [values, into.codes, into.scales]
    if values.size(-2) % form.rows == 0:
        tensors = [each.flatten(0, -2)[None] for each in tensors]  # blocks of all experts
    *_, n, k = tensors[0].shape
    step, inputs = max(PART // k // BLOCK, 1) * BLOCK, form.inputs or k
    each = (tensor.view(-1, *tensor.shape[-2:]) for tensor in tensors)
    for given, codes, scales in zip(*each, strict=True):
        for first in range(0, n, step):
            rows = given[first : first + step].float()
            padded = torch.nn.functional.pad(rows, (0, -k % inputs, 0, -len(rows) % form.rows))
            blocks = padded.view(len(padded) // form.rows, form.rows, -1, inputs)
            scale = blocks.abs().amax((1, 3)).clamp(min=LEAST_MAXIMUM) / E4M3_MAX
            at = first // form.rows
            scales[at : at + len(scale)] = scale
            exact = (blocks / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
            rounded = exact.view(padded.shape)[: len(rows), :k].to(E4M3)
            codes[first : first + len(rows)] = rounded


PART = 1 << 24
"""Numbers that are rounded at once: 64 MiB of float32, and a few times as much on the way."""
