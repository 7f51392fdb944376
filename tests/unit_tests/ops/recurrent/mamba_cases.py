"""A Mamba-2 layer for `recurrent_cases`, and what a plain recurrence makes of its inputs."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_async.ops.recurrent import bases, flush, mamba_decode, mamba_prefill, mamba_reference
from megatron_async.ops.recurrent.mamba_pools import MambaParams
from tests.unit_tests.ops.recurrent.recurrent_cases import Ops

REFERENCES = Ops(
    bases.next_bases.reference,
    flush.flush.reference,
    mamba_reference.mamba_decode.reference,
    mamba_reference.mamba_prefill.reference,
)
KERNELS = Ops(
    bases.next_bases_gpu,
    flush.flush_gpu,
    mamba_decode.mamba_decode_gpu,
    mamba_prefill.mamba_prefill_gpu,
)


@dataclass
class Layer:
    heads: int = 4
    head_dim: int = 16
    groups: int = 2
    d_state: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __post_init__(self):
        random = torch.Generator().manual_seed(self.heads)

        def normal(*size, dtype=self.dtype, scale=1.0):
            return (scale * torch.randn(size, generator=random)).to(self.device, dtype)

        self.d_inner = self.heads * self.head_dim
        self.ring_dim = self.d_inner + self.groups * self.d_state
        self.conv_dim = self.ring_dim + self.groups * self.d_state
        # Decays from a tenth a token to a half a hundred tokens, so that states cross chunks.
        rates = torch.logspace(-3, -1, self.heads).to(self.device)
        self.params = MambaParams(
            normal(self.conv_dim, 4, scale=0.5),
            normal(self.conv_dim, scale=0.2),
            normal(self.heads),
            torch.log(rates),
            normal(self.heads, dtype=torch.float32),
        )
        self.gates = 2
        self.state_size = self.heads, self.head_dim, self.d_state
        self.outputs = self.d_inner
        self.random = random

    def inputs(self, tokens):
        """`[tokens, 2 d_inner + 2 groups d_state + heads]`, as in_proj gives them."""
        width = self.d_inner + self.conv_dim + self.heads
        return torch.randn(tokens, width, generator=self.random).to(self.device, self.dtype)

    def conv_inputs(self, inputs):
        """What the convolution reads of in_proj's output."""
        return inputs[:, self.d_inner : -self.heads]

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
