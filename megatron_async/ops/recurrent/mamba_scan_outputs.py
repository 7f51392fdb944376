"""Outputs of prefill chunks, all blocks of tokens at once, from the states before them.

A block's outputs are C times the state before it, and a masked product of its tokens with each
other (Dao and Gu 2024). C by B is the same for all heads of a group: a program makes it once for
several of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.recurrent.mamba_pools import MambaParams, MambaShape
from megatron_async.ops.recurrent.recurrent_pools import PrefillRows

MANY_PROGRAMS = 264
"""Programs that keep an H200 busy: with fewer, each takes fewer heads."""
MOST_HEADS = 4
"""Heads of a program."""


def scan_block(dtype: torch.dtype, shape: MambaShape) -> int:
    """Tokens of a block, a divisor of 128: by the layer only, so that a prompt gives the same bits
    whatever the batch."""
    if dtype == torch.float32:
        return 32  # no matrix units: products of large blocks fill the registers
    return 128 if shape.d_state <= 128 else 64


def scan_outputs(
    xbc: Tensor,
    dt: Tensor,
    states: Tensor,
    params: MambaParams,
    rows: PrefillRows,
    out: Tensor,
    shape: MambaShape,
) -> None:
    """Outputs of all chunks' tokens, before gate and norm.

    Args:
        xbc: `[tokens, conv_dim]`: x, B and C behind the convolution.
        dt: float32 `[heads, tokens]`, behind bias and softplus.
        states: `[blocks, heads, d_state, head_dim]`, dtype of `xbc`: before each block. A chunk of
            tokens s to e - 1 has ceil(e / block) - floor(s / block) blocks; they are counted
            through all chunks. There may be more places than blocks.
        params: the layer's parameters.
        rows: the step's chunks.
        out: `[tokens, d_inner]`, written for the chunks' tokens.
        shape: sizes of the layer.
    """
    chunks, blocks = rows.write_rows.numel(), states.size(0)
    block = scan_block(xbc.dtype, shape)
    is_exact = xbc.dtype == torch.float32
    lanes = 16 if is_exact else min(64, max(16, triton.next_power_of_2(shape.head_dim)))
    if lanes > 32 and shape.head_dim % lanes:
        lanes //= 2
    parts = triton.cdiv(shape.head_dim, lanes)
    group_heads = shape.heads * shape.d_state // shape.bc_dim
    heads_each = 1
    while (
        heads_each < MOST_HEADS
        and group_heads % (2 * heads_each) == 0
        and blocks * parts * shape.heads // (2 * heads_each) >= MANY_PROGRAMS
    ):
        heads_each *= 2
    _outputs_kernel[(shape.heads // heads_each * parts, blocks)](
        xbc,
        dt,
        xbc.size(0),
        params.a_log,
        params.d,
        rows.starts,
        rows.first_positions,
        chunks,
        states,
        out,
        out.stride(0),
        heads=shape.heads,
        head_dim=shape.head_dim,
        d_state=shape.d_state,
        d_inner=shape.d_inner,
        bc_dim=shape.bc_dim,
        heads_each=heads_each,
        block=block,
        lanes=lanes,
        chunks_tile=max(triton.next_power_of_2(chunks), 16),
        num_warps=8,
        num_stages=1 if is_exact or shape.d_state > 128 else 2,
        **launch_options(xbc),
    )


# Where prefill rows begin among a step's rows varies, and with it what is aligned.
@triton.jit(
    do_not_specialize=["tokens", "chunks"],
    do_not_specialize_on_alignment=["starts", "first_positions", "out"],
)
def _outputs_kernel(
    xbc: tl.tensor,
    dt_in: tl.tensor,
    tokens: tl.tensor,
    a_log: tl.tensor,
    d: tl.tensor,
    starts: tl.tensor,
    first_positions: tl.tensor,
    chunks: tl.tensor,
    states: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    d_state: tl.constexpr,
    d_inner: tl.constexpr,
    bc_dim: tl.constexpr,
    heads_each: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    chunks_tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One block of tokens, some heads of one group and a part of their dimension."""
    wait_for_previous(overlap)
    parts: tl.constexpr = (head_dim + lanes - 1) // lanes
    conv_dim: tl.constexpr = d_inner + 2 * bc_dim
    group_heads: tl.constexpr = heads * d_state // bc_dim
    first_head = tl.program_id(0) // parts * heads_each
    lane = tl.program_id(0) % parts * lanes + tl.arange(0, lanes)
    inside = lane < head_dim
    number = tl.program_id(1)
    each = tl.arange(0, chunks_tile)
    is_chunk = each < chunks
    begins = tl.load(first_positions + each, mask=is_chunk, other=0)
    lengths = tl.load(starts + each + 1, mask=is_chunk, other=0)
    lengths -= tl.load(starts + each, mask=is_chunk, other=0)
    blocks = (begins + lengths + block - 1) // block - begins // block
    ends = tl.cumsum(tl.where(is_chunk & (lengths > 0), blocks, 0), 0)
    row = tl.sum((ends <= number).to(tl.int32), 0)
    if row < chunks:
        before = tl.max(tl.where(each < row, ends, 0), 0)
        start = tl.load(starts + row)
        first = tl.load(first_positions + row)
        end = first + tl.load(starts + row + 1) - start
        offset = tl.arange(0, block)
        position = (first // block + number - before) * block + offset
        exists = (position >= first) & (position < end)
        token = (start - first + position).to(tl.int64)
        column = tl.arange(0, d_state)
        source = xbc + token[:, None] * conv_dim
        b_source = source + d_inner + first_head // group_heads * d_state + column[None, :]
        b = tl.load(b_source, mask=exists[:, None], other=0.0)
        c = tl.load(b_source + bc_dim, mask=exists[:, None], other=0.0)
        products = tl.dot(c, tl.trans(b), input_precision="ieee")
        seen = offset[:, None] >= offset[None, :]
        in_block = exists[:, None] & inside[None, :]
        for nth in range(heads_each):
            head = first_head + nth
            x = tl.load(source + head * head_dim + lane[None, :], mask=in_block, other=0.0)
            dt = tl.load(dt_in + head.to(tl.int64) * tokens + token, mask=exists, other=0.0)
            own = states + (number.to(tl.int64) * heads + head) * (d_state * head_dim)
            cell = own + column[:, None] * head_dim + lane[None, :]
            s = tl.load(cell, mask=(column >= 0)[:, None] & inside[None, :], other=0.0)
            decay = tl.cumsum(dt * -tl.exp(tl.load(a_log + head).to(tl.float32)), 0)
            share = tl.where(seen, decay[:, None] - decay[None, :], -float("inf"))
            weight = products * tl.exp(share) * dt[None, :]
            y = tl.dot(c, s, input_precision="ieee") * tl.exp(decay)[:, None]
            y += x.to(tl.float32) * tl.load(d + head).to(tl.float32)
            y = tl.dot(weight.to(x.dtype), x, y, input_precision="ieee")
            place = out + token[:, None] * out_stride + head * head_dim + lane[None, :]
            tl.store(place, y.to(out.dtype.element_ty), mask=in_block)
