"""The gated MLP of inference: Megatron's parameters, SwiGLU in or behind its first product."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.mlp import MLP
from torch import Tensor

from megatron_async.models.linear import InferenceColumnParallelLinear
from megatron_async.ops.kernels import kernels_for
from megatron_async.ops.linear.skinny_linear import Unnormed


class GatedMLP(MLP):
    """Megatron's `MLP` with SwiGLU (Shazeer 2020) as one op; other activations are not served."""

    def forward(
        self,
        hidden_states: Tensor | Unnormed,
        per_token_scale: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron's: `[tokens, 1, hidden]` -> the same, and a bias or None."""
        activated = None
        if isinstance(self.linear_fc1, InferenceColumnParallelLinear):
            activated = self.linear_fc1.forward_swiglu(hidden_states)
        if activated is None:
            gate_up, _unused = self.linear_fc1(hidden_states)
            tokens, _one, width = gate_up.shape
            activated = kernels_for(gate_up).swiglu(gate_up.view(tokens, width))[:, None]
        return self.linear_fc2(activated)
