"""From a model that Megatron built to one that the engine runs, with the same weights; and a
context that has room for it.

Megatron makes the context first and the wrapper with the model afterwards. Its configuration does
not tell a `HybridModel`'s layers: which of them have keys and values, and which a recurrent state.
Nor does the context know what the wrapper will copy of the weights, and it has taken most of the
memory. So it may have to allocate again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn

from megatron_async.choices import everywhere
from megatron_async.compat.models.own_layers import SharedWeights, own_layers
from megatron_async.compat.models.refusals import (
    check_config,
    gaps,
    parts_of,
    strange_facts,
    unwrapped,
)
from megatron_async.compat.models.serving_config import serving_config
from megatron_async.compat.models.their_modules import their_modules
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ATTENTION, MLP, RECURRENT
from megatron_async.models.fitness import refuse
from megatron_async.models.hybrid_stack import PagedHybridStack
from megatron_async.models.model_config import ModelConfig
from megatron_async.models.partition import layer_windows

if TYPE_CHECKING:
    from megatron_async.planning.dynamic_context import DynamicInferenceContext


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


OURS = "megatron_async."
FREE_SHARE = 0.5
"""Copies take at most this share of what a context has left free; the rest is for activations."""


def has_room(context: DynamicInferenceContext, config: ModelConfig) -> bool:
    """Whether a context was made for just the layers of a model that is served with this
    configuration."""
    wanted, known = config.hybrid_layer_pattern, context.model_config
    told = getattr(known, "hybrid_layer_pattern", None)
    if _windows(known) != _windows(config):
        return False
    if told is not None or wanted is None:
        return bool(told == wanted)
    # Keys and values for each layer that Megatron counts, on one stage, and no states.
    simple = "|" not in wanted and not any(kind in wanted for kind in RECURRENT)
    return bool(simple and wanted.count(ATTENTION) == known.num_layers)


def _windows(config: Any) -> list[int]:
    return [window for stage in layer_windows(config) for window in stage if window]


def fit_context(
    context: DynamicInferenceContext, config: ModelConfig, weights: SharedWeights | None
) -> None:
    """Bind a served model's weights, and make its context again, in its place and with the settings
    that it has, where it was made for other layers or has left too little memory for copies.

    What others hold of the context (its slots, its view) is of the old one then.

    Raises:
        ConfigurationError: the context is to be made again, and has had requests or steps.
        OutOfMemoryError: what the model needs does not fit.
    """
    device = context.device
    copies = 0 if weights is None else weights.copied_bytes
    # All ranks of the job take the same way, because making a context is collective.
    fitting = ["copies"] if copies <= FREE_SHARE * device.free_memory() else []
    as_it_is = has_room(context, config) and bool(everywhere("room for copied weights", fitting))
    if not as_it_is and (context.has_unfinished_requests() or context.next_step):
        raise ConfigurationError(
            "the context was made for other layers than the model has, or leaves too little memory "
            "for the weights that are copied, and has been used: make a context for each model, "
            "from its own configuration."
        )
    if not as_it_is:
        context.gpu_view.kv_cache.release()
        context.gpu_view.states.release()
        context.gpu_view.pools.release()
        device.trim()
    if weights is not None:
        weights.bind()
    if not as_it_is:
        settings, timeline = _given_settings(context), context.tracer.timeline
        type(context).__init__(context, config, settings, device, timeline)


def _given_settings(context: DynamicInferenceContext) -> Any:
    """The settings of a context. A `compat` context keeps Megatron's configuration, which says
    more than what became of it, and defaults where it was given the engine's own form."""
    given: Any = getattr(context, "megatron_config", None)
    if given is None or (type(given).__module__.startswith(OURS) and given == type(given)()):
        return context.config
    return given
