"""Quantised weights of a Hugging Face folder: which tensors belong together, and their values.

The tensors of a layer `P` (`P.weight` and `P.weight_scale`, say) become one weight, `P.weight` of
outputs and inputs, which the table of names knows. It is decoded on the device that it goes to,
slice by slice, so each rank reads its part and no copy in float32 exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.checkpoints.cache_scales import ENDS
from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.quantization_config import REMEDY, Recipe
from megatron_async.checkpoints.safetensors_file import StoredTensor
from megatron_async.checkpoints.weight import Region
from megatron_async.ops.linear.quantised_layout import Layout, fill_quantised
from megatron_async.ops.linear.stored_formats import (
    CODES,
    FORMATS,
    SCALE,
    SIZES,
    ZERO,
    format_of,
)
from megatron_async.ops.linear.stored_weight import StoredWeight, StoredWeightError

WEIGHT = ".weight"
INPUTS, KEYS = "quantised inputs of layers", "quantised keys and values"
SCALES_OF = dict.fromkeys((*ENDS, ".q_scale"), KEYS) | dict.fromkeys(
    (".input_scale", ".activation_scale", ".input_global_scale"), INPUTS
)
"""Ends of names of scales by which other things than weights are quantised."""
NOT_SERVED = {
    INPUTS: "rounded where FP8 is multiplied by FP8, by scales of their own; else, and of experts, "
    "not",
    KEYS: "served in the model's dtype",
}
INPUT_REMEDY = "use quantization='none', by which inputs are not rounded"

Read = Callable[[str, Region], Tensor]
"""Reads a region of the tensor of a stored name to the device."""


class FolderWeight(NamedTuple):
    """A weight of a folder.

    Attributes:
        name: as if it were not quantised.
        weight: its format and shapes.
        where: its file.
        tensors: the stored names of its tensors, by what they are to it.
        stored_bytes: of all of them.
        scale_dtype: of its scales.
        input_scale: stored name of the scale by which its inputs are rounded; None: they have
            scales of their own, or are not rounded.
    """

    name: str
    weight: StoredWeight
    where: str
    tensors: dict[str, str]
    stored_bytes: int
    scale_dtype: torch.dtype
    input_scale: str | None = None

    def fill(self, place: Tensor, region: Region, read: Read) -> None:
        """Values of a region into its place in a parameter, as `StoredWeight.fill`, whose errors
        become a `CheckpointError` that names file and tensor."""
        with self._naming():
            self.weight.fill(place, region, lambda role, part: read(self.tensors[role], part))

    def fill_quantised(
        self,
        places: Mapping[str, Tensor],
        region: Region,
        layout: Layout,
        dtype: torch.dtype,
        factor: float,
        read: Read,
    ) -> None:
        """A region into its places in a quantised weight, as `quantised_layout.fill_quantised`;
        raises as `fill`."""
        with self._naming():
            fill_quantised(
                self.weight, places, region, layout, dtype, factor,
                lambda role, part: read(self.tensors[role], part),
            )  # fmt: skip

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except StoredWeightError as error:
            name = self.tensors[error.role]
            raise CheckpointError(f"{self.where}: tensor {name!r} {error}; or {REMEDY}") from error


@dataclass(frozen=True)
class QuantisedFolder:
    """What a folder holds of quantised weights.

    Attributes:
        method: of `quantization_config`.
        formats: and how many weights of each there are, in words; empty: none.
        bits: of a quantised weight with its scales, on average.
        stored_bytes: of all weights of the language model in the files.
        not_served: what of the recipe is not, and what is done instead, in words.
        cache: what it says of keys and values in fp8, in words; empty: nothing.
    """

    method: str
    formats: str
    bits: float
    stored_bytes: int
    not_served: tuple[str, ...]
    cache: str = ""

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        weights: Mapping[str, FolderWeight],
        told: Mapping[str, Mapping[str, str]],
        plain_bytes: int,
    ) -> QuantisedFolder:
        """Told of its weights; `told` are scales of other things (`take_quantised`)."""
        counts = Counter(weight.weight.words for weight in weights.values())
        formats = ", ".join(f"{words}: {count} weights" for words, count in counts.items())
        stored = sum(weight.stored_bytes for weight in weights.values())
        values = sum(prod(weight.weight.shape) for weight in weights.values())
        not_served, cache = [], ""
        for what, how in ((INPUTS, recipe.activations), (KEYS, recipe.kv_cache)):
            said = f"{how or 'not described'}, {len(told[what]) or 'no'} scales in the files"
            if what == KEYS and recipe.has_fp8_cache:
                cache = said
            elif told[what] or (how and (weights or what == KEYS)):
                done = NOT_SERVED[what]
                if what == INPUTS and any(weight.input_scale for weight in weights.values()):
                    done = done.replace("scales of their own", "these scales")
                not_served.append(f"{what} ({said}): {done}")
        stored_names = (weight.tensors[CODES] for weight in weights.values())
        ignored = [name for name in stored_names if recipe.ignores(name)]
        if ignored:
            not_served.append(
                f"layers listed as not quantised, which the files hold quantised ({len(ignored)}, "
                f"such as {min(ignored)!r:.200}): read as the files hold them"
            )
        bits = 8 * stored / values if values else 0.0
        size = stored + plain_bytes
        return cls(recipe.method, formats, bits, size, tuple(not_served), cache)


def take_quantised(
    names: dict[str, str], tensor: Callable[[str], StoredTensor], recipe: Recipe
) -> tuple[dict[str, FolderWeight], dict[str, dict[str, str]]]:
    """Take quantised weights out of a folder's tensors.

    Args:
        names: the name in a folder of the language model alone -> the stored name. Names of
            quantised weights take the place of their tensors' (`P.weight`, of the codes).
        tensor: a stored tensor by its stored name.
        recipe: of the folder.

    Returns:
        the weights by name, and scales that belong to no weight, by what they are of: each name
        -> the stored one.

    Raises:
        CheckpointError: a tensor of a weight is missing, too many, or of another dtype or shape.
    """
    parts = [p for f in FORMATS if recipe.method in f.methods for p in f.parts.values()]
    known = {WEIGHT, *SCALES_OF, *(end for part in parts for end in part.ends)}
    ends = sorted(known, key=len, reverse=True)
    codes = {dtype for part in parts if WEIGHT in part.ends for dtype in part.dtypes}
    told: dict[str, dict[str, str]] = {what: {} for what in (INPUTS, KEYS)}
    layers = dict[str, dict[str, StoredTensor]]()
    for name in list(names):
        end = next((end for end in ends if name.endswith(end)), "")
        if end in SCALES_OF:
            told[SCALES_OF[end]][name] = names.pop(name)
        elif end:
            layers.setdefault(name.removesuffix(end), {})[end] = tensor(names[name])
    found = {}
    for layer, stored in layers.items():
        if stored.keys() == {WEIGHT} and stored[WEIGHT].torch_dtype not in codes:
            continue  # not quantised
        weight = _weight(layer, stored, recipe)
        for end in stored:
            names.pop(layer + end)
        names[weight.name] = weight.tensors[CODES]
        found[weight.name] = weight
    for name, scale in told[INPUTS].items() if recipe.activations != "dynamic" else ():
        owner = found.get(name.rpartition(".")[0] + WEIGHT)
        if owner is not None and owner.weight.format.name == "FP8":
            found[owner.name] = owner._replace(input_scale=scale)
    return found, told


def _weight(layer: str, stored: dict[str, StoredTensor], recipe: Recipe) -> FolderWeight:
    where = str(next(iter(stored.values())).file.path)
    try:
        form, ends = format_of({end: t.torch_dtype for end, t in stored.items()}, recipe.method)
        if recipe.has_zeros and form.zero and ZERO not in ends:
            raise ValueError("there are no zeros, which symmetric = false asks for")
        tensors = {role: stored[end] for role, end in ends.items()}
        told = None
        if sizes := tensors.get(SIZES):
            told = tuple(map(int, sizes.read())) if sizes.shape == (2,) else ()
        shapes = {role: tensor.shape for role, tensor in tensors.items() if role != SIZES}
        weight = StoredWeight.of(form, shapes, recipe.grains, told)
    except ValueError as error:
        raise CheckpointError(f"{where}: tensors of {layer!r:.200}: {error}; {REMEDY}") from error
    name = layer if ends[CODES] == "_blocks" else layer + WEIGHT
    size = sum(tensor.num_bytes for tensor in stored.values())
    by_role = {role: tensor.name for role, tensor in tensors.items()}
    return FolderWeight(name, weight, where, by_role, size, tensors[SCALE].torch_dtype)
