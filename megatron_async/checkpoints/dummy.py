"""`dummy:SHAPE`: a model of a well-known shape with random weights, to measure speed with."""

from __future__ import annotations

import torch
from torch import nn

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.mapping import Shard, weights
from megatron_async.checkpoints.source import (
    ModelSource,
    clear_padding,
    model_parameters,
)
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES

PREFIX = "dummy:"


class DummySource(ModelSource):
    """A shape of `DUMMY_SHAPES`; it has no tokenizer, so it takes prompts of token ids."""

    format = "dummy"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        shape = name.removeprefix(PREFIX)
        if shape not in DUMMY_SHAPES:
            raise CheckpointError(
                f"{name}: unknown shape {shape!r}; known: {', '.join(sorted(DUMMY_SHAPES))}"
            )
        self._architecture = DUMMY_SHAPES[shape]

    @property
    def architecture(self) -> ModelArchitecture:
        """See `ModelSource.architecture`."""
        return self._architecture

    @property
    def tokenizer(self) -> None:
        """None: random weights have no language."""

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16, in which models of these shapes are published."""
        return torch.bfloat16

    def load_weights(self, model: nn.Module, progress: bool = False) -> None:
        """Random weights, the same for the same dtype and device, however many ranks share them.

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
