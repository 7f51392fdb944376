"""A whole sequence through a model at once, nothing cached: what hybrid models are compared by.

`WholeSequence` stands where the engine's `ContextGPUView` does. Its attention and its recurrence
are written out in float32, as simply as they can be.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.models.attention import stamp_kv_layers
from megatron_async.models.norm import fold_norms
from megatron_async.models.partition import recurrent_layers, recurrent_sizes
from megatron_async.models.pipeline import stage_of
from megatron_async.models.rotary import RotaryTable
from megatron_async.models.sizes import DeltaSizes, MambaSizes
from megatron_async.ops.recurrent.delta_pools import DeltaParams
from megatron_async.ops.recurrent.mamba_pools import MambaParams
from megatron_async.step.gpt_inference_wrapper import inference_mode_active


def recurrence(zxbcdt: Tensor, params: MambaParams, sizes: MambaSizes) -> Tensor:
    """Convolution and recurrence of a Mamba-2 mixer, token by token: `[tokens, in_proj]` of one
    sequence from its beginning -> y before the gated norm, float32 `[tokens, inner]`."""
    _z, x, b, c, dt = zxbcdt.float().split(list(sizes.strips.values()), dim=1)
    inputs = torch.cat((x, b, c), dim=1).t()
    weight, bias = params.conv_weight.float(), params.conv_bias.float()
    mixed = F.conv1d(F.pad(inputs, (3, 0)), weight, bias, groups=sizes.conv)
    x, b, c = F.silu(mixed).t().split(list(sizes.conv_strips.values()), dim=1)
    x = x.unflatten(1, (sizes.heads, sizes.head_dim))
    each = sizes.heads // sizes.groups
    b, c = (
        part.unflatten(1, (sizes.groups, sizes.state_dim)).repeat_interleave(each, 1)
        for part in (b, c)
    )
    dt = F.softplus(dt + params.dt_bias.float())
    decay = torch.exp(-dt * params.a_log.exp())
    state = torch.zeros(sizes.state_shape)
    y = torch.empty_like(x)
    for token in range(len(x)):
        added = (dt[token, :, None] * x[token])[..., None] * b[token][:, None]
        state = decay[token, :, None, None] * state + added
        y[token] = (state * c[token][:, None]).sum(2) + params.d[:, None] * x[token]
    return y.flatten(1)


def delta_rule(qkvzba: Tensor, params: DeltaParams, sizes: DeltaSizes) -> Tensor:
    """Convolution and recurrence of a Gated DeltaNet mixer, token by token: `[tokens, in_proj]` of
    one sequence from its beginning -> o before the gated norm, float32 `[tokens, values]`."""
    strips = qkvzba.float().split(list(sizes.strips.values()), dim=1)
    *_inputs, _z, beta, alpha = strips
    inputs = torch.cat(strips[:3], dim=1).t()
    mixed = F.conv1d(F.pad(inputs, (3, 0)), params.conv_weight.float(), groups=sizes.conv)
    q, k, v = F.silu(mixed).t().split(list(sizes.conv_strips.values()), dim=1)
    each = sizes.value_heads // sizes.key_heads
    q, k = (
        (part * (part.square().sum(2, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(each, 1)
        for part in (
            each_head.unflatten(1, (sizes.key_heads, sizes.key_dim)) for each_head in (q, k)
        )
    )
    q = q * sizes.key_dim**-0.5
    v = v.unflatten(1, (sizes.value_heads, sizes.value_dim))
    decay = torch.exp(-params.a_log.exp() * F.softplus(alpha + params.dt_bias.float()))
    beta = beta.sigmoid()
    state = torch.zeros(sizes.state_shape)
    o = torch.empty_like(v)
    for token in range(len(v)):
        state = decay[token, :, None, None] * state
        missing = v[token] - torch.einsum("hvk,hk->hv", state, k[token])
        state = state + torch.einsum("hv,hk->hvk", beta[token, :, None] * missing, k[token])
        o[token] = torch.einsum("hvk,hk->hv", state, q[token])
    return o.flatten(1)


class WholeSequence:
    """What a model reads of a `ContextGPUView`, for one sequence of so many tokens."""

    num_speculative_tokens = 0
    use_flashinfer_fused_rope = False
    config = SimpleNamespace(materialize_only_last_token_logits=False)
    dummy_place = 1 << 40
    mtp_hidden: Tensor | None = None
    routing = None

    def __init__(self, config: Any, tokens: int) -> None:
        self.max_sequence_length = tokens
        self.step = SimpleNamespace(write_index=torch.arange(tokens))
        self.dims = SimpleNamespace(tokens=tokens, dispatch_tokens=0)
        self.rotary = RotaryTable.described(config, tokens, torch.device("cpu"))
        self.eps = config.layernorm_epsilon
        self.dim = config.kv_channels
        self._groups = config.num_query_groups // config.tensor_model_parallel_size
        self._sizes = recurrent_sizes(config, recurrent_layers(config))
        self.layers: list[int] = []

    def recurrent(self, layer: int, projected: Tensor, params: MambaParams | DeltaParams) -> Tensor:
        """`recurrence` of a Mamba-2 layer, `delta_rule` of a Gated DeltaNet layer."""
        self.layers.append(layer)
        sizes = self._sizes[layer]
        if isinstance(params, DeltaParams):
            assert isinstance(sizes, DeltaSizes)
            return delta_rule(projected, params, sizes).to(projected.dtype)
        assert isinstance(sizes, MambaSizes)
        return recurrence(projected, params, sizes).to(projected.dtype)

    def attention(
        self,
        layer: int,
        mixed_qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        scale: float | None = None,
        has_gate: bool = False,
        sinks: None = None,
        rounded: None = None,
    ) -> Tensor:
        """Causal attention, `[tokens, heads, dim]`, without sinks, of wide rows."""
        tokens = len(mixed_qkv)
        groups = self._groups
        grouped = mixed_qkv.unflatten(1, (groups, -1, self.dim))
        query, key, value = grouped[:, :, :-2], grouped[:, :, -2:-1], grouped[:, :, -1:]
        gate = torch.full_like(query, float("inf"))
        if has_gate:
            query, gate = query.chunk(2, dim=2)
        if q_norm is not None:
            query = F.rms_norm(query, (self.dim,), q_norm, self.eps)
            key = F.rms_norm(key, (self.dim,), k_norm, self.eps)
        query, key = self._rotate(query), self._rotate(key)
        scores = torch.einsum("tghd,sgxd->ghts", query, key)
        scores = scores * (self.dim**-0.5 if scale is None else scale)
        future = torch.ones(tokens, tokens).triu(1).bool()
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        output = torch.einsum("ghts,sgxd->tghd", weights, value) * gate.sigmoid()
        return output.flatten(1, 2)

    def _rotate(self, x: Tensor) -> Tensor:
        cos, sin = (table[:, None, None] for table in (self.rotary.cos, self.rotary.sin))
        turned, rest = x[..., : cos.size(-1)], x[..., cos.size(-1) :]
        first, second = turned.chunk(2, -1)
        return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, rest), -1)

    def last_token_logits(self, hidden_states: Tensor) -> Tensor:
        """All of them."""
        return hidden_states.squeeze(0)

    def is_static_batching(self) -> bool:
        """No."""
        return False

    def is_dynamic_batching(self) -> bool:
        """Yes."""
        return True

    def is_decode_only(self) -> bool:
        """No."""
        return False

    def using_cuda_graph_this_step(self) -> bool:
        """No."""
        return False


@torch.inference_mode()
def whole_logits(model: Any, tokens: list[int]) -> Tensor:
    """Logits `[tokens, vocabulary]` of one sequence by a `HybridModel`; of a pipeline stage that is
    not the last, hidden states `[tokens, 1, hidden]`."""
    return whole_pass(model, tokens)[0]


def whole_pass(model: Any, tokens: list[int]) -> tuple[Tensor, Tensor | None]:
    """`whole_logits`, and what the pass leaves for multi-token prediction, `[tokens, hidden]`."""
    stamp_kv_layers(model)
    fold_norms(model)
    view = WholeSequence(model.config, len(tokens))
    with inference_mode_active():
        logits: Tensor = model(
            torch.tensor([tokens]),
            torch.arange(len(tokens))[None],
            attention_mask=None,
            inference_context=view,
            runtime_gather_output=True,
        )
    assert view.layers == list(range(len(recurrent_layers(model.config))))
    found = logits.squeeze(0) if stage_of(model.config).is_last else logits
    return found, view.mtp_hidden
