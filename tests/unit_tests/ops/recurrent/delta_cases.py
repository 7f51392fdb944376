"""A Gated DeltaNet layer for `recurrent_cases`, and what a plain recurrence makes of its inputs."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_async.ops.recurrent import (
    bases,
    delta_decode,
    delta_prefill,
    delta_reference,
    flush,
)
from megatron_async.ops.recurrent.delta_pools import DeltaParams, DeltaShape
from tests.unit_tests.ops.recurrent.recurrent_cases import Ops

REFERENCES = Ops(
    bases.next_bases.reference,
    flush.flush.reference,
    delta_reference.delta_decode.reference,
    delta_reference.delta_prefill.reference,
)
KERNELS = Ops(
    bases.next_bases_gpu,
    flush.flush_gpu,
    delta_decode.delta_decode_gpu,
    delta_prefill.delta_prefill_gpu,
)


@dataclass
class Layer:
    key_heads: int = 2
    key_dim: int = 16
    value_heads: int = 4
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __post_init__(self):
        random = torch.Generator().manual_seed(self.value_heads)

        def normal(*size, dtype=self.dtype, scale=1.0):
            return (scale * torch.randn(size, generator=random)).to(self.device, dtype)

        self.shape = DeltaShape(self.key_heads, self.key_dim, self.value_heads, self.value_dim)
        self.conv_dim, self.outputs = self.shape.conv_dim, self.shape.value_inner
        self.ring_dim = self.shape.value_inner + self.shape.key_inner
        self.gates = 1
        self.state_size = self.value_heads, self.value_dim, self.key_dim
        # Decays from a tenth a token to half a hundred tokens, so that states cross chunks.
        rates = torch.logspace(-3, -1, self.value_heads).to(self.device)
        self.params = DeltaParams(
            normal(self.conv_dim, 4, scale=0.5), normal(self.value_heads), torch.log(rates)
        )
        self.random = random

    def inputs(self, tokens):
        """`[tokens, in_proj]`, as in_proj gives them."""
        size = tokens, self.shape.in_proj
        return torch.randn(size, generator=self.random).to(self.device, self.dtype)

    def conv_inputs(self, inputs):
        """What the convolution reads of in_proj's output."""
        return inputs[:, : self.conv_dim]

    def heads(self, inputs):
        """q, k `[tokens, value heads, key_dim]` after the convolution, not normalised, and v,
        beta and g of a sequence, in float64."""
        shape = self.shape
        weight, dt_bias, a_log = (tensor.double() for tensor in self.params)
        strips = [shape.conv_dim, shape.value_inner, shape.value_heads, shape.value_heads]
        qkv, _z, beta, alpha = inputs.double().split(strips, dim=1)
        windows = F.pad(qkv, (0, 0, 3, 0)).unfold(0, 4, 1)
        qkv = F.silu((windows * weight.view(-1, 4)).sum(2))
        q, k, v = qkv.split([shape.key_inner, shape.key_inner, shape.value_inner], dim=1)
        q, k = (strip.unflatten(1, (shape.key_heads, -1)) for strip in (q, k))
        q, k = (strip.repeat_interleave(shape.group, 1) for strip in (q, k))
        g = -a_log.exp() * F.softplus(alpha + dt_bias)
        return q, k, v.unflatten(1, (shape.value_heads, -1)), beta.sigmoid(), g

    def truth(self, inputs):
        """Outputs of a sequence `[tokens, value_inner]`, and the state after each token, in
        float64."""
        q, k, v, beta, g = self.heads(inputs)
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q = q * self.key_dim**-0.5
        state, outputs, states = torch.zeros_like(v[0][..., None] * k[0][:, None]), [], []
        for t in range(len(inputs)):
            state = state * g[t].exp()[:, None, None]
            u = beta[t][:, None] * (v[t] - (state @ k[t][..., None])[..., 0])
            state = state + u[..., None] * k[t][:, None]
            states.append(state)
            outputs.append((state @ q[t][..., None])[..., 0])
        return torch.stack(outputs).flatten(1), torch.stack(states)
