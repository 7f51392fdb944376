"""Mamba-2 prefill: packed chunks of prompts, their history carried from rows of the pools.

Mamba-2: Dao and Gu 2024. Two kernels. This file's takes the convolution of tiles of tokens, each of
which finds its chunk by the chunks' starts; the scan (`mamba_scan.py`) walks through each chunk,
head by head, and leaves what later steps need. Both read lengths and places on the device, so that
a captured step serves any chunks that fit its shape.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.recurrent.mamba_pools import MambaParams, MambaShape, shape_of
from megatron_async.ops.recurrent.mamba_reference import mamba_prefill
from megatron_async.ops.recurrent.mamba_scan import scan_chunks
from megatron_async.ops.recurrent.recurrent_math import silu, softplus
from megatron_async.ops.recurrent.recurrent_pools import FlushRule, PrefillRows, RecurrentPools
from megatron_async.ops.recurrent.step_arguments import check_chunks, output_for

TOKENS = 16
CHANNELS = 128
"""Channels that a program of the convolution processes."""


@mamba_prefill.gpu
def mamba_prefill_gpu(
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
        rule: when inputs move into the state; that of `next_bases`.
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
    check_chunks("mamba_prefill", rows, base_after)
    tokens, chunks = zxbcdt.size(0), rows.write_rows.numel()
    out = output_for("mamba_prefill", out, zxbcdt, tokens, shape.d_inner)
    if tokens and chunks:
        xbc, dt = _convolve(zxbcdt, params, pools, rows, out, shape)
        scan_chunks(zxbcdt, xbc, dt, params, pools, rows, base_after, rule, out, chunk_dest, shape)
    return out


def _convolve(
    zxbcdt: Tensor,
    params: MambaParams,
    pools: RecurrentPools,
    rows: PrefillRows,
    out: Tensor,
    shape: MambaShape,
) -> tuple[Tensor, Tensor]:
    """x, B and C `[tokens, conv_dim]` and dt `[heads, tokens]` of all tokens; zeros in `out` for
    padding."""
    tokens, chunks = zxbcdt.size(0), rows.write_rows.numel()
    xbc = torch.empty((tokens, shape.conv_dim), dtype=zxbcdt.dtype, device=zxbcdt.device)
    dt = torch.empty((shape.heads, tokens), dtype=torch.float32, device=zxbcdt.device)
    parts = triton.cdiv(shape.conv_dim, CHANNELS)
    _conv_kernel[(parts + 1, triton.cdiv(tokens, TOKENS))](
        zxbcdt,
        zxbcdt.stride(0),
        params.conv_weight,
        params.conv_bias,
        params.dt_bias,
        pools.conv,
        pools.conv.stride(0),
        rows.starts,
        rows.first_positions,
        rows.read_rows,
        chunks,
        tokens,
        xbc,
        dt,
        out,
        out.stride(0),
        heads=shape.heads,
        heads_tile=triton.next_power_of_2(shape.heads),
        conv_ring=pools.conv.size(1),
        d_inner=shape.d_inner,
        conv_dim=shape.conv_dim,
        chunks_tile=max(triton.next_power_of_2(chunks), 16),
        token_tile=TOKENS,
        channel_tile=CHANNELS,
        num_warps=4,
        **launch_options(zxbcdt),
    )
    return xbc, dt


# Where prefill rows begin among a step's rows varies, and with it what is aligned.
@triton.jit(
    do_not_specialize=["chunks", "tokens"],
    do_not_specialize_on_alignment=["starts", "first_positions", "read_rows"],
)
def _conv_kernel(
    zxbcdt: tl.tensor,
    input_stride: tl.tensor,
    conv_weight: tl.tensor,
    conv_bias: tl.tensor,
    dt_bias: tl.tensor,
    conv: tl.tensor,
    conv_stride: tl.tensor,
    starts: tl.tensor,
    first_positions: tl.tensor,
    read_rows: tl.tensor,
    chunks: tl.tensor,
    tokens: tl.tensor,
    xbc: tl.tensor,
    dt_out: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    heads: tl.constexpr,
    heads_tile: tl.constexpr,
    conv_ring: tl.constexpr,
    d_inner: tl.constexpr,
    conv_dim: tl.constexpr,
    chunks_tile: tl.constexpr,
    token_tile: tl.constexpr,
    channel_tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    part = tl.program_id(0)
    token = tl.program_id(1) * token_tile + tl.arange(0, token_tile)
    row = token.to(tl.int64)
    source = zxbcdt + row[:, None] * input_stride + d_inner
    if part < (conv_dim + channel_tile - 1) // channel_tile:
        each = tl.arange(0, chunks_tile)
        ends = tl.load(starts + 1 + each, mask=each < chunks, other=2**31 - 1)
        chunk = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
        exists = (chunk < chunks) & (token < tokens)
        local = token - tl.load(starts + chunk, mask=exists, other=0)
        position = local + tl.load(first_positions + chunk, mask=exists, other=0)
        pool_row = tl.load(read_rows + chunk, mask=exists, other=0).to(tl.int64)
        kept = conv + pool_row * conv_stride
        channel = part * channel_tile + tl.arange(0, channel_tile)
        inside = channel < conv_dim
        bias = tl.load(conv_bias + channel, mask=inside, other=0.0).to(tl.float32)
        value = tl.zeros((token_tile, channel_tile), tl.float32) + bias[None, :]
        for tap in tl.static_range(4):
            back = 3 - tap
            weight = tl.load(conv_weight + channel * 4 + tap, mask=inside, other=0.0)
            in_batch = exists & (local >= back)
            place = source - back * input_stride + channel[None, :]
            raw = tl.load(place, mask=in_batch[:, None] & inside[None, :], other=0.0)
            raw = raw.to(tl.float32)
            if back > 0:
                # From steps before; nothing is before position 0.
                is_kept = exists & (local < back) & (position >= back)
                entry = tl.maximum(position - back, 0) % conv_ring
                place = (kept + entry * conv_dim)[:, None] + channel[None, :]
                old = tl.load(place, mask=is_kept[:, None] & inside[None, :], other=0.0)
                raw += old.to(tl.float32)
            value += raw * weight.to(tl.float32)[None, :]
        place = xbc + row[:, None] * conv_dim + channel[None, :]
        stored = exists[:, None] & inside[None, :]
        tl.store(place, silu(value).to(xbc.dtype.element_ty), mask=stored)
        place = out + row[:, None] * out_stride + channel[None, :]
        padding = (token < tokens) & (chunk >= chunks)
        zeros = tl.zeros((token_tile, channel_tile), out.dtype.element_ty)
        tl.store(place, zeros, mask=padding[:, None] & (channel < d_inner)[None, :])
    else:
        head = tl.arange(0, heads_tile)
        loaded = (token < tokens)[:, None] & (head < heads)[None, :]
        dt = tl.load(source + conv_dim + head[None, :], mask=loaded, other=0.0).to(tl.float32)
        dt += tl.load(dt_bias + head, mask=head < heads, other=0.0).to(tl.float32)[None, :]
        dt_place = dt_out + head[None, :].to(tl.int64) * tokens + token[:, None]
        tl.store(dt_place, softplus(dt), mask=loaded)
