"""A context that has room for a model which was not known when the context was made.

Megatron makes the context first and the wrapper with the model afterwards, and its configuration
does not tell a `HybridModel`'s layers. Which of them have keys and values, and which a recurrent
state, decides what a context allocates; so it may have to allocate again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ATTENTION, RECURRENT
from megatron_async.models.model_config import ModelConfig

if TYPE_CHECKING:
    from megatron_async.contexts.dynamic_context import DynamicInferenceContext

OURS = "megatron_async."


def has_room(context: DynamicInferenceContext, config: ModelConfig) -> bool:
    """Whether a context was made for just the layers of a model.

    Args:
        context: from any configuration.
        config: that the model is served with.
    """
    wanted, known = config.hybrid_layer_pattern, context.model_config
    told = getattr(known, "hybrid_layer_pattern", None)
    if told is not None or wanted is None:
        return bool(told == wanted)
    # Keys and values for each layer that Megatron counts, on one stage, and no states.
    simple = "|" not in wanted and not any(kind in wanted for kind in RECURRENT)
    return bool(simple and wanted.count(ATTENTION) == known.num_layers)


def make_again(context: DynamicInferenceContext, config: ModelConfig) -> None:
    """Make a context, in its place, for another configuration, with the settings that it has.

    Its memory is given back first. Nobody may have used it: what others hold of it (its slots, its
    view) is of the old one.

    Args:
        context: unused as yet.
        config: that the model is served with.

    Raises:
        ConfigurationError: the context has had requests or steps.
        OutOfMemoryError: what the model needs does not fit.
    """
    if context.has_unfinished_requests() or context.next_step:
        raise ConfigurationError(
            "the context was made for other layers than the model has, and has been used: make a "
            "context for each model, from its own configuration."
        )
    settings = _given_settings(context)
    device, timeline = context.device, context.tracer.timeline
    context.gpu_view.kv_cache.release()
    context.gpu_view.states.release()
    device.trim()
    type(context).__init__(context, config, settings, device, timeline)


def _given_settings(context: DynamicInferenceContext) -> Any:
    """What a context was made with. That of `compat` keeps Megatron's configuration, which says
    more than what became of it, and defaults where it was given the engine's own form."""
    given: Any = getattr(context, "megatron_config", None)
    if given is None or (type(given).__module__.startswith(OURS) and given == type(given)()):
        return context.config
    return given
