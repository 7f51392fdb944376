"""Weights that have no parameter of the model's dtype: `packed_weight` is all that there is.

The parameter is on the meta device then, so that names and shapes are as ever, and a reader of its
numbers fails.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_async.errors import UpdateError
from megatron_async.models.embedding import InferenceEmbedding
from megatron_async.models.linear import (
    InferenceColumnParallelLinear,
    InferenceRowParallelLinear,
)
from megatron_async.models.moe_experts import StackedLinear
from megatron_async.ops.linear.cpu.grouped_weight import GroupedWeight


def may_be_kept(model: Any, module: nn.Module) -> bool:
    """Whether a module of a model multiplies by a `packed_weight`, or is the model's embedding."""
    kinds = InferenceColumnParallelLinear | InferenceRowParallelLinear | StackedLinear
    is_linear = isinstance(module, kinds)
    embedding = getattr(model, "embedding", None)
    return is_linear or (
        isinstance(embedding, InferenceEmbedding) and module is embedding.word_embeddings
    )


def keep_weight(model: Any, module: Any, kept: GroupedWeight) -> None:
    """Let a module that `may_be_kept` have a weight alone in its kept form; a tied output layer has
    the embedding's."""
    nowhere = torch.empty_like(module.weight, device="meta")
    module.weight = nn.Parameter(nowhere, requires_grad=False)
    embedding = getattr(model, "embedding", None)
    if embedding is None or module is not embedding.word_embeddings:
        module.packed_weight = kept
        return
    embedding.packed_weight = kept
    if model.share_embeddings_and_output_weights:
        model.output_layer.packed_weight = kept


def check_has_numbers(model: nn.Module) -> None:
    """Raise `UpdateError` where a weight of a model that runs has no parameter with numbers, which
    could be written or summed."""
    found = [parameter.is_meta for parameter in model.parameters()]
    if any(found) and not all(found):
        raise UpdateError(
            "weights are kept as the blocks of their GGUF file, which take no other numbers and "
            "have no checksum: start the engine with quantization='none'."
        )
