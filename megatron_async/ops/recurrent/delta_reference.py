"""`delta_decode` and `delta_prefill` in plain torch: what they mean, what runs on a CPU, and what
kernels are tested against. Within a cut of a prefill all pseudo values are found at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.ops.op import op
from megatron_async.ops.recurrent.delta_pools import NORM_EPS, DeltaParams, DeltaShape, shape_of
from megatron_async.ops.recurrent.recurrent_pools import (
    DecodeRows,
    FlushRule,
    PrefillRows,
    RecurrentPools,
    wide_dtype,
)
from megatron_async.ops.recurrent.reference_parts import (
    Chunk,
    Entries,
    convolve,
    prefill_reference,
    queries_of,
    ring_inputs,
    with_history,
)


@op(gpu="recurrent.delta_decode", cpu="recurrent.cpu.host_recurrent")
def delta_decode(
    qkvzba: Tensor,
    params: DeltaParams,
    pools: RecurrentPools,
    step: DecodeRows,
    rule: FlushRule,
    out: Tensor | None = None,
) -> Tensor:
    """Convolution and recurrence of a step's decode rows.

    Args:
        qkvzba: `[decode rows * width, 2 key_inner + 2 value_inner + 2 value heads]` or more rows:
            output of in_proj in Megatron's order q, k, v, z, beta, alpha; bfloat16, float16 or
            float32 on a GPU; rows may be strided.
        params: the layer's parameters.
        pools: the layer's pools, changed in place.
        step: the decode rows.
        rule: when ring entries move into the state; as for `next_bases`.
        out: `[decode rows * width, value_inner]`, adjacent elements; None: made here.

    Returns:
        o `[decode rows * width, value_inner]`, dtype of `qkvzba`: before norm and gate.

    Raises:
        ValueError: sizes, dtypes or layouts do not fit each other, or a size is not served.
    """
    shape = shape_of("delta_decode", qkvzba, params, pools, rule, step.width)
    rows, width = step.row_index.numel(), step.width
    queries = queries_of(step)
    row, first, at, brought = queries
    after = step.bases[:rows, None]
    strips = queries.tokens(qkvzba)
    raw = strips[..., : shape.conv_dim]
    convolved = convolve(with_history(raw, pools.conv, row, first), params.conv_weight, None)
    q, k, v = _normalised(convolved, shape)
    beta, g = _gates(strips[..., -2 * shape.value_heads :], params, shape)

    wide = wide_dtype(qkvzba.dtype)
    state = queries.states(pools, wide)
    values, keys, gates, _gain = ring_inputs(pools, row, after, first)
    position = after + torch.arange(keys.size(1), device=keys.device)
    q_heads, k_heads = _by_head(q, shape), _by_head(k, shape)
    pseudo, outputs = [], []
    for query in range(width):
        own = ((position == at[:, query, None]) & brought[:, query, None])[..., None]
        k_own, q_own = k_heads[:, query, None], q_heads[:, query]
        keys = torch.where(own[..., None], k_own, keys)
        gates = torch.where(own, g[:, query, None], gates)
        decay = gates.cumsum(1)
        here = decay[:, -1]  # gates behind the query are 0
        share = (here[:, None] - decay).exp()
        weight = torch.einsum("rihn,rhn->rih", keys, k_heads[:, query]) * share
        found = torch.einsum("rhpn,rhn->rhp", state, k_heads[:, query]) * here.exp()[..., None]
        found = found + torch.einsum("rih,rihp->rhp", weight, values)
        u = beta[:, query, :, None] * (v[:, query].to(wide) - found)
        pseudo.append(u.to(qkvzba.dtype).flatten(1))
        values = torch.where(own[..., None], u.to(qkvzba.dtype).to(wide)[:, None], values)
        weight = torch.einsum("rihn,rhn->rih", keys, q_own) * share
        o = torch.einsum("rhpn,rhn->rhp", state, q_own) * here.exp()[..., None]
        outputs.append(o + torch.einsum("rih,rihp->rhp", weight, values))

    queries.store(pools, raw, torch.cat((torch.stack(pseudo, 1), k.flatten(2)), 2), g[:, :, None])
    y = torch.stack(outputs, 1).flatten(2)
    y = torch.where(brought[..., None], y, 0).flatten(0, 1).to(qkvzba.dtype)
    return y if out is None else out.copy_(y)


@op(gpu="recurrent.delta_prefill")
def delta_prefill(
    qkvzba: Tensor,
    params: DeltaParams,
    pools: RecurrentPools,
    rows: PrefillRows,
    base_after: Tensor,
    rule: FlushRule,
    out: Tensor | None = None,
    chunk_dest: Tensor | None = None,
) -> Tensor:
    """Convolution and scan of a step's prefill chunks: as `mamba_prefill` does them, with the state
    of Gated DeltaNet.

    Args:
        qkvzba: `[tokens, in_proj]`, as of `delta_decode`, of the prefill tokens alone.
        params, pools, rows, base_after, rule, out, chunk_dest: as of `mamba_prefill`.

    Returns:
        o `[tokens, value_inner]`, dtype of `qkvzba`: before norm and gate; 0 for padding tokens.

    Raises:
        ValueError: sizes, dtypes or layouts do not fit each other, or a size is not served.
    """
    shape = shape_of("delta_prefill", qkvzba, params, pools, rule, 1)
    wide = wide_dtype(qkvzba.dtype)

    def convolved(inputs: Tensor, read: int, first: int) -> Chunk:
        raw = with_history(inputs[:, : shape.conv_dim], pools.conv, read, first)
        q, k, v = _normalised(convolve(raw, params.conv_weight, None), shape)
        beta, g = _gates(inputs[:, -2 * shape.value_heads :], params, shape)
        q_heads, k_heads = _by_head(q, shape), _by_head(k, shape)

        def scan(state: Tensor, cut: slice) -> tuple[Tensor, Entries, Tensor, Tensor]:
            u = _pseudo_values(state, k_heads[cut], v[cut].to(wide), beta[cut], g[cut])
            u = u.to(qkvzba.dtype)
            entries = Entries(u.to(wide), k_heads[cut], g[cut], None)
            y = _outputs(state, q_heads[cut], k_heads[cut], entries.left, g[cut])
            return y, entries, torch.cat((u.flatten(1), k[cut].flatten(1)), 1), g[cut, None]

        return Chunk(raw, scan)

    return prefill_reference(
        qkvzba, pools, rows, base_after, out, chunk_dest, shape.value_inner, convolved
    )


def _pseudo_values(state: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """Pseudo values `[tokens, heads, value_dim]` of up to 128 tokens after a state: (I + A) u =
    beta (v - S k), A being what each token's key finds of those before it in the cut."""
    decay = g.cumsum(0)
    found = torch.einsum("hpn,ihn->ihp", state, k) * decay.exp()[..., None]
    right = beta[..., None] * (v - found)
    scores = torch.einsum("jhn,ihn->hji", k, k) * _shares(decay) * beta.t()[..., None]
    # The diagonal is taken as 1, and nothing above it is read.
    solved = torch.linalg.solve_triangular(
        scores, right.transpose(0, 1), upper=False, unitriangular=True
    )
    return solved.transpose(0, 1)


def _outputs(state: Tensor, q: Tensor, k: Tensor, u: Tensor, g: Tensor) -> Tensor:
    """Outputs `[tokens, heads, value_dim]` of the same tokens."""
    decay = g.cumsum(0)
    weight = torch.einsum("jhn,ihn->hji", q, k) * _shares(decay)
    o = torch.einsum("hji,ihp->jhp", weight, u)
    return o + torch.einsum("hpn,jhn->jhp", state, q) * decay.exp()[..., None]


def _shares(decay: Tensor) -> Tensor:
    """Decay of token i at token j, `[heads, j, i]`; 0 where i comes after j."""
    by_head = decay.t()
    order = torch.arange(len(decay), device=decay.device)
    behind = order > order[:, None]
    return (by_head[:, :, None] - by_head[:, None]).masked_fill(behind, -torch.inf).exp()


def _normalised(convolved: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys `[..., key heads, key_dim]`, of length key_dim**-0.5 and 1, and values
    `[..., value heads, value_dim]`, all in the dtype of `convolved`; norms in float64 for the
    reason that `convolve` gives."""
    strips = convolved.split([shape.key_inner, shape.key_inner, shape.value_inner], dim=-1)
    q, k = (strip.unflatten(-1, (shape.key_heads, -1)).to(torch.float64) for strip in strips[:2])
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + NORM_EPS) * shape.key_dim**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + NORM_EPS)
    v = strips[2].unflatten(-1, (shape.value_heads, -1))
    return q.to(convolved.dtype), k.to(convolved.dtype), v


def _gates(strip: Tensor, params: DeltaParams, shape: DeltaShape) -> tuple[Tensor, Tensor]:
    """The gates beta and g, of in_proj's last columns; in float64 for the reason that `convolve`
    gives."""
    wide = wide_dtype(strip.dtype)
    beta, alpha = strip.to(torch.float64).split(shape.value_heads, dim=-1)
    rate = params.a_log.to(torch.float64).exp()
    g = -rate * F.softplus(alpha + params.dt_bias.to(torch.float64))
    return torch.sigmoid(beta).to(wide), g.to(wide)


def _by_head(strip: Tensor, shape: DeltaShape) -> Tensor:
    """Queries or keys `[..., key heads, key_dim]` as wide `[..., value heads, key_dim]`."""
    return strip.to(wide_dtype(strip.dtype)).repeat_interleave(shape.group, dim=-2)
