"""Gated DeltaNet prefill: packed chunks of prompts, their history carried from rows of the pools.

Gated DeltaNet: Yang, Kautz and Hatamizadeh 2024. Three kernels. This file's takes the convolution,
norms and gates of tiles of tokens, each of which finds its chunk by the chunks' starts.
`delta_factors.py` prepares what depends on no state, in parallel; the scan (`delta_scan.py`) walks
through each chunk and leaves what later steps need. All read lengths and places on the device, so
that a captured step serves any chunks that fit its shape.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.recurrent.delta_factors import tile_factors
from megatron_async.ops.recurrent.delta_pools import NORM_EPS, DeltaParams, DeltaShape, shape_of
from megatron_async.ops.recurrent.delta_reference import delta_prefill
from megatron_async.ops.recurrent.delta_scan import scan_chunks, scan_tile
from megatron_async.ops.recurrent.recurrent_math import silu, softplus
from megatron_async.ops.recurrent.recurrent_pools import FlushRule, PrefillRows, RecurrentPools
from megatron_async.ops.recurrent.step_arguments import check_chunks, output_for

TOKENS = 16
"""Tokens that a program of the convolution processes, for as many channels as a key has."""
EPS = tl.constexpr(NORM_EPS)


@delta_prefill.gpu
def delta_prefill_gpu(
    qkvzba: Tensor,
    params: DeltaParams,
    pools: RecurrentPools,
    rows: PrefillRows,
    base_after: Tensor,
    rule: FlushRule,
    out: Tensor | None = None,
    chunk_dest: Tensor | None = None,
) -> Tensor:
    """Convolution and scan of a step's prefill chunks.

    A chunk that does not begin its request starts from the state and the last inputs in its read
    row. Its write row gets the state at `base_after`, the ring's entries from there to the chunk's
    end, and the last three inputs of the convolution. Scans are cut at multiples of 128 of a
    request's own positions, so with a float32 state a prompt that is cut there gives the same bits
    as one that is not.

    Args:
        qkvzba: `[tokens, 2 key_inner + 2 value_inner + 2 value heads]`, output of in_proj in
            Megatron's order q, k, v, z, beta, alpha, of the prefill tokens alone; bfloat16, float16
            or float32 on a GPU; rows may be strided.
        params: the layer's parameters.
        pools: the layer's pools, changed in place.
        rows: the step's chunks.
        base_after: int32 `[chunks]`, of `next_bases`.
        rule: when ring entries move into the state; that of `next_bases`.
        out: `[tokens, value_inner]`, adjacent elements; None: made here.
        chunk_dest: int32 `[scan chunks]`: the pool row that gets the state at the end of each scan
            chunk that ends at a multiple of 128, and the three inputs before it; -1: none does. A
            chunk of tokens s to e - 1 has ceil(e / 128) - floor(s / 128) scan chunks; they are
            counted through all chunks. The rows are no other chunk's read or write row.

    Returns:
        o `[tokens, value_inner]`, dtype of `qkvzba`: before norm and gate; 0 for padding tokens.

    Raises:
        ValueError: sizes, dtypes or layouts do not fit each other, or a size is not served.
    """
    op = "delta_prefill"
    shape = shape_of(op, qkvzba, params, pools, rule, 1)
    check_chunks(op, rows, base_after)
    tokens, chunks = qkvzba.size(0), rows.write_rows.numel()
    out = output_for(op, out, qkvzba, tokens, shape.value_inner)
    if tokens and chunks:
        qkv, gates = _convolve(qkvzba, params, pools, rows, out, shape)
        tile = scan_tile(qkvzba.dtype, shape, chunks)
        factors = tile_factors(qkv, gates, rows, shape, tile.tokens)
        scan_chunks(
            qkvzba, qkv, gates, factors, pools, rows, base_after, out, chunk_dest, shape, tile
        )
    return out


def _convolve(
    qkvzba: Tensor,
    params: DeltaParams,
    pools: RecurrentPools,
    rows: PrefillRows,
    out: Tensor,
    shape: DeltaShape,
) -> tuple[Tensor, Tensor]:
    """Q and k, normalised, and v `[tokens, conv_dim]`, and the gates beta and g `[2, value heads,
    tokens]` of all tokens; zeros in `out` for padding."""
    tokens, chunks = qkvzba.size(0), rows.write_rows.numel()
    qkv = torch.empty((tokens, shape.conv_dim), dtype=qkvzba.dtype, device=qkvzba.device)
    gates = torch.empty((2, shape.value_heads, tokens), device=qkvzba.device)
    parts = 2 * shape.key_heads + triton.cdiv(shape.value_inner, shape.key_dim)
    _conv_kernel[(parts + 1, triton.cdiv(tokens, TOKENS))](
        qkvzba,
        qkvzba.stride(0),
        params.conv_weight,
        params.dt_bias,
        params.a_log,
        pools.conv,
        pools.conv.stride(0),
        rows.starts,
        rows.first_positions,
        rows.read_rows,
        chunks,
        tokens,
        qkv,
        gates,
        out,
        out.stride(0),
        key_heads=shape.key_heads,
        key_dim=shape.key_dim,
        value_heads=shape.value_heads,
        value_inner=shape.value_inner,
        heads_tile=triton.next_power_of_2(shape.value_heads),
        conv_ring=pools.conv.size(1),
        chunks_tile=max(triton.next_power_of_2(chunks), 16),
        token_tile=TOKENS,
        num_warps=4,
        **launch_options(qkvzba),
    )
    return qkv, gates


# Where prefill rows begin among a step's rows varies, and with it what is aligned.
@triton.jit(
    do_not_specialize=["chunks", "tokens"],
    do_not_specialize_on_alignment=["starts", "first_positions", "read_rows"],
)
def _conv_kernel(
    qkvzba: tl.tensor,
    input_stride: tl.tensor,
    conv_weight: tl.tensor,
    dt_bias: tl.tensor,
    a_log: tl.tensor,
    conv: tl.tensor,
    conv_stride: tl.tensor,
    starts: tl.tensor,
    first_positions: tl.tensor,
    read_rows: tl.tensor,
    chunks: tl.tensor,
    tokens: tl.tensor,
    qkv: tl.tensor,
    gates: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    key_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_heads: tl.constexpr,
    value_inner: tl.constexpr,
    heads_tile: tl.constexpr,
    conv_ring: tl.constexpr,
    chunks_tile: tl.constexpr,
    token_tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    conv_dim: tl.constexpr = 2 * key_heads * key_dim + value_inner
    wait_for_previous(overlap)
    part = tl.program_id(0)
    token = tl.program_id(1) * token_tile + tl.arange(0, token_tile)
    row = token.to(tl.int64)
    source = qkvzba + row[:, None] * input_stride
    if part < (conv_dim + key_dim - 1) // key_dim:
        each = tl.arange(0, chunks_tile)
        ends = tl.load(starts + 1 + each, mask=each < chunks, other=2**31 - 1)
        chunk = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
        exists = (chunk < chunks) & (token < tokens)
        local = token - tl.load(starts + chunk, mask=exists, other=0)
        position = local + tl.load(first_positions + chunk, mask=exists, other=0)
        pool_row = tl.load(read_rows + chunk, mask=exists, other=0).to(tl.int64)
        kept = conv + pool_row * conv_stride
        channel = part * key_dim + tl.arange(0, key_dim)
        inside = channel < conv_dim
        value = tl.zeros((token_tile, key_dim), tl.float32)
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
        # The convolution's output has the dtype of the activations.
        value = silu(value).to(qkv.dtype.element_ty).to(tl.float32)
        if part < 2 * key_heads:
            scale = tl.where(part < key_heads, key_dim**-0.5, 1.0)
            value = value * (tl.rsqrt(tl.sum(value * value, 1) + EPS) * scale)[:, None]
        place = qkv + row[:, None] * conv_dim + channel[None, :]
        stored = exists[:, None] & inside[None, :]
        tl.store(place, value.to(qkv.dtype.element_ty), mask=stored)
        place = out + row[:, None] * out_stride + channel[None, :]
        padding = (token < tokens) & (chunk >= chunks)
        zeros = tl.zeros((token_tile, key_dim), out.dtype.element_ty)
        tl.store(place, zeros, mask=padding[:, None] & (channel < value_inner)[None, :])
    else:
        head = tl.arange(0, heads_tile)
        is_head = head < value_heads
        loaded = (token < tokens)[:, None] & is_head[None, :]
        strip = source + conv_dim + value_inner + head[None, :]
        beta = tl.load(strip, mask=loaded, other=0.0).to(tl.float32)
        alpha = tl.load(strip + value_heads, mask=loaded, other=0.0).to(tl.float32)
        bias = tl.load(dt_bias + head, mask=is_head, other=0.0).to(tl.float32)
        rate = -tl.exp(tl.load(a_log + head, mask=is_head, other=0.0).to(tl.float32))
        g = rate[None, :] * softplus(alpha + bias[None, :])
        target = gates + head[None, :].to(tl.int64) * tokens + token[:, None]
        tl.store(target, tl.sigmoid(beta), mask=loaded)
        tl.store(target + tokens.to(tl.int64) * value_heads, g, mask=loaded)
