"""The gated MLP of inference: Megatron's parameters, one kernel between its two products."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.mlp import MLP
from torch import Tensor

from megatron_async.ops.kernels import kernels_for


class GatedMLP(MLP):
    """Megatron's `MLP` with SwiGLU (Shazeer 2020) as one op; other activations are not served."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron's: `[tokens, 1, hidden]` -> the same, and a bias or None."""
        gate_up, _unused = self.linear_fc1(hidden_states)
        tokens, _one, width = gate_up.shape
        activated = kernels_for(gate_up).swiglu(gate_up.view(tokens, width))
        return self.linear_fc2(activated.view(tokens, 1, -1))
