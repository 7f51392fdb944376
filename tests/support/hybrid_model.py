"""The smallest hybrid models that an engine serves: `AttentionModel` with a recurrent layer before
and after its attention, of Mamba-2, of Gated DeltaNet, or of each.

Of the layers they have all that keeps state: convolution and recurrence are the engine's own. In
float64, as their attention.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_async.device_state.gpu_view import ContextGPUView
from megatron_async.models.hybrid import transformer_config
from megatron_async.ops.recurrent.delta_pools import DeltaParams, DeltaShape
from megatron_async.ops.recurrent.mamba_pools import MambaParams, MambaShape
from tests.support.attention_model import (
    ARCHITECTURE,
    HIDDEN,
    AttentionModel,
    weights,
    with_experts,
)

SHAPE = MambaShape(heads=2, head_dim=4, groups=2, d_state=16)
DELTA_SHAPE = DeltaShape(key_heads=1, key_dim=16, value_heads=2, value_dim=16)
HYBRID = replace(
    ARCHITECTURE,
    model_type="nemotron_h",
    num_layers=3,
    pattern="M*M",
    mamba_num_heads=SHAPE.heads,
    mamba_head_dim=SHAPE.head_dim,
    mamba_num_groups=SHAPE.groups,
    mamba_state_dim=SHAPE.d_state,
    linear_num_key_heads=DELTA_SHAPE.key_heads,
    linear_num_value_heads=DELTA_SHAPE.value_heads,
    linear_key_head_dim=DELTA_SHAPE.key_dim,
    linear_value_head_dim=DELTA_SHAPE.value_dim,
)


class OnlyMamba(nn.Module):
    """Projections around the engine's recurrence; `layer` is the index among the recurrent
    layers."""

    def __init__(self, layer: int, generator: torch.Generator) -> None:
        super().__init__()
        self._layer = layer
        inputs = 2 * SHAPE.d_inner + 2 * SHAPE.bc_dim + SHAPE.heads
        self.input = weights(inputs, HIDDEN, 1.0, generator)
        self.output = weights(HIDDEN, SHAPE.d_inner, 4.0, generator)
        uniform = torch.rand(4, SHAPE.heads, generator=generator, dtype=torch.float64)
        # Slow decay and large steps: what is long past still matters.
        self.params = MambaParams(
            conv_weight=weights(SHAPE.conv_dim, 4, 2.0, generator),
            conv_bias=weights(SHAPE.conv_dim, 1, 0.5, generator)[:, 0].contiguous(),
            dt_bias=uniform[0],
            a_log=torch.log(0.005 + 0.05 * uniform[1]),
            d=uniform[2],
        )

    def forward(self, hidden: Tensor, view: ContextGPUView) -> Tensor:
        """`[tokens, hidden]` -> the same."""
        normed = hidden / hidden.square().mean(1, keepdim=True).sqrt()
        y = view.recurrent(self._layer, normed @ self.input.T, self.params)
        # Small changes of the state change tokens, but rounding does not.
        return torch.sin(y) @ self.output.T


class OnlyDelta(nn.Module):
    """A model of one Gated DeltaNet layer."""

    def __init__(self, layer: int, generator: torch.Generator) -> None:
        super().__init__()
        self._layer = layer
        self.input = weights(DELTA_SHAPE.in_proj, HIDDEN, 1.0, generator)
        self.output = weights(HIDDEN, DELTA_SHAPE.value_inner, 4.0, generator)
        uniform = torch.rand(2, DELTA_SHAPE.value_heads, generator=generator, dtype=torch.float64)
        self.params = DeltaParams(
            conv_weight=weights(DELTA_SHAPE.conv_dim, 4, 2.0, generator),
            dt_bias=uniform[0],
            a_log=torch.log(0.005 + 0.05 * uniform[1]),
        )

    def forward(self, hidden: Tensor, view: ContextGPUView) -> Tensor:
        """`[tokens, hidden]` -> the same."""
        normed = hidden / hidden.square().mean(1, keepdim=True).sqrt()
        o = view.recurrent(self._layer, normed @ self.input.T, self.params)
        return torch.sin(4 * o) @ self.output.T


class HybridAttentionModel(AttentionModel):
    """What `GPTInferenceWrapper` wants of a model, with recurrent layers: of Mamba-2."""

    pattern = "M*M"

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        # Not each seed will do: a prompt of one token that yields itself for ever is a dull one.
        generator = torch.Generator().manual_seed(seed + 1 + self.pattern.count("G"))
        shape = replace(HYBRID, pattern=self.pattern)
        self.config = with_experts(transformer_config(shape, torch.float64))
        kinds: dict[str, Any] = {"M": OnlyMamba, "G": OnlyDelta}
        self.before, self.behind = (
            kinds[kind](layer, generator)
            for layer, kind in enumerate(self.pattern.replace("*", ""))
        )

    def layers(self, hidden: Tensor, view: ContextGPUView) -> Tensor:
        """`[tokens, hidden]` -> the same."""
        hidden = hidden + self.before(hidden, view)
        hidden = super().layers(hidden, view)
        return hidden + self.behind(hidden, view)


class DeltaAttentionModel(HybridAttentionModel):
    """With two layers of Gated DeltaNet."""

    pattern = "G*G"


class MixedAttentionModel(HybridAttentionModel):
    """With a layer of each kind."""

    pattern = "M*G"


HYBRID_MODELS = (HybridAttentionModel, DeltaAttentionModel, MixedAttentionModel)
