"""Modules with the names and attributes of TransformerEngine's, in plain PyTorch.

TransformerEngine has no CPU kernels. These have the parameters that Megatron's wrappers of it have
(`extensions/transformer_engine.py` of Megatron-Core 0.19.2): a norm's weight inside the linear
layer after it, and `weight0`, `weight1` and so on of experts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn


class LayerNormColumn(nn.Module):
    """RMSNorm, whose factors may be 1 + weight, and a product."""

    def __init__(self, norm: nn.RMSNorm, linear: Any, centered: bool) -> None:
        super().__init__()
        self.layer_norm_weight = norm.weight
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.eps, self.normalization, self.zero_centered_gamma = norm.eps, "RMSNorm", centered
        self.sequence_parallel = False

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        factors = self.layer_norm_weight + int(self.zero_centered_gamma)
        normed = torch.rms_norm(x, (x.size(-1),), factors, self.eps)
        return F.linear(normed, self.weight, self.bias), None


class Linear(nn.Module):
    """A product."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight, self.bias), None


class Norm(nn.Module):
    """RMSNorm, whose factors may be 1 + weight."""

    def __init__(self, norm: nn.RMSNorm, centered: bool) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps, self.zero_centered_gamma = norm.eps, centered

    def forward(self, x: Tensor) -> Tensor:
        factors = self.weight + int(self.zero_centered_gamma)
        return torch.rms_norm(x, (x.size(-1),), factors, self.eps)


class GroupedLinear(nn.Module):
    """A weight for each expert."""

    def __init__(self, linears: list[Any]) -> None:
        super().__init__()
        for index, linear in enumerate(linears):
            self.register_parameter(f"weight{index}", linear.weight)


class GroupedMLP(nn.Module):
    """Experts with SwiGLU."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.num_local_experts = experts.num_local_experts
        self.linear_fc1 = GroupedLinear([e.linear_fc1 for e in experts.local_experts])
        self.linear_fc2 = GroupedLinear([e.linear_fc2 for e in experts.local_experts])

    def forward(self, x: Tensor, counts: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        outputs, start = [], 0
        for index, count in enumerate(counts.tolist()):
            rows, share = x[start : start + count], probs[start : start + count]
            fc1 = getattr(self.linear_fc1, f"weight{index}")
            gate, up = F.linear(rows, fc1).chunk(2, -1)
            hidden = F.silu(gate) * up * share[:, None]
            outputs.append(F.linear(hidden, getattr(self.linear_fc2, f"weight{index}")))
            start += count
        return torch.cat(outputs), None


MEGATRONS = "megatron.core.extensions.transformer_engine"
for kind, name, module in (
    (LayerNormColumn, "TELayerNormColumnParallelLinear", MEGATRONS),
    (Linear, "TERowParallelLinear", MEGATRONS),
    (Norm, "RMSNorm", "transformer_engine.pytorch.module.rmsnorm"),
    (GroupedLinear, "TEColumnParallelGroupedLinear", MEGATRONS),
    (GroupedMLP, "TEGroupedMLP", "megatron.core.transformer.moe.experts"),
):
    kind.__name__, kind.__module__ = name, module


def as_transformer_engine(model: Any, centered: bool = False) -> Any:
    """Exchange the modules of a model of Megatron's local spec, in place; parameters stay the same.
    `centered`: norms multiply by 1 + weight, which torch's in the local spec cannot."""
    model.config.layernorm_zero_centered_gamma = centered
    for layer in model.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        norms = layer.input_layernorm, layer.pre_mlp_layernorm
        attention.linear_qkv = LayerNormColumn(norms[0], attention.linear_qkv, centered)
        attention.linear_proj = Linear(attention.linear_proj)
        for name in ("q_layernorm", "k_layernorm"):
            norm = getattr(attention, name)
            if isinstance(norm, nn.RMSNorm):
                setattr(attention, name, Norm(norm, centered))
        layer.input_layernorm = IdentityOp()
        if hasattr(mlp, "experts"):
            mlp.experts = GroupedMLP(mlp.experts)
            layer.pre_mlp_layernorm = Norm(norms[1], centered)
        else:
            mlp.linear_fc1 = LayerNormColumn(norms[1], mlp.linear_fc1, centered)
            mlp.linear_fc2 = Linear(mlp.linear_fc2)
            layer.pre_mlp_layernorm = IdentityOp()
    model.decoder.final_layernorm = Norm(model.decoder.final_layernorm, centered)
    return model
