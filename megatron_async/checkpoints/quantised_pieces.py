"""Weights of a model that stay quantised: their layouts, by what a folder holds, and the pieces of
each that are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megatron_async.checkpoints.quantised import FolderWeight
from megatron_async.checkpoints.weight import Region, Rows, Weight
from megatron_async.errors import ConfigurationError
from megatron_async.models.held_weight import is_linear
from megatron_async.ops.linear.quantised_layout import Layout, layout_of
from megatron_async.ops.linear.quantised_weight import BLOCK, Form, QuantisedWeight


def folder_layouts(
    held: Iterable[Weight], folder: Mapping[str, FolderWeight]
) -> tuple[dict[str, Layout], list[str]]:
    """Layouts of the weights of a rank that stay as a folder has them.

    Args:
        held: weights of the rank.
        folder: quantised weights by name.

    Returns:
        layouts by parameter, and the parameters that cannot stay: their parts have several forms,
        or some are not quantised.

    Raises:
        ConfigurationError: ranks cut a weight within groups of inputs.
    """
    found, mixed = dict[str, Layout](), list[str]()
    for weight in held:
        parts = [folder.get(part) for part in weight.held_parts]
        if not is_linear(weight.name) or not any(parts):
            continue
        on_grid, layouts = _is_on_grid(weight), set[Layout | None]()
        in_blocks = not _is_of_experts(weight.name)
        for part in parts:
            try:
                given = on_grid, weight.shape[-1], weight.scale, in_blocks
                layouts.add(part and layout_of(part.weight, part.scale_dtype, *given))
            except ValueError as error:
                raise ConfigurationError(
                    f"the rank's part of {weight.name!r} is not kept quantised: {error}. Use "
                    "another tensor_model_parallel_size, or quantization='none'."
                ) from error
        layout = layouts.pop()
        if layouts or layout is None:
            mixed.append(weight.name)
        else:
            is_static = any(part and part.input_scale for part in parts)
            found[weight.name] = layout._replace(has_input_scale=is_static)
    return found, mixed


def fp8_layouts(held: Iterable[Weight]) -> dict[str, Layout]:
    """Layouts of the weights of a rank that are rounded to FP8 when they are read: of linear layers
    a scale for each block of 128 x 128, which products by FP8 rows take as it is for any number of
    rows; one for each output of experts, and where blocks do not fit."""
    found = {}
    for weight in filter(lambda each: is_linear(each.name), held):
        fits = weight.shape[-1] % BLOCK == 0 and _is_on_grid(weight)
        in_blocks = fits and not _is_of_experts(weight.name)
        found[weight.name] = Layout(Form("FP8", BLOCK, BLOCK) if in_blocks else Form("FP8"))
    return found


def rounding(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Layouts by parameter, where GPUs multiply FP8 by FP8: products round rows too, but not
    those of experts."""
    found = {}
    for name, layout in layouts.items():
        form = layout.form
        is_known = form.numbers == "FP8" and form.inputs in (0, BLOCK)
        rounds = is_known and not _is_of_experts(name)
        found[name] = layout._replace(form=form._replace(rounds_rows=rounds))
    return found


def quantised_pieces(
    weight: Weight, into: QuantisedWeight
) -> Iterator[tuple[str, Region, dict[str, Tensor]]]:
    """`Weight.pieces` of all tensors of a quantised weight at once, but for the scale of inputs:
    name, region, and the views of the tensors that it fills, by name; of `outer` with one
    column."""
    grid = on_grid(weight, into.form.rows)
    assert grid is not None, "see _is_on_grid"
    found = {}
    for name, tensor in into.tensors():
        if name == "input_scale":
            continue
        owner = grid if name in ("scales", "zeros") else weight
        found[name] = owner.pieces(tensor[..., None] if name == "outer" else tensor)
    for pieces in zip(*found.values(), strict=True):
        part, region, _ = pieces[0]  # of the codes
        yield part, region, {name: piece[2] for name, piece in zip(found, pieces, strict=True)}


def _is_of_experts(name: str) -> bool:
    """Whether products of a parameter, by its name, widen its numbers, on all GPUs."""
    return "experts." in name


def _is_on_grid(weight: Weight) -> bool:
    return on_grid(weight, BLOCK) is not None


def on_grid(weight: Weight, rows: int) -> Weight | None:
    """The weight with a row for each `rows` of it; None where not all pieces of this rank begin and
    end with such blocks, or with the weight."""
    if rows == 1:
        return weight
    if weight.alternates:
        return None

    def blocks(count: int) -> int:
        return -(-count // rows)

    tall = {name: shape[-2] for name, shape in weight.parts.items()}
    shares = weight.groups if weight.groups > 1 else 1
    if weight.partition_dim == 0 and not weight.strips:
        shares = max(shares, weight.shard.tensor_size)
    if shares > 1 and any(count % (shares * rows) for count in tall.values()):
        return None
    if any(each.first % rows or each.count % rows for each in weight.order):
        return None
    grid = replace(
        weight,
        parts={n: (*shape[:-2], blocks(shape[-2]), shape[-1]) for n, shape in weight.parts.items()},
        strips=tuple(replace(strip, rows=blocks(strip.rows)) for strip in weight.strips),
        order=tuple(Rows(r.part, r.first // rows, blocks(r.count)) for r in weight.order),
    )
    fine, coarse = (
        each.pieces(torch.empty((*each.shape[:-1], 1), device="meta")) for each in (weight, grid)
    )
    for (_, region, place), (_, blocked, coarse_place) in zip(fine, coarse, strict=True):
        (first, last), of_grid = (region[-2].start, region[-2].stop), blocked[-2]
        fits = (of_grid.start * rows, of_grid.stop) == (first, blocks(last))
        fits &= place.storage_offset() == rows * coarse_place.storage_offset()
        if place.dim() > 2 and place.size(0) > 1:
            fits &= place.stride(0) == rows * coarse_place.stride(0)
        if not fits or coarse_place.size(-2) != blocks(place.size(-2)):
            return None
    return grid
