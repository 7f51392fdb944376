"""`delta_decode` and `delta_prefill` in plain torch: what runs on a CPU, and what kernels are
tested against.

Arguments are those of the ops; the arithmetic is float32 (float64 for float64 inputs), in the same
order of thought: a decode step adds what the rings hold to what the state gives, a prefill is cut
at multiples of 128, and within a cut all pseudo values are found at once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.ops.op import op
from megatron_async.ops.recurrent.delta_pools import NORM_EPS, DeltaParams, DeltaShape, shape_of
from megatron_async.ops.recurrent.recurrent_pools import (
    CONV_WIDTH,
    GRID,
    FlushRule,
    PrefillRows,
    RecurrentPools,
    wide_dtype,
)
from megatron_async.ops.recurrent.reference_inputs import convolve, ring_inputs, with_history


@op(gpu="recurrent.delta_decode", cpu="cpu.recurrent.host_recurrent")
def delta_decode(
    qkvzba: Tensor,
    params: DeltaParams,
    pools: RecurrentPools,
    row_index: Tensor,
    positions: Tensor,
    base: Tensor,
    width: int,
    rule: FlushRule,
    out: Tensor | None = None,
) -> Tensor:
    """`delta_decode` in plain torch."""
    shape = shape_of("delta_decode", qkvzba, params, pools, rule, width)
    rows = row_index.numel()
    row = row_index.to(torch.int64)[:, None]
    after = base[:rows, None]
    given = positions[: rows * width].view(rows, width)
    first = given[:, :1]
    at = first + torch.arange(width, device=given.device)
    brought = (given == at) & (first > 0)
    strips = qkvzba[: rows * width].unflatten(0, (rows, width))
    raw = strips[..., : shape.conv_dim]
    convolved = convolve(with_history(raw, pools.conv, row, first), params.conv_weight, None)
    q, k, v = _normalised(convolved, shape)
    beta, g = _gates(strips[..., -2 * shape.value_heads :], params, shape)

    wide = wide_dtype(qkvzba.dtype)
    is_fed = (first > 0)[..., None, None]
    state = torch.where(is_fed, pools.state[row[:, 0]], 0).to(wide)
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

    ring = torch.cat((torch.stack(pseudo, 1), k.flatten(2)), 2)
    ring_g = pools.ring_gates[:, :, 0]
    for pool, entries in ((pools.conv, raw), (pools.ring_xb, ring), (ring_g, g)):
        place = row, at % pool.size(1)
        pool[place] = torch.where(brought[..., None], entries, pool[place])
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
    """`delta_prefill` in plain torch."""
    shape = shape_of("delta_prefill", qkvzba, params, pools, rule, 1)
    y = qkvzba.new_zeros(qkvzba.size(0), shape.value_inner)
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
            qkvzba[start:end], params, pools, shape, (first, read, write, bases[chunk]), own_dests
        )
    return y


def _prefill_chunk(
    qkvzba: Tensor,
    params: DeltaParams,
    pools: RecurrentPools,
    shape: DeltaShape,
    numbers: tuple[int, int, int, int],
    dests: list[int],
) -> Tensor:
    """One chunk: its first position, read row, write row and base."""
    first, read, write, base = numbers
    end = first + len(qkvzba)
    raw = with_history(qkvzba[:, : shape.conv_dim], pools.conv, read, first)
    q, k, v = _normalised(convolve(raw, params.conv_weight, None), shape)
    beta, g = _gates(qkvzba[:, -2 * shape.value_heads :], params, shape)
    wide = wide_dtype(qkvzba.dtype)
    state = pools.state[read].to(wide) if first else torch.zeros_like(pools.state[read], dtype=wide)
    q_heads, k_heads = _by_head(q, shape), _by_head(k, shape)

    def keep_inputs(behind: int, row: int) -> None:
        for position in range(max(behind + 1 - CONV_WIDTH, 0), behind):
            place = row, position % pools.conv.size(1)
            pools.conv[place] = raw[position - first + CONV_WIDTH - 1]

    outputs, at_base = [], state
    for begin in range(first // GRID * GRID, end, GRID):
        cut = slice(max(begin - first, 0), min(begin + GRID, end) - first)
        u = _pseudo_values(state, k_heads[cut], v[cut].to(wide), beta[cut], g[cut])
        u = u.to(qkvzba.dtype)
        outputs.append(_outputs(state, q_heads[cut], k_heads[cut], u.to(wide), g[cut]))
        for position in range(max(base, first + cut.start), first + cut.stop):
            place = write, position % pools.ring_xb.size(1)
            values = u[position - first - cut.start].flatten(), k[position - first].flatten()
            pools.ring_xb[place] = torch.cat(values)
            pools.ring_gates[place] = g[position - first]
        added = u.to(wide), k_heads[cut], g[cut]
        if begin <= base < begin + GRID:
            due = slice(max(base - first - cut.start, 0))
            at_base = _advance(state[None], *(part[None, due] for part in added))[0]
        state = _advance(state[None], *(part[None] for part in added))[0]
        dest = dests[begin // GRID - first // GRID] if dests else -1
        if dest >= 0 and begin + GRID <= end:
            pools.state[dest] = state
            keep_inputs(begin + GRID, dest)
    pools.state[write] = state if base == end else at_base
    keep_inputs(end, write)
    return torch.cat(outputs).flatten(1).to(qkvzba.dtype)


def _pseudo_values(state: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """Pseudo values `[tokens, heads, value_dim]` of up to 128 tokens after a state:
    (I + A) u = beta (v - S k), where A is what each token's key finds of the ones before it in the
    same cut."""
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


def _advance(state: Tensor, u: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """States `[rows, heads, value_dim, key_dim]` after entries `[rows, entries, ...]`; one whose u
    and g are 0 changes nothing."""
    decay = g.cumsum(1)
    total = decay[:, -1:] if g.size(1) else g.new_zeros(g.size(0), 1, g.size(2))
    weight = (total - decay).exp()
    added = torch.einsum("rihp,rihn->rhpn", u * weight[..., None], k)
    return state * total[:, 0].exp()[..., None, None] + added


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
