"""A model of the fuzzer with a layer that sees a window of keys, and a full one."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron_async.device_state.gpu_view import ContextGPUView
from megatron_async.models.hybrid import transformer_config
from tests.support.attention_model import (
    ARCHITECTURE,
    AttentionModel,
    OnlyAttention,
    with_experts,
)

WINDOW = 4


class WindowModel(AttentionModel):
    """`AttentionModel` with a layer of `WINDOW` keys before its own."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        two = replace(ARCHITECTURE, num_layers=2, pattern="", sliding_window=WINDOW)
        two = replace(two, window_attn_skip_freq=(1, 0))
        self.config = with_experts(transformer_config(two, torch.float64))
        generator = torch.Generator().manual_seed(100 + seed)
        # Modules are numbered in their order.
        full, self.attention = self.attention, OnlyAttention(generator)
        self.behind = full

    def layers(self, hidden: Tensor, view: ContextGPUView) -> Tensor:
        """`[tokens, hidden]` -> the same."""
        hidden = hidden + self.attention(hidden, view)
        return hidden + self.behind(hidden, view)


def with_window[Model: AttentionModel](model: Model) -> Model:
    """Let all attention layers of a model have the window, but those of multi-token prediction."""
    model.config.window_size = (WINDOW - 1, 0)
    return model
