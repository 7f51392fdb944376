"""Layers of each kind for `recurrent_cases`, and what a plain recurrence makes of their inputs."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_async.ops.recurrent import bases, flush
from megatron_async.ops.recurrent.cpu import host_recurrent
from megatron_async.ops.recurrent.delta_decode import delta_decode_gpu
from megatron_async.ops.recurrent.delta_pools import DeltaParams, DeltaShape
from megatron_async.ops.recurrent.delta_prefill import delta_prefill_gpu
from megatron_async.ops.recurrent.delta_reference import delta_decode, delta_prefill
from megatron_async.ops.recurrent.mamba_decode import mamba_decode_gpu
from megatron_async.ops.recurrent.mamba_pools import MambaParams, MambaShape
from megatron_async.ops.recurrent.mamba_prefill import mamba_prefill_gpu
from megatron_async.ops.recurrent.mamba_reference import mamba_decode, mamba_prefill
from megatron_async.ops.recurrent.recurrent_pools import DELTA_TILE, TILE
from tests.unit_tests.ops.recurrent.recurrent_cases import Ops

_STEP = bases.next_bases.reference, flush.flush.reference
_STEP_GPU = bases.next_bases_gpu, flush.flush_gpu
_STEP_CPU = host_recurrent.next_bases_cpu, host_recurrent.flush_cpu
REFERENCES = {
    "mamba": Ops(*_STEP, mamba_decode.reference, mamba_prefill.reference),
    "delta": Ops(*_STEP, delta_decode.reference, delta_prefill.reference),
}
KERNELS = {
    "mamba": Ops(*_STEP_GPU, mamba_decode_gpu, mamba_prefill_gpu),
    "delta": Ops(*_STEP_GPU, delta_decode_gpu, delta_prefill_gpu),
}
LOOPS = {
    "mamba": Ops(*_STEP_CPU, host_recurrent.mamba_decode_cpu, mamba_prefill.reference),
    "delta": Ops(*_STEP_CPU, host_recurrent.delta_decode_cpu, delta_prefill.reference),
}


class Layer:
    """What layers of all kinds have: `state_size` is the shape of a row's state; `ring_dim`,
    `gates`, `conv_dim` and `outputs` are channels of the pools and of the output, `in_proj` columns
    of the inputs."""

    kind: str
    shape: MambaShape | DeltaShape
    dtype: torch.dtype
    device: str

    def normal(self, *size, dtype=None, scale=1.0):
        """Random numbers for parameters."""
        numbers = scale * torch.randn(size, generator=self.random)
        return numbers.to(self.device, dtype or self.dtype)

    def inputs(self, tokens):
        """`[tokens, in_proj]`, as in_proj gives them."""
        size = tokens, self.shape.in_proj
        return torch.randn(size, generator=self.random).to(self.device, self.dtype)

    def conv_inputs(self, inputs):
        """What the convolution reads of in_proj's output."""
        return inputs[:, self.offset : self.offset + self.conv_dim]

    def finish(self, heads, outputs):
        """Sizes, and decay rates: from a tenth a token to half a hundred tokens, so that states
        cross chunks."""
        self.random = torch.Generator().manual_seed(heads)
        self.conv_dim, self.ring_dim = self.shape.conv_dim, self.shape.ring_dim
        self.outputs = outputs
        return torch.logspace(-3, -1, heads).to(self.device)


@dataclass
class MambaLayer(Layer):
    heads: int = 4
    head_dim: int = 16
    groups: int = 2
    d_state: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    kind, tile = "mamba", TILE
    gates = replayed_gates = 2

    def __post_init__(self):
        self.shape = MambaShape(self.heads, self.head_dim, self.groups, self.d_state)
        self.offset = self.d_inner = self.shape.d_inner
        rates = self.finish(self.heads, self.d_inner)
        self.params = MambaParams(
            self.normal(self.conv_dim, 4, scale=0.5),
            self.normal(self.conv_dim, scale=0.2),
            self.normal(self.heads),
            torch.log(rates),
            self.normal(self.heads, dtype=torch.float32),
        )
        self.state_size = self.heads, self.head_dim, self.d_state

    def truth(self, inputs):
        """Outputs of a sequence `[tokens, d_inner]` and the state after each token, in float64."""
        weight, bias, dt_bias, a_log, d = (tensor.double() for tensor in self.params)
        _z, xbc, dt = inputs.double().split([self.d_inner, self.conv_dim, self.heads], dim=1)
        windows = F.pad(xbc, (0, 0, 3, 0)).unfold(0, 4, 1)
        xbc = F.silu((windows * weight.view(-1, 4)).sum(2) + bias)
        strip = self.groups * self.d_state
        x, b, c = xbc.split([self.d_inner, strip, strip], dim=1)
        x = x.unflatten(1, (self.heads, -1))
        b, c = (strip.unflatten(1, (self.groups, -1)) for strip in (b, c))
        b, c = (strip.repeat_interleave(self.heads // self.groups, 1) for strip in (b, c))
        dt = F.softplus(dt + dt_bias)
        state, outputs, states = torch.zeros_like(x[0][..., None] * b[0][:, None]), [], []
        for t in range(len(inputs)):
            decay = torch.exp(-dt[t] * a_log.exp())[:, None, None]
            state = state * decay + (dt[t][:, None] * x[t])[..., None] * b[t][:, None]
            states.append(state)
            outputs.append((state @ c[t][..., None])[..., 0] + d[:, None] * x[t])
        return torch.stack(outputs).flatten(1), torch.stack(states)


@dataclass
class DeltaLayer(Layer):
    key_heads: int = 2
    key_dim: int = 16
    value_heads: int = 4
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    kind, tile = "delta", DELTA_TILE
    offset = 0
    gates, replayed_gates = 1, 2

    def __post_init__(self):
        self.shape = DeltaShape(self.key_heads, self.key_dim, self.value_heads, self.value_dim)
        rates = self.finish(self.value_heads, self.shape.value_inner)
        self.params = DeltaParams(
            self.normal(self.conv_dim, 4, scale=0.5),
            self.normal(self.value_heads),
            torch.log(rates),
        )
        self.state_size = self.value_heads, self.value_dim, self.key_dim

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
