"""`RecurrentMixer`: the common base of mixers of recurrent layers."""

from __future__ import annotations

from megatron.core.transformer.module import MegatronModule
from torch import nn


class RecurrentMixer(MegatronModule):
    """A module whose convolution and recurrence `ContextGPUView.recurrent` computes.

    Attributes:
        state_layer_index: this module's layer in the state pool; see `stamp_state_layers`.
    """

    state_layer_index: int = -1


def stamp_state_layers(model: nn.Module) -> int:
    """Number the recurrent mixers of `model` in execution order; return how many there are."""
    mixers = [module for module in model.modules() if isinstance(module, RecurrentMixer)]
    for index, mixer in enumerate(mixers):
        mixer.state_layer_index = index
    return len(mixers)
