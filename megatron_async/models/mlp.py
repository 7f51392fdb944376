"""The MLP of inference: Megatron's parameters, the activation fused with its first product or run
after it."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.fusions import fused_bias_geglu
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from megatron.core.utils import make_sharded_tensor_for_checkpoint
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_async.models.decoder_layer import activated
from megatron_async.models.layer_ops import LayerOps
from megatron_async.models.linear import (
    InferenceColumnParallelLinear,
    InferenceRowParallelLinear,
    SharedLinear,
)
from megatron_async.models.norm import make_post_norm
from megatron_async.ops.linear.activations import Gating
from megatron_async.ops.linear.stream import Stream

GATED: dict[str, Any] = {"silu": F.silu, "quick_gelu": quick_gelu, "fast_gelu": fast_gelu}
"""The functions of a gate that are served, as `TransformerConfig.activation_func`, by their names
in a `Gating`."""
SAME = {fused_bias_geglu.quick_gelu: quick_gelu}
"""Functions that Megatron-Core has twice."""
UNGATED = squared_relu
"""The activation that is served without a gate, as `TransformerConfig.activation_func`."""


def gating_of(config: Any) -> Gating | None:
    """The gated unit that a `TransformerConfig` describes; None: it has no gate, or one that is not
    served (`fitness.strange_activation` tells)."""
    function = SAME.get(config.activation_func, config.activation_func)
    names = [name for name, served in GATED.items() if served is function]
    if not config.gated_linear_unit or not names:
        return None
    clamp = config.activation_func_clamp_value or 0.0
    return Gating(names[0], clamp, config.glu_linear_offset)  # type: ignore[arg-type]


class InferenceMLP(MLP):
    """Megatron's `MLP` with a gated unit (Shazeer 2020) or, without a gate, squared ReLU (So et al.
    2021) as one op; other activations are not served.

    Attributes:
        gating: the unit; None: squared ReLU.
        post_layernorm: the norm behind the MLP, which `LayerKind` runs; or None.
    """

    ops = LayerOps()

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.gating, self.post_layernorm = gating_of(config), make_post_norm(config)
        for linear in (self.linear_fc1, self.linear_fc2):
            if isinstance(linear, SharedLinear):
                linear.skip_bias_add = False  # products add it

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """`[tokens, 1, hidden]` -> the same shape, and a bias or None, as in Megatron."""
        return self.linear_fc2(activated(self, Stream(hidden_states.flatten(0, 1)))[:, None])


class SharedExpertMLP(InferenceMLP):
    """The shared expert, which processes every token (DeepSeekMoE, arXiv 2401.06066); Megatron's
    `SharedExpertMLP`, of inner dimension `moe_shared_expert_intermediate_size`.

    It takes whole rows and computes this rank's summand of the sum over the tensor-parallel ranks.
    `MoELayer` adds the other experts' output before the sum over ranks, and applies the gate, if
    there is one: `gate_weight`, `[1, hidden]`, on every rank.
    """

    gate_weight: nn.Parameter | None

    def __init__(self, config: TransformerConfig, tp_group: ProcessGroup) -> None:
        config = copy.copy(config)
        config.ffn_hidden_size = config.moe_shared_expert_intermediate_size
        submodules = MLPSubmodules(
            linear_fc1=InferenceColumnParallelLinear, linear_fc2=InferenceRowParallelLinear
        )
        super().__init__(config, submodules, tp_group=tp_group)
        self.linear_fc1.sequence_parallel = False
        self.linear_fc2.explicit_expert_comm = True
        gate = None
        if config.moe_shared_expert_gate:
            gate = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        self.register_parameter("gate_weight", gate)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        """`[tokens, 1, hidden]` -> this rank's summand of the same before the gate, and None."""
        return super().forward(hidden_states)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Megatron's form of the MLP, and the gate, which every rank stores whole."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.gate_weight is not None:
            key = f"{prefix}gate_weight"
            found[key] = make_sharded_tensor_for_checkpoint(
                self.gate_weight,
                key,
                prepend_offsets=sharded_offsets,
                tp_group=self.tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )
        return found
