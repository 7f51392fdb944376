"""`mamba_decode` and `mamba_prefill` in plain torch: what they mean, what runs on a CPU, and what
kernels are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.ops.op import op
from megatron_async.ops.recurrent.mamba_pools import (
    LANES,
    Gating,
    MambaParams,
    MambaShape,
    check_gating,
    shape_of,
)
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


@op(gpu="recurrent.mamba_decode", cpu="recurrent.cpu.host_recurrent")
def mamba_decode(
    zxbcdt: Tensor,
    params: MambaParams,
    pools: RecurrentPools,
    step: DecodeRows,
    rule: FlushRule,
    out: Tensor | None = None,
    gating: Gating | None = None,
) -> Tensor:
    """Convolution and recurrence of a step's decode rows.

    Args:
        zxbcdt: `[decode rows * width, 2 d_inner + 2 groups d_state + heads]` or more rows: output
            of in_proj in Megatron's order z, x, B, C, dt; bfloat16, float16 or float32 on a GPU;
            rows may be strided.
        params: the layer's parameters.
        pools: the layer's pools, changed in place.
        step: the decode rows.
        rule: when inputs move into the state; as for `next_bases`.
        out: `[decode rows * width, d_inner]`, adjacent elements; None: made here.
        gating: gate the outputs; of rows of one query token.

    Returns:
        y `[decode rows * width, d_inner]`, dtype of `zxbcdt`: before gate and norm, or as `gating`
        says.

    Raises:
        ValueError: sizes, dtypes or layouts do not fit each other.
    """
    shape = shape_of("mamba_decode", zxbcdt, params, pools, rule, step.width)
    rows = step.row_index.numel()
    if gating is not None:
        check_gating("mamba_decode", gating, shape, rows, step.width)
    queries = queries_of(step)
    row, first, at, brought = queries
    raw, dt = queries.tokens(zxbcdt)[..., shape.d_inner :].split([shape.conv_dim, shape.heads], 2)
    xbc = convolve(with_history(raw, pools.conv, row, first), params.conv_weight, params.conv_bias)
    dt = _dt(dt, params)
    xb, c = xbc.split([shape.ring_dim, shape.bc_dim], dim=2)
    queries.store(pools, raw, xb, torch.stack((dt * -torch.exp(params.a_log), dt), 2))

    wide = wide_dtype(zxbcdt.dtype)
    state = queries.states(pools, wide)
    after = step.bases[:rows, None]
    end = first + brought.sum(1, keepdim=True)
    x, b, decay, dt = ring_inputs(pools, row, after, end)
    decay = decay.cumsum(1)
    position = after + torch.arange(x.size(1), device=x.device)
    seen = position[:, None] <= at[..., None]  # [rows, query, entry]
    last = (seen.sum(2) - 1).clamp(min=0)
    here = decay.gather(1, last[..., None].expand(-1, -1, shape.heads))  # [rows, query, heads]
    share = (here[:, :, None] - decay[:, None]).masked_fill(~seen[..., None], -torch.inf).exp()
    c = _by_head(c, shape)
    weight = torch.einsum("rjhn,rihn->rjih", c, b) * share * dt[:, None]
    y = torch.einsum("rjih,rihp->rjhp", weight, x)
    y += torch.einsum("rhpn,rjhn->rjhp", state, c) * here.exp()[..., None]
    own = xb[..., : shape.d_inner].unflatten(2, (shape.heads, -1)).to(wide)
    y = (y + own * params.d[:, None]).flatten(2)
    y = torch.where(brought[..., None], y, 0).flatten(0, 1)
    if gating is not None:
        y = _gate(y, zxbcdt[:rows, : shape.d_inner], gating, shape)
    y = y.to(zxbcdt.dtype)
    return y if out is None else out.copy_(y)


def _gate(y: Tensor, gate: Tensor, gating: Gating, shape: MambaShape) -> Tensor:
    y = y * F.silu(gate.to(y.dtype))
    parts = [part.sum(2) for part in y.square().unflatten(1, (shape.heads, -1)).split(LANES, 2)]
    gating.squares.copy_(torch.stack(parts, 2).view(gating.squares.shape))
    return y * gating.weight.to(y.dtype)


@op(gpu="recurrent.mamba_prefill")
def mamba_prefill(
    zxbcdt: Tensor,
    params: MambaParams,
    pools: RecurrentPools,
    rows: PrefillRows,
    base_after: Tensor,
    rule: FlushRule,
    out: Tensor | None = None,
    chunk_dest: Tensor | None = None,
) -> Tensor:
    """Convolution and scan of a step's prefill chunks.

    A chunk that does not begin its request starts from the state and the last inputs in its read
    row. Its write row gets the state at `base_after`, the ring's inputs from there to the chunk's
    end, and the last three inputs of the convolution. Scans are cut at multiples of 128 of a
    request's own positions, so with a float32 state a prompt that is cut there gives the same bits
    as one that is not.

    Args:
        zxbcdt: `[tokens, 2 d_inner + 2 groups d_state + heads]`, output of in_proj in Megatron's
            order z, x, B, C, dt, of the prefill tokens alone; bfloat16, float16 or float32 on a
            GPU; rows may be strided.
        params: the layer's parameters.
        pools: the layer's pools, changed in place.
        rows: the step's chunks.
        base_after: int32 `[chunks]`, of `next_bases`.
        rule: when inputs move into the state; as for `next_bases`.
        out: `[tokens, d_inner]`, adjacent elements; None: made here.
        chunk_dest: int32 `[scan chunks]`: the pool row that gets the state at the end of each scan
            chunk that ends at a multiple of 128, and the three inputs before it; -1: none does. A
            chunk of tokens s to e - 1 has ceil(e / 128) - floor(s / 128) scan chunks; they are
            counted through all chunks. The rows are no other chunk's read or write row.

    Returns:
        y `[tokens, d_inner]`, dtype of `zxbcdt`: before gate and norm; 0 for padding tokens.

    Raises:
        ValueError: sizes, dtypes or layouts do not fit each other.
    """
    shape = shape_of("mamba_prefill", zxbcdt, params, pools, rule, 1)
    wide, rate = wide_dtype(zxbcdt.dtype), -torch.exp(params.a_log)

    def convolved(inputs: Tensor, read: int, first: int) -> Chunk:
        raw, dt = inputs[:, shape.d_inner :].split([shape.conv_dim, shape.heads], dim=1)
        raw = with_history(raw, pools.conv, read, first)
        xbc, dt = convolve(raw, params.conv_weight, params.conv_bias), _dt(dt, params)
        xb, c = xbc.split([shape.ring_dim, shape.bc_dim], dim=1)
        x, b = xb.split([shape.d_inner, shape.bc_dim], dim=1)
        x, b = x.unflatten(1, (shape.heads, -1)).to(wide), _by_head(b, shape)
        c, g = _by_head(c, shape), dt * rate
        gates = torch.stack((g, dt), 1)

        def scan(state: Tensor, cut: slice) -> tuple[Tensor, Entries, Tensor, Tensor]:
            y = _scan(state, x[cut], b[cut], dt[cut], c[cut], g[cut]) + x[cut] * params.d[:, None]
            return y, Entries(x[cut], b[cut], g[cut], dt[cut]), xb[cut], gates[cut]

        return Chunk(raw, scan)

    return prefill_reference(
        zxbcdt, pools, rows, base_after, out, chunk_dest, shape.d_inner, convolved
    )


def _scan(state: Tensor, x: Tensor, b: Tensor, dt: Tensor, c: Tensor, g: Tensor) -> Tensor:
    """Outputs `[tokens, heads, head_dim]` of up to 128 tokens after a state."""
    decay = g.cumsum(0)
    order = torch.arange(len(dt), device=dt.device)
    seen = (order <= order[:, None])[..., None]
    share = (decay[:, None] - decay).masked_fill(~seen, -torch.inf).exp()
    weight = torch.einsum("jhn,ihn->jih", c, b) * share * dt
    y = torch.einsum("jih,ihp->jhp", weight, x)
    return y + torch.einsum("hpn,jhn->jhp", state, c) * decay.exp()[..., None]


def _dt(dt: Tensor, params: MambaParams) -> Tensor:
    """The step dt after bias and softplus; in float64 for the reason that `convolve` gives."""
    value = dt.to(torch.float64) + params.dt_bias.to(torch.float64)
    return F.softplus(value).to(wide_dtype(dt.dtype))


def _by_head(strip: Tensor, shape: MambaShape) -> Tensor:
    """B or C `[..., groups d_state]` as wide `[..., heads, d_state]`."""
    by_group = strip.unflatten(-1, (shape.groups, shape.d_state)).to(wide_dtype(strip.dtype))
    return by_group.repeat_interleave(shape.heads // shape.groups, dim=-2)
