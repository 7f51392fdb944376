"""The Gated DeltaNet mixer of inference: Megatron's parameters, the recurrence in the engine's
state pool.

Gated DeltaNet: Yang, Kautz and Hatamizadeh 2024 (arXiv 2412.06464). A projection gives query, key,
value, z, beta and alpha of every token. Query, key and value pass a short causal convolution. The
recurrence turns them into an output; beta scales what is written to its state, and alpha sets the
state's decay. The output is normalised in each value head, gated by z, and projected back.
Convolution and recurrence depend on earlier tokens, so `RecurrentStepView.recurrent`, which has the
state, computes them.

Unlike Megatron's `GatedDeltaNet`, this mixer does not need flash-linear-attention.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_async.models.architecture import DELTA
from megatron_async.models.layer_ops import LayerOps
from megatron_async.models.linear import (
    InferenceColumnParallelLinear,
    InferenceRowParallelLinear,
)
from megatron_async.models.norm import InferenceRMSNorm
from megatron_async.models.recurrent_layers import RecurrentMixer
from megatron_async.models.sizes import CONV_KERNEL, DeltaSizes
from megatron_async.ops.recurrent.delta_pools import DeltaParams

if TYPE_CHECKING:
    from megatron_async.models.step_view import RecurrentStepView


class GatedHeadNorm(InferenceRMSNorm):
    """RMSNorm of each value head, then the gate: `norm(o) * silu(z)`.

    Its weight is float32: Megatron's zero-centred form of a factor of Hugging Face's, factor - 1,
    has few bits of a small factor in bfloat16.
    """

    ops = LayerOps()
    float32_parameters = ("weight",)

    def gated(self, o: Tensor, z: Tensor) -> Tensor:
        """`[tokens, value heads * value_dim]` each -> the same; z may have strided rows."""
        assert self.eps is not None, "an argument of its class"
        return self.ops.gated_head_norm(o, z, self.factors, self.eps)


class GatedDeltaMixer(RecurrentMixer[DeltaSizes]):
    """The mixer of a Gated DeltaNet layer, under Megatron's names.

    Tensor-parallel ranks share the key heads, and with them the value heads of each.

    Attributes:
        in_proj.weight: `[sizes.in_proj, hidden]`: the rows of query, key, value, z, beta and alpha.
        conv1d.weight: `[sizes.conv, 1, 4]`, of query, key and value.
        dt_bias: `[sizes.value_heads]`.
        A_log: float32 `[sizes.value_heads]`; a token's decay is
            `exp(-exp(A_log) * softplus(alpha + dt_bias))`.
        out_norm.weight: float32 `[sizes.value_dim]`, on every rank.
        out_proj.weight: `[hidden, sizes.channels]`.
    """

    float32_parameters = ("A_log",)
    kind, megatrons = DELTA, "GatedDeltaNet"
    served = MappingProxyType({"linear_conv_kernel_dim": CONV_KERNEL})
    per_head = ("dt_bias", "A_log")
    norm_name, norm_axis = "out_norm", None
    convolution = MappingProxyType({"conv1d.weight": "conv1d.weight"})

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        in_proj: Callable[..., Any] = InferenceColumnParallelLinear,
        out_proj: Callable[..., Any] = InferenceRowParallelLinear,
        **_: Any,
    ) -> None:
        super().__init__(config, config.hidden_size, pg_collection.tp, in_proj)
        sizes = self.sizes
        dtype = config.params_dtype
        # It holds the weight, and is never called.
        self.conv1d = nn.Conv1d(
            sizes.conv, sizes.conv, CONV_KERNEL, groups=sizes.conv, bias=False, dtype=dtype
        )
        self.dt_bias = nn.Parameter(torch.empty(sizes.value_heads, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(sizes.value_heads, dtype=torch.float32))
        self.out_norm = GatedHeadNorm(
            sizes.value_dim, config.layernorm_epsilon, config.layernorm_zero_centered_gamma
        )
        self.out_proj = self._output(out_proj, config.hidden_size)
        self._first_z = sizes.conv

    @property
    def recurrence(self) -> DeltaParams:
        """The parameters of the layer for the recurrence."""
        return DeltaParams(self.conv1d.weight, self.dt_bias, self.A_log)

    def mixed(self, projected: Tensor, view: RecurrentStepView) -> Tensor:
        # With sequence parallelism rows of padding stand behind the step's tokens.
        qkvzba = projected[: view.dims.tokens]
        o = view.recurrent(self.state_layer_index, qkvzba, self.recurrence)
        z = qkvzba[:, self._first_z : self._first_z + self.sizes.channels]
        return self.out_norm.gated(o, z)
