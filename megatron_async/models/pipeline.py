"""Pipeline stages of a model: which layers each holds, and under which names.

A stage is told by two fields of its model's configuration (`ModelConfig`): the pattern of all
layers, with "|" between stages as Megatron-Core writes it, and the number of the stage. Inside a
stage Megatron counts layers from 0; "global" names below are those of the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_async.errors import ConfigurationError

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def split_pattern(pattern: str, stages: int) -> str:
    """Put stage boundaries into a layer pattern.

    Units are split as evenly as possible, a unit being a layer with the MLP or MoE layers behind
    it. Where they do not divide, the first stages get one more: the last one has the output layer
    besides. (Megatron-Core asks that they divide.)

    Args:
        pattern: of the whole model, such as "*-*-*-".
        stages: number of stages.

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
    least, more = divmod(len(units), stages)
    parts, start = [], 0
    for stage in range(stages):
        end = start + least + (stage < more)
        parts.append("".join(units[start:end]))
        start = end
    return "|".join(parts)


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
