"""What this engine must know of a model that Megatron keeps elsewhere than in its configuration."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.inference.config import MambaInferenceStateConfig


def with_layer_pattern(model_config: Any, states: MambaInferenceStateConfig | None) -> Any:
    """The model's configuration with `hybrid_layer_pattern`, as `megatron_async.models` has it.

    A `HybridModel`'s kinds of layers are in its constructor; Megatron's context reads them from
    `mamba_inference_state_config`.

    Args:
        model_config: the model's `TransformerConfig`; it is not changed.
        states: Megatron's configuration of recurrent states, None for a model without them.

    Returns:
        a shallow copy with the pattern; `model_config` itself where nothing is missing.
    """
    if states is None or getattr(model_config, "hybrid_layer_pattern", None) is not None:
        return model_config
    described = copy.copy(model_config)
    described.hybrid_layer_pattern = "".join(states.layer_type_list)
    return described
