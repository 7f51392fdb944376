"""`dummy:SHAPE`: a model of a shape, well-known or given by hand, with random weights, to measure
speed with.

`dummy:SHAPE:uniform` is one whose routers spread tokens over experts as those of a trained model
do. Random weights alone do not: what layers add to the residual stream is in part the same for
all tokens, more so with every layer, and in wide models it soon outweighs the embedding. (Nemotron
3 Nano with experts of 32 units, 64 decode rows, on a CPU: layers hit 77 to 93 % of the experts that
even routing hits, and some experts get 4 to 10 times their share; with ":uniform" 97 to 102 %.) So
there the embedding is larger than what all layers add: then a token's experts follow from the
token, anew in each layer. Nothing else differs, and each product is as it was.
"""

from __future__ import annotations

from typing import override

import torch
from torch import nn

from megatron_async.checkpoints.mapping import Shard, weights
from megatron_async.checkpoints.model_names import dummy_shape
from megatron_async.checkpoints.source import (
    ModelSource,
    clear_padding,
    model_parameters,
)
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.pipeline import EMBEDDING

UNIFORM_EMBEDDING = 4096.0
"""How much larger embeddings are then: standard deviation 82. What 52 layers of Nemotron 3 Nano add
has 12 (estimated from the weights' sizes), so no more than 2 % of the residual stream's variance
may be shared by tokens. A power of two, so that no number is rounded."""


class DummySource(ModelSource):
    """A shape of `DUMMY_SHAPES`, or one by hand (`models/shapes_by_hand.py`); it has no tokenizer,
    so it takes prompts of token ids.

    Args:
        name: "dummy:SHAPE" or "dummy:FAMILY:SIZES", either with ":uniform" behind. (With tied
            embeddings, "uniform" makes the logits larger too: for greedy tokens alone.)

    Raises:
        CheckpointError: no such shape, or sizes that are no model's; or there are no experts over
            which to spread tokens.
    """

    format = "dummy"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._architecture, self._is_uniform = dummy_shape(name)

    @property
    @override
    def architecture(self) -> ModelArchitecture:
        return self._architecture

    @property
    def tokenizer(self) -> None:
        """None: random weights have no language."""

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16, in which models of these shapes are published."""
        return torch.bfloat16

    @property
    def has_mtp_weights(self) -> bool:
        """Whether any weight of multi-token prediction is stored."""
        return self.architecture.mtp_num_depths > 0

    def load_weights(self, model: nn.Module, progress: bool = False) -> None:
        """Random weights, the same for the same device, rounded to the dtype, however many ranks
        share them.

        Every rank draws each weight that it has a part of whole, one at a time, and keeps its part.
        """
        # Imports Megatron, which takes seconds and is not needed to describe a shape.
        from megatron_async.models.hybrid import fill_dummy_weight

        zero_centered = self.architecture.layernorm_zero_centered_gamma
        held = list(weights(self.architecture, Shard.of(model)))
        parameters = model_parameters(model, held)
        for weight in held:
            parameter = parameters[weight.name]
            if weight.shape == weight.whole_shape:
                fill_dummy_weight(weight.stored, parameter, zero_centered=zero_centered)
                continue
            whole = parameter.new_empty(weight.whole_shape)
            fill_dummy_weight(weight.stored, whole, zero_centered=zero_centered)
            clear_padding(weight, parameter)
            for start, place in weight.whole_pieces(parameter):
                region = (slice(s, s + n) for s, n in zip(start, place.shape, strict=True))
                place.copy_(whole[tuple(region)])
        if not self._is_uniform:
            return
        for weight in held:
            if weight.stored == EMBEDDING:
                parameters[weight.name].mul_(UNIFORM_EMBEDDING)
