"""The first kernel of Mamba-2 decode: convolution, inputs for the rings, weights of past inputs.

Behind the state, a query token's output is a weighted sum of the inputs x that the ring holds. The
weights (C of the query by B of an input, times that input's dt and the decay since) are the same
for all elements of a head, and C by B for all heads of a group. So they are made here, once, and
the second kernel (`mamba_decode.py`) reads neither B nor dt where it writes no state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options
from megatron_async.ops.recurrent.decode_convolution import convolve_into_ring
from megatron_async.ops.recurrent.mamba_groups import take_group, take_group_of_several
from megatron_async.ops.recurrent.mamba_pools import MambaParams, MambaShape
from megatron_async.ops.recurrent.recurrent_pools import FlushRule, RecurrentPools

CHANNELS = 256
"""Channels of x that a program takes."""
HEADS = 8
"""Heads of a group that a program takes: each makes B and C again, the first one keeps them."""


class DecodeInputs(NamedTuple):
    """What the second kernel reads of a step's query tokens; written for all of them."""

    c: Tensor
    """`[tokens, groups d_state]`, dtype of the activations: C behind the convolution."""
    weights: Tensor
    """float32 `[tokens, heads, window]`: of the ring's inputs from the base on."""
    decays: Tensor
    """float32 `[tokens, heads]`: what is left of the state at the query token."""


def window_of(rule: FlushRule, width: int) -> int:
    """Weights of a query token: the window of the rule, to a power of two."""
    return triton.next_power_of_2(rule.window(width))


def take_inputs(
    zxbcdt: Tensor,
    params: MambaParams,
    pools: RecurrentPools,
    row_index: Tensor,
    positions: Tensor,
    base: Tensor,
    width: int,
    rule: FlushRule,
    shape: MambaShape,
) -> DecodeInputs:
    """Put the inputs of a step's query tokens into the pools, and make what their outputs need.

    Args:
        zxbcdt: `[decode rows * width, 2 d_inner + 2 groups d_state + heads]` or more rows.
        params: the layer's parameters.
        pools: the layer's pools; rings and conv are changed in place.
        row_index: int32 or int64 `[decode rows]`: pool row of each decode row.
        positions: int64 `[decode rows * width]` or more.
        base: int32 `[decode rows]` or more: tokens that are in the state, which `flush` has
            brought there.
        width: query tokens of a row.
        rule: when inputs move into the state.
        shape: sizes of the layer.
    """
    rows, window = row_index.numel(), window_of(rule, width)
    tokens, device = rows * width, zxbcdt.device
    c = torch.empty((tokens, shape.bc_dim), dtype=zxbcdt.dtype, device=device)
    weights = torch.empty((tokens, shape.heads, window), dtype=torch.float32, device=device)
    decays = torch.empty((tokens, shape.heads), dtype=torch.float32, device=device)
    group_heads = shape.heads // shape.groups
    heads_tile = min(triton.next_power_of_2(group_heads), HEADS)
    parts = shape.groups * triton.cdiv(group_heads, heads_tile)
    _inputs_kernel[(parts + triton.cdiv(shape.d_inner, CHANNELS), rows)](
        zxbcdt,
        zxbcdt.stride(0),
        *params,
        pools.ring_xb,
        pools.ring_xb.stride(0),
        pools.ring_gates,
        pools.ring_gates.stride(0),
        pools.conv,
        pools.conv.stride(0),
        row_index,
        positions,
        base,
        c,
        weights,
        decays,
        width=width,
        heads=shape.heads,
        groups=shape.groups,
        heads_tile=heads_tile,
        d_state=shape.d_state,
        d_inner=shape.d_inner,
        ring=pools.ring_xb.size(1),
        conv_ring=pools.conv.size(1),
        window=window,
        tile=CHANNELS,
        is_exact=zxbcdt.dtype == torch.float32,
        num_warps=4,
        **launch_options(zxbcdt),
    )
    return DecodeInputs(c, weights, decays)


# Before its wait this kernel reads what steps before have left in the pools, and what the step's
# first kernels have written: all done when the product before this kernel starts, because a kernel
# behind them (the embedding's, or a norm's) lets its successor start only when it has waited.
@triton.jit(do_not_specialize_on_alignment=["row_index", "positions", "bases"])
def _inputs_kernel(
    zxbcdt: tl.tensor,
    input_stride: tl.tensor,
    conv_weight: tl.tensor,
    conv_bias: tl.tensor,
    dt_bias: tl.tensor,
    a_log: tl.tensor,
    d: tl.tensor,
    ring_xb: tl.tensor,
    xb_stride: tl.tensor,
    ring_gates: tl.tensor,
    gates_stride: tl.tensor,
    conv: tl.tensor,
    conv_stride: tl.tensor,
    row_index: tl.tensor,
    positions: tl.tensor,
    bases: tl.tensor,
    c_out: tl.tensor,
    weights: tl.tensor,
    decays: tl.tensor,
    width: tl.constexpr,
    heads: tl.constexpr,
    groups: tl.constexpr,
    heads_tile: tl.constexpr,
    d_state: tl.constexpr,
    d_inner: tl.constexpr,
    ring: tl.constexpr,
    conv_ring: tl.constexpr,
    window: tl.constexpr,
    tile: tl.constexpr,
    is_exact: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    bc_dim: tl.constexpr = groups * d_state
    xb_dim: tl.constexpr = d_inner + bc_dim
    conv_dim: tl.constexpr = xb_dim + bc_dim
    group_parts: tl.constexpr = groups * ((heads // groups + heads_tile - 1) // heads_tile)
    if part < group_parts:
        if width == 1:
            take_group(
                part,
                row,
                zxbcdt,
                input_stride,
                conv_weight,
                conv_bias,
                dt_bias,
                a_log,
                d,
                ring_xb,
                xb_stride,
                ring_gates,
                gates_stride,
                conv,
                conv_stride,
                row_index,
                positions,
                bases,
                c_out,
                weights,
                decays,
                heads,
                groups,
                heads_tile,
                d_state,
                d_inner,
                bc_dim,
                xb_dim,
                conv_dim,
                ring,
                conv_ring,
                window,
                overlap,
            )
        else:
            take_group_of_several(
                part,
                row,
                zxbcdt,
                input_stride,
                conv_weight,
                conv_bias,
                dt_bias,
                a_log,
                d,
                ring_xb,
                xb_stride,
                ring_gates,
                gates_stride,
                conv,
                conv_stride,
                row_index,
                positions,
                bases,
                c_out,
                weights,
                decays,
                width,
                heads,
                groups,
                heads_tile,
                d_state,
                d_inner,
                bc_dim,
                xb_dim,
                conv_dim,
                ring,
                conv_ring,
                window,
                is_exact,
                overlap,
            )
    else:
        convolve_into_ring(
            part - group_parts,
            row,
            zxbcdt,
            input_stride,
            conv_weight,
            conv_bias,
            ring_xb,
            xb_stride,
            conv,
            conv_stride,
            row_index,
            positions,
            width,
            d_inner,
            xb_dim,
            conv_dim,
            ring,
            conv_ring,
            tile,
            overlap,
        )
