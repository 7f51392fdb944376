"""`mamba_decode` and `mamba_prefill` in plain torch: what runs on a CPU, and what kernels are
tested against.

Arguments are those of the ops; the arithmetic is float32 (float64 for float64 inputs), in the same
order of thought: a decode step adds what the rings hold to what the state gives, a scan is cut at
multiples of 128.
"""

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
    CONV_WIDTH,
    GRID,
    FlushRule,
    PrefillRows,
    RecurrentPools,
    wide_dtype,
)
from megatron_async.ops.recurrent.reference_inputs import convolve, ring_inputs, with_history


@op(gpu="recurrent.mamba_decode", cpu="cpu.recurrent.host_recurrent")
def mamba_decode(
    zxbcdt: Tensor,
    params: MambaParams,
    pools: RecurrentPools,
    row_index: Tensor,
    positions: Tensor,
    base: Tensor,
    width: int,
    rule: FlushRule,
    out: Tensor | None = None,
    gating: Gating | None = None,
) -> Tensor:
    """`mamba_decode` in plain torch."""
    shape = shape_of("mamba_decode", zxbcdt, params, pools, rule, width)
    rows = row_index.numel()
    if gating is not None:
        check_gating("mamba_decode", gating, shape, rows, width)
    row = row_index.to(torch.int64)[:, None]
    given = positions[: rows * width].view(rows, width)
    first = given[:, :1]
    at = first + torch.arange(width, device=given.device)
    brought = (given == at) & (first > 0)
    x_bc_dt = zxbcdt[: rows * width, shape.d_inner :].unflatten(0, (rows, width))
    raw, dt = x_bc_dt.split([shape.conv_dim, shape.heads], dim=2)
    xbc = convolve(with_history(raw, pools.conv, row, first), params.conv_weight, params.conv_bias)
    dt = _dt(dt, params)
    xb, c = xbc.split([shape.d_inner + shape.bc_dim, shape.bc_dim], dim=2)
    gates = torch.stack((dt * -torch.exp(params.a_log), dt), 2)
    for pool, values in ((pools.conv, raw), (pools.ring_xb, xb), (pools.ring_gates, gates)):
        place = row, at % pool.size(1)
        is_new = brought.view(*brought.shape, *(1,) * (pool.dim() - 2))
        pool[place] = torch.where(is_new, values, pool[place])

    wide = wide_dtype(zxbcdt.dtype)
    is_fed = (first > 0)[..., None, None]
    state = torch.where(is_fed, pools.state[row[:, 0]], 0).to(wide)
    after = base[:rows, None]
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
    """`mamba_prefill` in plain torch."""
    shape = shape_of("mamba_prefill", zxbcdt, params, pools, rule, 1)
    y = torch.zeros((zxbcdt.size(0), shape.d_inner), dtype=zxbcdt.dtype, device=zxbcdt.device)
    y = y if out is None else out.zero_()
    numbers = torch.stack(
        (rows.starts[:-1], rows.starts[1:], rows.first_positions, rows.read_rows, rows.write_rows)
    )
    bases = base_after.tolist()
    dests = [] if chunk_dest is None else chunk_dest.tolist()
    for chunk, (start, end, first, read, write) in enumerate(numbers.t().tolist()):
        if start == end:
            continue
        count = -(-(first + end - start) // GRID) - first // GRID
        own_dests, dests = dests[:count], dests[count:]
        y[start:end] = _prefill_chunk(
            zxbcdt[start:end], params, pools, shape, (first, read, write, bases[chunk]), own_dests
        )
    return y


def _prefill_chunk(
    zxbcdt: Tensor,
    params: MambaParams,
    pools: RecurrentPools,
    shape: MambaShape,
    numbers: tuple[int, int, int, int],
    dests: list[int],
) -> Tensor:
    """One chunk: its first position, read row, write row and base."""
    first, read, write, base = numbers
    end = first + len(zxbcdt)
    raw, dt = zxbcdt[:, shape.d_inner :].split([shape.conv_dim, shape.heads], dim=1)
    raw = with_history(raw, pools.conv, read, first)
    xbc, dt = convolve(raw, params.conv_weight, params.conv_bias), _dt(dt, params)
    xb, c = xbc.split([shape.d_inner + shape.bc_dim, shape.bc_dim], dim=1)
    x, b = xb.split([shape.d_inner, shape.bc_dim], dim=1)
    wide = wide_dtype(zxbcdt.dtype)
    x, b = x.unflatten(1, (shape.heads, -1)).to(wide), _by_head(b, shape)
    c = _by_head(c, shape)
    rate = -torch.exp(params.a_log)
    state = pools.state[read].to(wide) if first else torch.zeros_like(pools.state[read], dtype=wide)

    def keep_inputs(behind: int, row: int) -> None:
        for position in range(max(behind + 1 - CONV_WIDTH, 0), behind):
            place = row, position % pools.conv.size(1)
            pools.conv[place] = raw[position - first + CONV_WIDTH - 1]

    outputs, at_base = [], state
    for begin in range(first // GRID * GRID, end, GRID):
        cut = slice(max(begin - first, 0), min(begin + GRID, end) - first)
        outputs.append(_scan(state, x[cut], b[cut], dt[cut], c[cut], rate))
        if begin <= base < begin + GRID:
            due = slice(cut.start, base - first)
            at_base = _advance(state[None], x[None, due], b[None, due], dt[None, due], rate)[0]
        state = _advance(state[None], x[None, cut], b[None, cut], dt[None, cut], rate)[0]
        dest = dests[begin // GRID - first // GRID] if dests else -1
        if dest >= 0 and begin + GRID <= end:
            pools.state[dest] = state
            keep_inputs(begin + GRID, dest)
    pools.state[write] = state if base == end else at_base
    for position in range(base, end):
        place = write, position % pools.ring_xb.size(1)
        own = dt[position - first]
        pools.ring_xb[place] = xb[position - first]
        pools.ring_gates[place] = torch.stack((own * rate, own))
    keep_inputs(end, write)
    y = torch.cat(outputs) + x * params.d[:, None]
    return y.flatten(1).to(zxbcdt.dtype)


def _scan(state: Tensor, x: Tensor, b: Tensor, dt: Tensor, c: Tensor, rate: Tensor) -> Tensor:
    """Outputs `[tokens, heads, head_dim]` of up to 128 tokens after a state."""
    decay = (dt * rate).cumsum(0)
    order = torch.arange(len(dt), device=dt.device)
    seen = (order <= order[:, None])[..., None]
    share = (decay[:, None] - decay).masked_fill(~seen, -torch.inf).exp()
    weight = torch.einsum("jhn,ihn->jih", c, b) * share * dt
    y = torch.einsum("jih,ihp->jhp", weight, x)
    return y + torch.einsum("hpn,jhn->jhp", state, c) * decay.exp()[..., None]


def _advance(state: Tensor, x: Tensor, b: Tensor, dt: Tensor, rate: Tensor) -> Tensor:
    """States `[rows, heads, head_dim, d_state]` after inputs `[rows, entries, ...]`; an entry
    whose dt is 0 changes nothing."""
    decay = (dt * rate).cumsum(1)
    total = decay[:, -1:] if dt.size(1) else dt.new_zeros(dt.size(0), 1, dt.size(2))
    weight = (total - decay).exp() * dt
    added = torch.einsum("rihp,rihn->rhpn", x * weight[..., None], b)
    return state * total[:, 0].exp()[..., None, None] + added


def _dt(dt: Tensor, params: MambaParams) -> Tensor:
    """The step dt after bias and softplus; in float64 for the reason that `convolve` gives."""
    value = dt.to(torch.float64) + params.dt_bias.to(torch.float64)
    return F.softplus(value).to(wide_dtype(dt.dtype))


def _by_head(strip: Tensor, shape: MambaShape) -> Tensor:
    """B or C `[..., groups d_state]` as wide `[..., heads, d_state]`."""
    by_group = strip.unflatten(-1, (shape.groups, shape.d_state)).to(wide_dtype(strip.dtype))
    return by_group.repeat_interleave(shape.heads // shape.groups, dim=-2)
