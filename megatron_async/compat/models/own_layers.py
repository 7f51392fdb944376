"""A user's model in the engine's own layers: the same kernels as a model that the engine loaded.

A `HybridModel` of the engine's layer spec is laid out on the meta device, which takes no memory,
and its parameters become the user's (`shared_weights.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import nn

from megatron_async.compat.models.reading import Part
from megatron_async.compat.models.shared_weights import SharedWeights
from megatron_async.errors import ConfigurationError
from megatron_async.models.embedding import shard_vocabulary
from megatron_async.models.hybrid import hybrid_stack_spec
from megatron_async.models.model_config import ModelConfig
from megatron_async.models.pipeline import stage_of
from megatron_async.models.positions import AppliedInAttention, rotary_of


def own_layers(
    model: Any, parts: Sequence[Part], config: ModelConfig
) -> tuple[nn.Module, SharedWeights]:
    """The served model, on the meta device, and what binds its weights to the user's.

    Args:
        model: the user's, which is not changed.
        parts: its layers.
        config: from `serving_config`.

    Raises:
        ConfigurationError: the layers are not those that the configuration tells, or their weights
            are not.
    """
    stage, found = stage_of(config), "".join(part.kind for part in parts)
    if found != stage.pattern:
        raise ConfigurationError(
            f"the model's layers are {found!r}, where its configuration says {stage.pattern!r} "
            f"(pipeline stage {stage.index} of {stage.count}): moe_layer_freq, "
            "linear_attention_freq or the layer pattern is another than the model was built with."
        )
    with torch.device("meta"):
        served = HybridModel(
            config=config,
            hybrid_stack_spec=hybrid_stack_spec(config),
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_sequence_length,
            hybrid_layer_pattern=config.hybrid_layer_pattern,
            pre_process=stage.is_first,
            post_process=stage.is_last,
            parallel_output=False,
            share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
            position_embedding_type="none",
            pg_collection=model.pg_collection,
        )
    shard_vocabulary(served, model.vocab_size)
    served.mtp = None
    served.to(dtype=config.params_dtype)
    for module in served.modules():
        for name in getattr(module, "float32_parameters", ()):
            kept = getattr(module, name)
            if kept is not None:
                kept.data = kept.data.float()
    weights = SharedWeights(model, parts, served)
    # What `take_over_positions` asks: the angles are the user's, whoever applies them.
    served.position_embedding_type = model.position_embedding_type
    rotary = rotary_of(model)
    if rotary is not None:
        served.rotary_pos_emb = AppliedInAttention(rotary)
    return served.eval(), weights
