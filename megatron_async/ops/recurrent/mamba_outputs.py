"""The second kernel of Mamba-2 decode for bfloat16 activations: outputs by the matrix units.

A query token's output is its C times the state, and weights times the inputs since. Both are
products with up to eight columns, one for each query token: so the state is read once, as the
fragments that the matrix units take, and more tokens cost nothing that shows. (Sums by threads, as
in `mamba_decode.py`, take five shuffles for four elements of the state and each token.)

Neither the state nor the weights may lose bits: each float32 is multiplied as two bfloat16 parts,
which together have 16 bits of it. C and the inputs are bfloat16 already.

Written in Gluon, for the reason that `ops/linear/resident.py` gives.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from megatron_async.ops.dependent_launch import launch_options
from megatron_async.ops.recurrent.mamba_inputs import DecodeInputs
from megatron_async.ops.recurrent.mamba_pools import MambaShape
from megatron_async.ops.recurrent.recurrent_pools import DecodeRows, RecurrentPools

WARPS = 2
"""Warps of a program; each processes 16 lanes of a head."""
MAX_STATE = 128
"""Longest state of a lane that the registers of a warp hold."""


def outputs_by_matrix_units(
    inputs: DecodeInputs,
    pools: RecurrentPools,
    step: DecodeRows,
    shape: MambaShape,
    out: Tensor,
    warps: int = WARPS,
) -> None:
    """Outputs `[decode rows * width, d_inner]`, bfloat16, of a step's decode rows after
    `take_inputs`."""
    tiles = triton.cdiv(shape.head_dim, 16 * warps)
    _products_kernel[(shape.heads * tiles, step.row_index.numel())](
        inputs,
        pools,
        pools.strides,
        *step[:3],
        out,
        out.stride(0),
        shape=shape,
        width=step.width,
        ring=pools.ring_xb.size(1),
        window=inputs.weights.size(2),
        warps=warps,
        num_warps=warps,
        **launch_options(out),
    )


@gluon.jit
def _split(x: gl.tensor) -> gl.tensor:
    """A float32 as two bfloat16 parts, whose sum is x to 2^-17."""
    high = x.to(gl.bfloat16)
    return high, (x - high.to(gl.float32)).to(gl.bfloat16)


@gluon.jit(do_not_specialize_on_alignment=["row_index", "positions", "bases", "out"])
def _products_kernel(
    inputs: gl.tuple,
    pools: gl.tuple,
    strides: gl.tuple,
    row_index: gl.tensor,
    positions: gl.tensor,
    bases: gl.tensor,
    out: gl.tensor,
    out_stride: gl.tensor,
    shape: gl.constexpr,
    width: gl.constexpr,
    ring: gl.constexpr,
    window: gl.constexpr,
    warps: gl.constexpr,
    overlap: gl.constexpr,
) -> None:
    heads: gl.constexpr = shape.heads
    head_dim: gl.constexpr = shape.head_dim
    d_state: gl.constexpr = shape.d_state
    bc_dim: gl.constexpr = shape.bc_dim
    lanes: gl.constexpr = 16 * warps
    tokens: gl.constexpr = 8  # columns of the matrix units' product
    tiles: gl.constexpr = (head_dim + lanes - 1) // lanes
    xb_dim: gl.constexpr = shape.ring_dim
    product: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])
    # Adjacent elements that a thread takes: 16 bytes of the state. With 32, in two loads, each load
    # would use half of what it fetches.
    wide: gl.constexpr = min(d_state // 8, 128 // pools.state.dtype.element_ty.primitive_bitwidth)
    states: gl.constexpr = gl.DotOperandLayout(0, product, wide)
    queries: gl.constexpr = gl.DotOperandLayout(1, product, wide)
    values: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    shares: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    head, part = gl.program_id(0) // tiles, gl.program_id(0) % tiles
    row = gl.program_id(1).to(gl.int64)
    group = head // shape.group_heads
    # No kernel of this step's layers writes what is read before the wait, as in `mamba_decode.py`.
    pool_row = gl.load(row_index + row).to(gl.int64)
    first = gl.load(positions + row * width).to(gl.int32)
    base = gl.load(bases + row)
    lane = part * lanes + gl.arange(0, lanes, layout=gl.SliceLayout(1, states))[:, None]
    column = gl.arange(0, d_state, layout=gl.SliceLayout(0, states))[None, :]
    place = pools.state + pool_row * strides.state + head * (head_dim * d_state)
    is_state = (lane < head_dim) & (first > 0)
    s = gl.load(place + lane * d_state + column, mask=is_state, other=0.0, cache_modifier=".cg")
    if overlap:
        gdc_wait()
        gdc_launch_dependents()
    # Query tokens that count: the first ones.
    count = (first > 0).to(gl.int32)
    for query in gl.static_range(1, width):
        follows = gl.load(positions + row * width + query).to(gl.int32) == first + query
        count += ((first > 0) & follows).to(gl.int32)
    token = gl.arange(0, tokens, layout=gl.SliceLayout(0, queries))[None, :]
    column = gl.arange(0, d_state, layout=gl.SliceLayout(1, queries))[:, None]
    place = inputs.c + (row * width + token) * bc_dim + group * d_state + column
    c = gl.load(place, mask=token < width, other=0.0)
    lane = part * lanes + gl.arange(0, lanes, layout=gl.SliceLayout(1, values))[:, None]
    since = gl.arange(0, window, layout=gl.SliceLayout(0, values))[None, :]
    place = pools.ring_xb + pool_row * strides.ring_xb + ((base + since) % ring) * xb_dim
    is_input = (base + since < first + count) & (lane < head_dim)
    x = gl.load(place + head * head_dim + lane, mask=is_input, other=0.0)
    token = gl.arange(0, tokens, layout=gl.SliceLayout(0, shares))[None, :]
    since = gl.arange(0, window, layout=gl.SliceLayout(1, shares))[:, None]
    place = inputs.weights + ((row * width + token) * heads + head) * window + since
    share = gl.load(place, mask=token < width, other=0.0)
    lane = part * lanes + gl.arange(0, lanes, layout=gl.SliceLayout(1, product))[:, None]
    token = gl.arange(0, tokens, layout=gl.SliceLayout(0, product))[None, :]
    place = inputs.decays + (row * width + token) * heads + head
    decay = gl.load(place, mask=token < width, other=0.0)

    y = gl.zeros([lanes, tokens], gl.float32, layout=product)
    if s.dtype == gl.float32:
        high, low = _split(s)
        y = mma_v2(high, c, y)
        y = mma_v2(low, c, y)
    else:
        y = mma_v2(s, c, y)
    y = y * decay
    high, low = _split(share)
    y = mma_v2(x, high, y)
    y = mma_v2(x, low, y)
    y = gl.where(token < count, y, 0.0)
    place = out + (row * width + token) * out_stride + head * head_dim + lane
    gl.store(place, y.to(out.dtype.element_ty), mask=(lane < head_dim) & (token < width))
