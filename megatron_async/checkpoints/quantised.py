"""Quantised weights of a Hugging Face folder: which tensors belong together, and their values.

The tensors of a layer `P` (`P.weight` and `P.weight_scale`, say) become one weight, `P.weight` of
outputs and inputs, which the table of names knows. It is decoded on the device that it goes to,
slice by slice, so each rank reads its part and no copy in float32 exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.quantization_config import REMEDY, Recipe
from megatron_async.checkpoints.safetensors_file import StoredTensor
from megatron_async.checkpoints.weight import Region, Shape
from megatron_async.ops.linear.stored_weight import (
    CODES,
    FORMATS,
    SIZES,
    StoredFormat,
    StoredWeight,
    StoredWeightError,
    grain_words,
)

WEIGHT = ".weight"
KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale")
INPUT_SCALES = (".input_scale", ".activation_scale", ".input_global_scale")
"""Ends of names of scales that keys and values, and inputs of layers, are quantised by."""

INPUTS, KEYS = "quantised inputs of layers", "quantised keys and values"
NOT_SERVED = "served in 16 bits (in float32 on a CPU) by this version"

Read = Callable[[str, Region], Tensor]
"""Reads a region of the tensor of a stored name to the device."""


class QuantisedWeight(NamedTuple):
    """A weight of a folder.

    Attributes:
        name: as if it were not quantised.
        weight: its format and shapes.
        where: its file.
        tensors: the stored names of its tensors, by what they are to it.
        stored_bytes: of all of them.
    """

    name: str
    weight: StoredWeight
    where: str
    tensors: dict[str, str]
    stored_bytes: int

    def fill(self, place: Tensor, region: Region, read: Read) -> None:
        """Values of a region into its place in a parameter (`StoredWeight.fill`).

        Raises:
            CheckpointError: a scale or a value is no number, or inputs are out of order.
        """
        try:
            self.weight.fill(place, region, lambda role, part: read(self.tensors[role], part))
        except StoredWeightError as error:
            name = self.tensors[error.role]
            raise CheckpointError(f"{self.where}: tensor {name!r} {error}; {REMEDY}") from error


@dataclass(frozen=True)
class QuantisedFolder:
    """What a folder holds of quantised weights.

    Attributes:
        method: of `quantization_config`.
        formats: how many weights there are of each format, by its words.
        bits: of a quantised weight with its scales, on average.
        stored_bytes: of all weights of the language model in the files.
        not_served: what of the recipe is not, in words.
    """

    method: str
    formats: dict[str, int]
    bits: float
    stored_bytes: int
    not_served: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        weights: Mapping[str, QuantisedWeight],
        told: Counter[str],
        plain_bytes: int,
    ) -> QuantisedFolder:
        """Told of its weights; `told` counts scales of other things (`take_quantised`)."""
        formats = Counter(_words(weight.weight) for weight in weights.values())
        stored = sum(weight.stored_bytes for weight in weights.values())
        values = sum(prod(weight.weight.shape) for weight in weights.values())
        not_served = []
        for what, how in ((INPUTS, recipe.activations), (KEYS, recipe.kv_cache)):
            if told[what] or (how and (weights or what == KEYS)):
                scales = f"{told[what]} scales in the files" if told[what] else "no scales"
                not_served.append(f"{what} ({how or 'not described'}, {scales})")
        bits = 8 * stored / values if values else 0.0
        return cls(recipe.method, dict(formats), bits, stored + plain_bytes, not_served)

    @property
    def words(self) -> str:
        """The formats, in words."""
        return ", ".join(f"{name}: {n} weights" for name, n in self.formats.items()) or "none"


def _words(weight: StoredWeight) -> str:
    scales = f", scales: {grain_words(weight.grain)}" if weight.format.takes_grain else ""
    return weight.format.name + scales


def take_quantised(
    names: dict[str, str], tensor: Callable[[str], StoredTensor], recipe: Recipe
) -> tuple[dict[str, QuantisedWeight], Counter[str]]:
    """Take quantised weights out of a folder's tensors.

    Args:
        names: the name in a folder of the language model alone -> the stored name. Names of
            quantised weights take the place of their tensors' (`P.weight`, of the codes).
        tensor: a stored tensor by its stored name.
        recipe: of the folder.

    Returns:
        the weights by name, and how many scales there are that belong to no weight.

    Raises:
        CheckpointError: a tensor of a weight is missing, too many, or of another dtype or shape.
    """
    formats = [each for each in FORMATS if recipe.method in each.methods]
    parts = {end for each in formats for part in each.parts.values() for end in part.ends}
    ends = sorted(parts | {WEIGHT}, key=len, reverse=True)
    told, layers = Counter[str](), dict[str, dict[str, StoredTensor]]()
    for name in list(names):
        for what, others in ((KEYS, KV_SCALES), (INPUTS, INPUT_SCALES)):
            if name.endswith(others):
                told[what] += 1
                del names[name]
                break
        else:
            end = next((end for end in ends if name.endswith(end)), None)
            if end is not None:
                layers.setdefault(name.removesuffix(end), {})[end] = tensor(names[name])
    codes = {(end, dtype) for each in formats for end, dtype in _codes(each)}
    found = {}
    for layer, stored in layers.items():
        plain = stored.get(WEIGHT)
        if plain and len(stored) == 1 and (WEIGHT, plain.torch_dtype) not in codes:
            continue
        weight = _weight(layer, stored, formats, recipe)
        for end in stored:
            names.pop(layer + end)
        names[weight.name] = weight.tensors[CODES]
        found[weight.name] = weight
    return found, told


def _told_shape(sizes: StoredTensor) -> Shape:
    """The shape of a weight that a tensor tells."""
    if sizes.shape != (2,):
        raise ValueError(f"{sizes.name!r} of shape {list(sizes.shape)} is no shape of a matrix")
    return tuple(map(int, sizes.read()))


def _codes(each: StoredFormat) -> list[tuple[str, torch.dtype]]:
    part = each.parts[CODES]
    return [(end, dtype) for end in part.ends for dtype in part.dtypes]


def _weight(
    layer: str, stored: dict[str, StoredTensor], formats: list[StoredFormat], recipe: Recipe
) -> QuantisedWeight:
    where = next(iter(stored.values())).file.path
    for each in formats:
        roles = {
            role: stored[end]
            for role, part in each.parts.items()
            for end in part.ends
            if end in stored and stored[end].torch_dtype in part.dtypes
        }
        is_whole = roles.keys() >= each.parts.keys() - {*each.optional}
        if not is_whole or len(roles) != len(stored):
            continue
        shapes = {role: tensor.shape for role, tensor in roles.items() if role != SIZES}
        try:
            told = None
            if SIZES in roles:
                told = _told_shape(roles[SIZES])
            weight = StoredWeight.of(each, shapes, recipe.grains, told)
        except ValueError as error:
            raise CheckpointError(f"{where}: tensors of {layer!r}: {error}; {REMEDY}") from error
        end = "" if roles[CODES].name.endswith("_blocks") else WEIGHT
        tensors = {role: tensor.name for role, tensor in roles.items()}
        size = sum(tensor.num_bytes for tensor in roles.values())
        return QuantisedWeight(layer + end, weight, str(where), tensors, size)
    have = ", ".join(f"{end} ({tensor.dtype})" for end, tensor in sorted(stored.items()))
    wanted = " or ".join(
        ", ".join("/".join(p.ends) for role, p in each.parts.items() if role not in each.optional)
        for each in formats
    )
    raise CheckpointError(
        f"{where}: layer {layer!r} has tensors {have}, which are no whole weight of method "
        f"{recipe.method} (it has {wanted}, of the dtypes of its format): fetch the files again, "
        f"or {REMEDY}"
    )
