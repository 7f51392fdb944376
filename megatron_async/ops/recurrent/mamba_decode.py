"""Mamba-2 decode: one to eight query tokens a row against the row's state and the last inputs.

Mamba-2: Dao and Gu 2024. That the state is read once and written every few tokens, with the inputs
since in a ring, is ReplaySSM's (Dao AI Lab and NVIDIA 2026). Two kernels: the first takes a row's
convolution and puts its inputs into the rings; the second takes a tile of one head's state, brings
it to the step's base where inputs are due (`FlushRule`), and adds what the rings hold. All that a
step reads lies at or before its own positions, so running a step again gives the same bits, also
if it wrote the state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.recurrent.mamba_pools import (
    MAX_WIDTH,
    FlushRule,
    MambaParams,
    MambaPools,
    MambaShape,
    shape_of,
)
from megatron_async.ops.recurrent.recurrent_math import silu, softplus

CHANNELS = 512
"""Channels of a convolution's program."""
STATE_TILE = 4096
"""Elements of the state that a program holds in registers."""
FEW_PROGRAMS = 264
"""Two for each processor of an H200: with fewer, smaller tiles are read faster."""
UNROLL = 4
"""Inputs that are asked for together when the state is written."""


def mamba_decode(
    zxbcdt: Tensor,
    params: MambaParams,
    pools: MambaPools,
    row_index: Tensor,
    positions: Tensor,
    base_before: Tensor,
    base_after: Tensor,
    width: int,
    rule: FlushRule,
    out: Tensor | None = None,
) -> Tensor:
    """Convolution and recurrence of a step's decode rows.

    Args:
        zxbcdt: `[decode rows * width, 2 d_inner + 2 groups d_state + heads]` or more rows: output
            of in_proj in Megatron's order z, x, B, C, dt; bfloat16, float16 or float32 on a GPU;
            rows may be strided.
        params: the layer's parameters.
        pools: the layer's pools, changed in place.
        row_index: int32 or int64 `[decode rows]`: pool row of each decode row, all different but
            for the dummy row.
        positions: int64 `[decode rows * width]` or more. Query tokens that do not follow the row's
            first are padding, and so are all where the first is 0: they write nothing and give 0.
        base_before, base_after: int32 `[decode rows]` or more, of `next_bases`.
        width: query tokens of a row, 1 to 8.
        rule: when inputs move into the state; that of `next_bases`.
        out: `[decode rows * width, d_inner]`, adjacent elements; None: made here.

    Returns:
        y `[decode rows * width, d_inner]`, dtype of `zxbcdt`: before gate and norm.

    Raises:
        ValueError: sizes, dtypes or layouts do not fit each other.
    """
    shape = _check("mamba_decode", zxbcdt, params, pools, row_index, positions, width, rule)
    rows = row_index.numel()
    if base_before.numel() < rows or base_after.numel() < rows:
        raise ValueError(
            f"mamba_decode: {rows} rows want as many bases before and after; found "
            f"{base_before.numel()} and {base_after.numel()}: pass what next_bases returned."
        )
    out = _output(out, zxbcdt, rows * width, shape)
    if not rows:
        return out
    c = torch.empty((rows * width, shape.bc_dim), dtype=zxbcdt.dtype, device=zxbcdt.device)
    sizes = {
        "width": width,
        "heads": shape.heads,
        "ring": pools.ring_xb.size(1),
        "d_inner": shape.d_inner,
        "bc_dim": shape.bc_dim,
    }
    options = launch_options(zxbcdt)
    rings = (pools.ring_xb, pools.ring_xb.stride(0), pools.ring_dt, pools.ring_dt.stride(0))
    _inputs_kernel[(triton.cdiv(shape.conv_dim, CHANNELS), rows)](
        zxbcdt,
        zxbcdt.stride(0),
        params.conv_weight,
        params.conv_bias,
        params.dt_bias,
        *rings,
        pools.conv,
        pools.conv.stride(0),
        row_index,
        positions,
        c,
        conv_ring=pools.conv.size(1),
        heads_tile=triton.next_power_of_2(shape.heads),
        tile=CHANNELS,
        **sizes,
        num_warps=4,
        **options,
    )
    tile = state_tile(rows, shape)
    _outputs_kernel[(shape.heads * triton.cdiv(shape.head_dim, tile), rows)](
        c,
        *rings,
        pools.state,
        pools.state.stride(0),
        params.a_log,
        params.d,
        row_index,
        positions,
        base_before,
        base_after,
        out,
        out.stride(0),
        head_dim=shape.head_dim,
        d_state=shape.d_state,
        tile=tile,
        window=triton.next_power_of_2(rule.window(width)),
        unroll=UNROLL,
        **sizes,
        num_warps=4,
        **options,
    )
    return out


def state_tile(rows: int, shape: MambaShape) -> int:
    """How much of a head's dimension a program takes.

    Args:
        rows: decode rows.
        shape: sizes of the layer.
    """
    largest = max(min(64, STATE_TILE // shape.d_state), 16)
    if rows * shape.heads * triton.cdiv(shape.head_dim, largest) < FEW_PROGRAMS:
        return 16
    tile = largest
    # Lanes behind the head's end do nothing.
    while tile > 16 and triton.cdiv(shape.head_dim, tile) * tile > 1.25 * shape.head_dim:
        tile //= 2
    return tile


def _check(
    op: str,
    zxbcdt: Tensor,
    params: MambaParams,
    pools: MambaPools,
    row_index: Tensor,
    positions: Tensor,
    width: int,
    rule: FlushRule,
) -> MambaShape:
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"{op}: rows have 1 to {MAX_WIDTH} query tokens, not {width}.")
    tokens = row_index.numel() * width
    if zxbcdt.size(0) < tokens or positions.numel() < tokens:
        raise ValueError(
            f"{op}: {row_index.numel()} rows of {width} query tokens want {tokens} input rows and "
            f"positions; found {zxbcdt.size(0)} and {positions.numel()}."
        )
    return shape_of(op, zxbcdt, params, pools, rule, width)


def _output(out: Tensor | None, zxbcdt: Tensor, tokens: int, shape: MambaShape) -> Tensor:
    if out is None:
        return torch.empty((tokens, shape.d_inner), dtype=zxbcdt.dtype, device=zxbcdt.device)
    if out.shape != (tokens, shape.d_inner) or out.stride(1) != 1 or out.dtype != zxbcdt.dtype:
        raise ValueError(
            f"mamba_decode: out must be ({tokens}, {shape.d_inner}) of {zxbcdt.dtype} with adjacent"
            f" elements; found {tuple(out.shape)} of {out.dtype}, strides {out.stride()}."
        )
    return out


@triton.jit(do_not_specialize_on_alignment=["row_index", "positions"])
def _inputs_kernel(
    zxbcdt: tl.tensor,
    input_stride: tl.tensor,
    conv_weight: tl.tensor,
    conv_bias: tl.tensor,
    dt_bias: tl.tensor,
    ring_xb: tl.tensor,
    xb_stride: tl.tensor,
    ring_dt: tl.tensor,
    dt_stride: tl.tensor,
    conv: tl.tensor,
    conv_stride: tl.tensor,
    row_index: tl.tensor,
    positions: tl.tensor,
    c_out: tl.tensor,
    width: tl.constexpr,
    heads: tl.constexpr,
    heads_tile: tl.constexpr,
    ring: tl.constexpr,
    conv_ring: tl.constexpr,
    d_inner: tl.constexpr,
    bc_dim: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    conv_dim: tl.constexpr = d_inner + 2 * bc_dim
    xb_dim: tl.constexpr = d_inner + bc_dim
    channel = part * tile + tl.arange(0, tile)
    inside = channel < conv_dim
    weight = conv_weight + channel * 4
    weight_0 = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    weight_1 = tl.load(weight + 1, mask=inside, other=0.0).to(tl.float32)
    weight_2 = tl.load(weight + 2, mask=inside, other=0.0).to(tl.float32)
    weight_3 = tl.load(weight + 3, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(conv_bias + channel, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(overlap)
    pool_row = tl.load(row_index + row).to(tl.int64)
    first = tl.load(positions + row * width).to(tl.int32)
    # Raw inputs of the three tokens before; none before position 0.
    kept = conv + pool_row * conv_stride + channel
    place = kept + (tl.maximum(first - 3, 0) % conv_ring) * conv_dim
    input_0 = tl.load(place, mask=inside & (first >= 3), other=0.0).to(tl.float32)
    place = kept + (tl.maximum(first - 2, 0) % conv_ring) * conv_dim
    input_1 = tl.load(place, mask=inside & (first >= 2), other=0.0).to(tl.float32)
    place = kept + (tl.maximum(first - 1, 0) % conv_ring) * conv_dim
    input_2 = tl.load(place, mask=inside & (first >= 1), other=0.0).to(tl.float32)
    head = tl.arange(0, heads_tile)
    for query in tl.static_range(width):
        token = row * width + query
        position = first + query
        brought = (first > 0) & (tl.load(positions + token).to(tl.int32) == position)
        source = zxbcdt + token * input_stride + d_inner
        raw = tl.load(source + channel, mask=inside, other=0.0)
        input_3 = raw.to(tl.float32)
        tl.store(kept + (position % conv_ring) * conv_dim, raw, mask=inside & brought)
        value = bias + weight_0 * input_0 + weight_1 * input_1
        value = silu(value + weight_2 * input_2 + weight_3 * input_3).to(raw.dtype)
        entry = position % ring
        place = ring_xb + pool_row * xb_stride + entry * xb_dim + channel
        tl.store(place, value, mask=(channel < xb_dim) & brought)
        place = c_out + token * bc_dim + channel - xb_dim
        tl.store(place, value, mask=(channel >= xb_dim) & inside)
        input_0, input_1, input_2 = input_1, input_2, input_3
        if part == 0:
            dt = tl.load(source + conv_dim + head, mask=head < heads, other=0.0).to(tl.float32)
            dt += tl.load(dt_bias + head, mask=head < heads, other=0.0).to(tl.float32)
            dt_place = ring_dt + pool_row * dt_stride + entry * heads + head
            tl.store(dt_place, softplus(dt), mask=(head < heads) & brought)


@triton.jit(
    do_not_specialize_on_alignment=["row_index", "positions", "base_before", "base_after", "out"]
)
def _outputs_kernel(
    c_in: tl.tensor,
    ring_xb: tl.tensor,
    xb_stride: tl.tensor,
    ring_dt: tl.tensor,
    dt_stride: tl.tensor,
    state: tl.tensor,
    state_stride: tl.tensor,
    a_log: tl.tensor,
    d: tl.tensor,
    row_index: tl.tensor,
    positions: tl.tensor,
    base_before: tl.tensor,
    base_after: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    width: tl.constexpr,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    d_state: tl.constexpr,
    ring: tl.constexpr,
    d_inner: tl.constexpr,
    bc_dim: tl.constexpr,
    tile: tl.constexpr,
    window: tl.constexpr,
    unroll: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    tiles: tl.constexpr = (head_dim + tile - 1) // tile
    xb_dim: tl.constexpr = d_inner + bc_dim
    head, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tl.program_id(1).to(tl.int64)
    group = head // (heads * d_state // bc_dim)
    lane = part * tile + tl.arange(0, tile)
    inside = lane < head_dim
    column = tl.arange(0, d_state)
    # Nothing that is read before the wait is written in this step by the kernel before, and the
    # ones before that are done.
    pool_row = tl.load(row_index + row).to(tl.int64)
    first = tl.load(positions + row * width).to(tl.int32)
    before, after = tl.load(base_before + row), tl.load(base_after + row)
    place = state + pool_row * state_stride + head * (head_dim * d_state)
    place = place + lane[:, None] * d_state + column[None, :]
    loaded = inside[:, None] & (first > 0)
    stored = tl.load(place, mask=loaded, other=0.0, cache_modifier=".cg")
    s = stored.to(tl.float32)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    through = tl.load(d + head).to(tl.float32)
    wait_for_previous(overlap)

    x_ring = ring_xb + pool_row * xb_stride + head * head_dim + lane
    b_ring = ring_xb + pool_row * xb_stride + d_inner + group * d_state + column
    dt_ring = ring_dt + pool_row * dt_stride + head
    if (first > 0) & (after > before):
        for begin in range(before, after, unroll):
            for step in tl.static_range(unroll):
                position = begin + step
                due = position < after
                entry = position % ring
                dt = tl.load(dt_ring + entry * heads, mask=due, other=0.0)
                x = tl.load(x_ring + entry * xb_dim, mask=inside & due, other=0.0).to(tl.float32)
                b = tl.load(b_ring + entry * xb_dim, mask=due, other=0.0).to(tl.float32)
                s = s * tl.exp(dt * rate) + (dt * x)[:, None] * b[None, :]
        # As a later step will read it.
        s = s.to(stored.dtype).to(tl.float32)
        tl.store(place, s.to(stored.dtype), mask=loaded)

    # Query tokens that count: the first ones.
    count = (first > 0).to(tl.int32)
    for query in tl.static_range(1, width):
        follows = tl.load(positions + row * width + query).to(tl.int32) == first + query
        count += ((first > 0) & follows).to(tl.int32)
    position = after + tl.arange(0, window)
    exists = position < first + count
    entry = position % ring
    dt = tl.load(dt_ring + entry * heads, mask=exists, other=0.0)
    x_place = ring_xb + pool_row * xb_stride + head * head_dim + lane[None, :]
    b_place = ring_xb + pool_row * xb_stride + d_inner + group * d_state + column[None, :]
    x = tl.load(x_place + entry[:, None] * xb_dim, exists[:, None] & inside[None, :], other=0.0)
    b = tl.load(b_place + entry[:, None] * xb_dim, exists[:, None], other=0.0)
    x, b = x.to(tl.float32), b.to(tl.float32)
    decay = tl.cumsum(dt * rate, 0)
    for query in tl.static_range(width):
        token = row * width + query
        c = tl.load(c_in + token * bc_dim + group * d_state + column).to(tl.float32)
        own = position == first + query
        seen = exists & (position <= first + query)
        decay_here = tl.sum(tl.where(own, decay, 0.0), 0)
        weight = tl.sum(b * c[None, :], 1) * dt
        weight = tl.where(seen, weight * tl.exp(tl.where(seen, decay_here - decay, 0.0)), 0.0)
        weight = tl.where(own, weight + through, weight)
        y = tl.sum(s * c[None, :], 1) * tl.exp(decay_here)
        y += tl.sum(x * weight[:, None], 0)
        y = tl.where(query < count, y, 0.0)
        target = out + token * out_stride + head * head_dim + lane
        tl.store(target, y.to(out.dtype.element_ty), mask=inside)
