"""From a model that Megatron built to one that the engine runs, with the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn

from megatron_async.compat.models.own_layers import SharedWeights, own_layers
from megatron_async.compat.models.reading import parts_of, unwrapped
from megatron_async.compat.models.refusals import check_config, gaps, refuse, strange_facts
from megatron_async.compat.models.serving_config import serving_config
from megatron_async.compat.models.their_modules import their_modules
from megatron_async.models.architecture import ATTENTION, MLP
from megatron_async.models.hybrid_stack import PagedHybridStack
from megatron_async.models.model_config import ModelConfig


@dataclass(frozen=True)
class ServedModel:
    """What the engine runs, and how the user's model is in it."""

    user_model: nn.Module
    """Without wrappers; it is not changed."""
    served: nn.Module
    """What computes the steps. The user's model itself where the engine's loader built it."""
    config: ModelConfig
    """Configuration of `served`."""
    weights: SharedWeights | None
    """What binds the two, and has not yet: `served` has no memory before. None where every
    parameter is the same object."""


def serve_model(model: Any) -> ServedModel:
    """Make a user's model one that the engine can run; its weights are shared (`SharedWeights`).

    Args:
        model: Megatron's `GPTModel` or `HybridModel`, of its local spec or its TransformerEngine
            spec, on the process groups of its `pg_collection`; `DistributedDataParallel` and
            `Float16Module` around it are looked through. On the device that it is served on.

    Raises:
        ConfigurationError: something about it is not served; it is named, with its place.
    """
    found: Any = unwrapped(model)
    if isinstance(found.decoder, PagedHybridStack):
        return ServedModel(found, found, found.config, None)
    check_config(found.config)
    parts = parts_of(found)
    config = serving_config(found.config, model=found)
    reasons = gaps(found.config, found.position_embedding_type)
    if not reasons:
        refuse(strange_facts(found, parts, config))
        served, weights = own_layers(found, parts, config)
        return ServedModel(found, served, config, weights)
    served_by_theirs = len(reasons)
    kinds = {part.kind for part in parts}
    others = sorted(kinds - {ATTENTION, MLP})
    if not isinstance(found, GPTModel):
        reasons.append("a layer pattern beside that (only a GPTModel is served so)")
    if others:
        reasons.append(f"layers of other kinds beside that ({', '.join(others)})")
    if found.config.pipeline_model_parallel_size > 1:
        reasons.append("pipeline stages beside that")
    if found.config.sequence_parallel and found.config.tensor_model_parallel_size > 1:
        reasons.append("sequence_parallel=True beside that")
    if len(reasons) > served_by_theirs:
        refuse(reasons)
    return ServedModel(found, their_modules(found, config), config, None)
