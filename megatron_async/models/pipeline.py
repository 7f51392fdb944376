"""Pipeline stages of a model: which layers each holds, and under which names.

Two fields of a model's configuration (`ModelConfig`) describe a stage: the pattern of all layers,
with "|" between stages as in Megatron-Core, and the number of the stage. Inside a stage Megatron
counts layers from 0; "global" names below are those of the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ModelArchitecture

if TYPE_CHECKING:
    from megatron_async.models.parallel_state import ParallelSizes

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
LAYER_LAUNCH_BYTES = 64 << 20
"""Bytes that memory could deliver while the kernels of a layer of the pattern start and end: some
15 microseconds of an H200. With this cost, attention and MLP of an 8B model take 0.13 of a
millisecond (0.15 measured), SmolLM2's 0.03 (0.027)."""
OUTPUT_LAUNCH_BYTES = 64 << 20
"""`LAYER_LAUNCH_BYTES` for the output layer and sampling."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def split_pattern(
    pattern: str,
    stages: int,
    output_cost: float = 0.0,
    layer_costs: Mapping[str, float] | None = None,
) -> str:
    """Put stage boundaries into a layer pattern, so that the slowest stage is as fast as possible.

    Stages consist of units. A unit is a layer with the MLP or MoE layers after it, or the layers
    that the pattern begins with. Among splits whose slowest stage is equally fast, the most even
    one is taken, and among these the one with more in the first stages. (Megatron-Core needs a
    number of layers that divides evenly, or the user's choice.)

    Args:
        pattern: of the whole model, such as "*-*-*-" or "MEM*-".
        stages: number of stages.
        output_cost: cost of the output layer, which is part of the last stage.
        layer_costs: cost of a layer by its kind; None: every unit costs 1.

    Returns:
        the pattern with "|" between stages, such as "*-*-|*-".

    Raises:
        ConfigurationError: there are more stages than units.
    """
    units = re.findall(r"^[E-]+|[^E-][E-]*", pattern)
    if stages > len(units):
        raise ConfigurationError(
            f"pipeline_model_parallel_size={stages}, but this model has {len(units)} layers, and "
            f"a stage needs one: use at most {len(units)}."
        )
    if stages == 1:
        return pattern
    costs = [
        1.0 if layer_costs is None else sum(layer_costs[kind] for kind in unit) for unit in units
    ]
    ends = _even_ends(costs, stages, output_cost)
    starts = [0, *ends[:-1]]
    return "|".join("".join(units[a:b]) for a, b in zip(starts, ends, strict=True))


def _even_ends(costs: Sequence[float], stages: int, last_cost: float) -> tuple[int, ...]:
    """Where stages end: of all ways to cut the units' costs, that with the smallest largest stage
    (the last one's cost is larger by `last_cost`), then the smallest sum of squares, then the
    latest ends."""
    sums = [0.0, *accumulate(costs)]
    total = len(costs)
    # Best way to cut all from a unit on into so many stages: (largest, squares, minus the ends).
    best: list[tuple[float, float, tuple[int, ...]] | None]
    best = [(c := sums[-1] - before + last_cost, c * c, (-total,)) for before in sums[:-1]]
    for left in range(2, stages + 1):
        cuts = list(best)
        for first in range(total):
            ways = []
            for end in range(first + 1, total - left + 2):
                behind, cost = cuts[end], sums[end] - sums[first]
                if behind is not None:
                    # Rounded, because sums of equal costs differ with their order.
                    largest = round(max(cost, behind[0]), 6)
                    ways.append((largest, round(cost * cost + behind[1], 6), (-end, *behind[2])))
            best[first] = min(ways) if ways else None
    found = best[0]
    assert found is not None, "there are as many units as stages"
    return tuple(-end for end in found[2])


def layer_costs(
    architecture: ModelArchitecture, dtype: torch.dtype, sizes: ParallelSizes
) -> dict[str, float]:
    """Cost of a layer in a decode step on a GPU, by its kind: bytes, and launches as bytes; in
    units of the pattern's average layer."""
    model = architecture
    costs = {kind: _layer_bytes(model, kind, dtype, sizes) for kind in sorted(set(model.pattern))}
    average = sum(costs[kind] for kind in model.pattern) / len(model.pattern)
    return {kind: cost / average for kind, cost in costs.items()}


def output_cost(architecture: ModelArchitecture, dtype: torch.dtype, sizes: ParallelSizes) -> float:
    """Cost of the output layer in a decode step on a GPU, in the unit of `layer_costs`."""
    model = architecture
    layers = sum(_layer_bytes(model, kind, dtype, sizes) for kind in model.pattern)
    share = dtype.itemsize / sizes.tensor_model_parallel
    output = model.vocab_size * model.hidden_size * share + OUTPUT_LAUNCH_BYTES
    return output / layers * len(model.pattern)


def _layer_bytes(
    model: ModelArchitecture, kind: str, dtype: torch.dtype, sizes: ParallelSizes
) -> float:
    held = model.num_moe_experts // sizes.expert_model_parallel
    share = dtype.itemsize / sizes.tensor_model_parallel
    return model.layer_parameters(kind, held) * share + LAYER_LAUNCH_BYTES


@dataclass(frozen=True)
class Stage:
    """One stage of a model."""

    index: int
    count: int
    """Stages of the model."""
    first_layer: int
    """Global index of its first layer, attention and MLP layers counted."""
    pattern: str
    """Kinds of the stage's layers."""

    @property
    def is_first(self) -> bool:
        """Whether it looks tokens up."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it makes logits and samples."""
        return self.index == self.count - 1

    def local_name(self, name: str) -> str | None:
        """A parameter's name inside the stage, from its global one; None if it is elsewhere."""
        found = _LAYER.match(name)
        if self.count == 1:
            return name
        if found:
            layer = int(found[1]) - self.first_layer
            if not 0 <= layer < len(self.pattern):
                return None
            return f"decoder.layers.{layer}.{name[found.end() :]}"
        is_input = name.startswith("embedding.")
        return name if (self.is_first if is_input else self.is_last) else None

    def global_name(self, name: str) -> str:
        """A parameter's name in the whole model, from that inside the stage; not for the copy of a
        tied embedding."""
        found = _LAYER.match(name)
        if not found:
            return name
        return f"decoder.layers.{int(found[1]) + self.first_layer}.{name[found.end() :]}"


def stage_of(config: Any) -> Stage:
    """The stage that a model's configuration describes; without boundaries, the only one."""
    pattern = getattr(config, "hybrid_layer_pattern", None) or ""
    parts: Sequence[str] = pattern.split("|")
    index = getattr(config, "pipeline_stage", 0)
    return Stage(index, len(parts), sum(map(len, parts[:index])), parts[index])
