"""The Mamba-2 mixer of inference: Megatron's parameters, the recurrence in the engine's state pool.

Mamba-2: Dao and Gu 2024 (arXiv 2405.21060). A projection gives z, x, B, C and dt of every token. x,
B and C pass a short causal convolution, and the recurrence turns them into y. y is gated by z,
normalised and projected back. Convolution and recurrence depend on earlier tokens, so
`RecurrentStepView.recurrent`, which has the state, computes them.

Unlike Megatron's mixer, this one needs neither mamba-ssm nor causal-conv1d.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_async.models.architecture import MAMBA
from megatron_async.models.layer_ops import LayerOps
from megatron_async.models.linear import (
    InferenceColumnParallelLinear,
    InferenceRowParallelLinear,
)
from megatron_async.models.recurrent_layers import RecurrentMixer
from megatron_async.models.sizes import CONV_KERNEL, MambaSizes
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.recurrent.mamba_pools import MambaParams

if TYPE_CHECKING:
    from megatron_async.models.step_view import RecurrentStepView


class GatedRMSNorm(nn.Module):
    """RMSNorm of `y * silu(z)` over each group of heads, of `elements` on this rank; a single group
    may be spread over the ranks of `tp_group`."""

    ops = LayerOps()

    def __init__(
        self,
        elements: int,
        groups: int,
        eps: float,
        tp_group: dist.ProcessGroup | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(elements, dtype=dtype))
        self.groups = groups
        self.eps = eps
        self.tp_group = tp_group

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """`[tokens, elements]` -> the same; z may have strided rows."""
        if self.tp_group is None:
            return self.ops.gated_rms_norm(y, z, self.weight, self.groups, self.eps)
        gated = y.float() * F.silu(z.float())
        squares = gated.square().sum(1, keepdim=True)
        dist.all_reduce(squares, group=self.tp_group)
        mean = squares / (gated.size(1) * self.tp_group.size())
        return (gated * (mean + self.eps).rsqrt() * self.weight.float()).to(y.dtype)


class Mamba2Mixer(RecurrentMixer[MambaSizes]):
    """The mixer of a Mamba-2 layer, under Megatron's names.

    Tensor-parallel ranks share the heads, and with them the groups; a single group's B and C are on
    every rank.

    Attributes:
        in_proj.weight: `[sizes.in_proj, hidden]`: the rows of z, x, B, C and dt.
        conv1d_weight, conv1d_bias: `[sizes.conv, 1, 4]` and `[sizes.conv]`, of x, B and C.
        dt_bias: `[sizes.heads]`.
        A_log, D: float32 `[sizes.heads]`; the decay is `-exp(A_log)`.
        norm.weight: `[sizes.channels]`.
        out_proj.weight: `[hidden, sizes.channels]`.
    """

    float32_parameters = ("A_log", "D")
    kind, megatrons = MAMBA, "MambaMixer"
    per_head = ("dt_bias", "A_log", "D")
    norm_name, norm_axis = "norm", 0
    convolution = MappingProxyType({"conv1d_weight": "conv1d.weight", "conv1d_bias": "conv1d.bias"})

    def __init__(
        self,
        config: TransformerConfig,
        d_model: int,
        pg_collection: ProcessGroupCollection,
        in_proj: Callable[..., Any] = InferenceColumnParallelLinear,
        out_proj: Callable[..., Any] = InferenceRowParallelLinear,
        **_: Any,
    ) -> None:
        group = pg_collection.tp
        super().__init__(config, d_model, group, in_proj)
        sizes = self.sizes
        dtype = config.params_dtype
        shape = (sizes.conv, 1, CONV_KERNEL)
        self.conv1d_weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.conv1d_bias = nn.Parameter(torch.empty(sizes.conv, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.empty(sizes.heads, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(sizes.heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(sizes.heads, dtype=torch.float32))
        spread = group.size() > 1 and self.whole_sizes.groups == 1
        eps = getattr(config, "mamba_norm_epsilon", 1e-5)
        shared = group if spread else None
        self.norm = GatedRMSNorm(sizes.channels, sizes.groups, eps, shared, dtype)
        self.out_proj = self._output(out_proj, d_model)

    @property
    def recurrence(self) -> MambaParams:
        """The parameters of the layer for the recurrence."""
        return MambaParams(self.conv1d_weight, self.conv1d_bias, self.dt_bias, self.A_log, self.D)

    @property
    def on_all(self) -> Collection[str]:
        return ("B", "C") if self.whole_sizes.groups == 1 else ()

    def mixed(self, projected: Tensor, view: RecurrentStepView) -> Tensor:
        # With sequence parallelism rows of padding stand behind the step's tokens.
        zxbcdt = projected[: view.dims.tokens]
        y = view.recurrent(self.state_layer_index, zxbcdt, self.recurrence)
        return self.norm(y, zxbcdt[:, : self.sizes.channels])

    def run(self, stream: Stream, view: RecurrentStepView, may_split: bool) -> Stream:
        """The stream behind this layer and the norm before it: `models/decoder_layer.py`."""
        projected = self.in_proj.product(stream, self.in_proj.choose(stream))
        # With sequence parallelism rows of padding stand behind the step's tokens.
        zxbcdt = projected[: view.dims.tokens]
        gate, layer, norm = zxbcdt[:, : self.sizes.channels], self.state_layer_index, self.norm
        groups = norm.groups if norm.tp_group is None else 0
        choice = self.out_proj.choose(gate, stream, may_split, groups)
        x: Tensor | Stream
        if choice.met.squares and view.may_gate:
            # out_proj divides by the root mean squares, so the norm has no kernel of its own.
            y, squares = view.recurrent_gated(layer, zxbcdt, self.recurrence, norm.weight)
            x = Stream(y, None, norm.weight, norm.eps, squares)
        else:
            x = norm(view.recurrent(layer, zxbcdt, self.recurrence), gate)
        return self.out_proj.add(x, stream, may_split, choice)
