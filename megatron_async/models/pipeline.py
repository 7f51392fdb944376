"""Pipeline stages of a model: which layers each holds, and under which names.

A stage is told by two fields of its model's configuration (`ModelConfig`): the pattern of all
layers, with "|" between stages as Megatron-Core writes it, and the number of the stage. Inside a
stage Megatron counts layers from 0; "global" names below are those of the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
LAYER_LAUNCH_BYTES = 128 << 20
"""What memory could deliver while a layer's kernels start and end: some 30 microseconds of a H200.
With it 8B layers take 0.13 of a millisecond (0.15 measured), SmolLM2's 0.03 (0.027)."""
OUTPUT_LAUNCH_BYTES = 64 << 20
"""The same of the output layer and sampling."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def split_pattern(pattern: str, stages: int, output_cost: float = 0.0) -> str:
    """Put stage boundaries into a layer pattern, so that the slowest stage is as fast as can be.

    Units are split, a unit being a layer with the MLP or MoE layers behind it. The last stage has
    fewer, because it has the output layer besides; the first of the others have one more where they
    do not divide. (Megatron-Core asks that they divide, or that the user says how many.)

    Args:
        pattern: of the whole model, such as "*-*-*-".
        stages: number of stages.
        output_cost: what the output layer takes, in units.

    Returns:
        the pattern with "|" between stages, such as "*-*-|*-".

    Raises:
        ConfigurationError: there are more stages than units.
    """
    units = re.findall(r"[^E-][E-]*", pattern)
    if stages > len(units):
        raise ConfigurationError(
            f"pipeline_model_parallel_size={stages}, but this model has {len(units)} layers, and "
            f"a stage needs one: use at most {len(units)}."
        )
    if stages == 1:
        return pattern
    others = stages - 1

    def slowest(last: int) -> float:
        return max(-(-(len(units) - last) // others), last + output_cost)

    last = min(range(len(units) // stages, 0, -1), key=slowest)
    least, more = divmod(len(units) - last, others)
    sizes = [*(least + (stage < more) for stage in range(others)), last]
    ends = list(accumulate(sizes))
    return "|".join("".join(units[end - size : end]) for size, end in zip(sizes, ends, strict=True))


def output_cost(architecture: ModelArchitecture, dtype: torch.dtype, sizes: ParallelSizes) -> float:
    """What the output layer takes in a decode step on a GPU, in layers: bytes, and launches."""
    model = architecture
    held = model.num_moe_experts // sizes.expert_model_parallel
    layer = model.layer_parameters(held) / model.num_layers
    output = model.vocab_size * model.hidden_size
    share = dtype.itemsize / sizes.tensor_model_parallel
    return (output * share + OUTPUT_LAUNCH_BYTES) / (layer * share + LAYER_LAUNCH_BYTES)


@dataclass(frozen=True)
class Stage:
    """What one stage holds of a model."""

    index: int
    count: int
    """Stages of the model."""
    first_layer: int
    """Global index of its first layer, attention and MLP layers counted."""
    pattern: str
    """Its layers."""

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
