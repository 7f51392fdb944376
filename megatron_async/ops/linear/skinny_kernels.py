"""Kernels of matrix products with few rows; `ops/linear/skinny_linear.py` launches them.

Such a product takes as long as the reads of its weights. No kernel of a step writes weights. So
both kernels start to load their first weights before they wait for the previous kernel, and let
their successor, which does the same, start at once. So memory stays busy between kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.dependent_launch import await_previous, let_next_start, prefetch_rows
from megatron_async.ops.linear.qkv_places import first_of_pairs, store_heads


@triton.jit
def one_row_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    squares: tl.tensor,
    added: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    position_ids: tl.tensor,
    write_index: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    eps: tl.tensor,
    k: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    parts: tl.constexpr,
    block_parts: tl.constexpr,
    gated: tl.constexpr,
    squared: tl.constexpr,
    has_norm: tl.constexpr,
    has_residual: tl.constexpr,
    has_bias: tl.constexpr,
    has_added: tl.constexpr,
    ahead: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One row times `block_n` weight rows, on the CUDA cores.

    The norm's factor is a number, so it is applied to the sums: inputs need not be read twice. It
    follows from the inputs, or from `parts` sums of squares, if there are any. A weight row that
    fits `block_k` is loaded before the wait. `residual` is added to the row before the norm,
    `added` to the outputs.

    With heads of `dim` elements the outputs are rotated and appended (`QkvPlaces`): each of the
    `block_n` with the one half a head behind it. Then the next kernel, which has no weights to
    load, starts after the wait, and may read what was there before it (`is_settled` of
    `ops/attention/decode_attention.py`).
    """
    rotates: tl.constexpr = dim > 0
    paired: tl.constexpr = gated or rotates
    if not rotates:
        let_next_start(overlap)
    program = tl.program_id(0)
    first = program * block_n
    row_bytes: tl.constexpr = k * (weight.dtype.element_ty.primitive_bitwidth // 8)
    whole: tl.constexpr = k <= block_k
    line = tl.arange(0, block_n)
    if rotates:
        lane = first % (dim // 2) + line
        head = first // (dim // 2)
        first = first_of_pairs(first, dim)
        position = tl.load(position_ids)
        place = tl.load(write_index)
        cosine = tl.load(cos + position * dim + lane)
        sine = tl.load(sin + position * dim + lane)
    start = weight + first.to(tl.int64) * k
    up_start = start + ((dim // 2) if rotates else n.to(tl.int64)) * k
    here = block_n if rotates else tl.minimum(n - first, block_n)
    inside = line < here
    column = tl.arange(0, block_k)
    cell = line[:, None] * k + column[None, :]
    # Inputs as wide as the tile where it moves along the row: no exchange between threads then.
    at_input = column[None, :] if whole else line[:, None] * 0 + column[None, :]
    if whole:
        mask = inside[:, None] & (column < k)[None, :]
        w = tl.load(start + cell, mask=mask, other=0.0).to(tl.float32)
        if paired:
            u = tl.load(up_start + cell, mask=mask, other=0.0).to(tl.float32)
        if has_norm:
            scale = tl.load(norm_weight + at_input, mask=at_input < k, other=0.0).to(tl.float32)
    else:
        prefetch_rows(start, here, row_bytes, ahead, overlap)
        if paired:
            prefetch_rows(up_start, here, row_bytes, ahead, overlap)
    if has_bias:
        shift = tl.load(bias + first + line, mask=inside, other=0.0).to(tl.float32)
        if rotates:
            up_shift = tl.load(bias + first + dim // 2 + line).to(tl.float32)
    await_previous(overlap)
    if rotates:
        let_next_start(overlap)
    if has_added:  # early: at the end, every program would wait for it
        stream = tl.load(added + first + line, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((block_n, block_k), tl.float32)
    up_sums = tl.zeros((block_n, block_k), tl.float32)
    own_squares = tl.zeros((1 if whole else block_n, block_k), tl.float32)
    if parts > 0:
        piece = tl.arange(0, block_parts)
        given = tl.load(squares + piece, mask=piece < parts, other=0.0)
    for at in range(0, k, block_k):
        left = at_input < k - at
        if not whole:
            mask = inside[:, None] & (column < k - at)[None, :]
            w = tl.load(start + cell + at, mask=mask, other=0.0).to(tl.float32)
            if paired:
                u = tl.load(up_start + cell + at, mask=mask, other=0.0).to(tl.float32)
            if has_norm:
                scale = tl.load(norm_weight + at + at_input, mask=left, other=0.0).to(tl.float32)
        v = tl.load(x + at + at_input, mask=left, other=0.0).to(tl.float32)
        if has_norm:
            if has_residual:
                before = tl.load(residual + at + at_input, mask=left, other=0.0).to(tl.float32)
                rounded = (before + v).to(total.dtype.element_ty)
                if program == 0:
                    own = left if whole else left & (line == 0)[:, None]
                    tl.store(total + at + at_input, rounded, mask=own)
                v = rounded.to(tl.float32)
            own_squares += v * v
            v = v * scale
        sums += w * v
        if paired:
            up_sums += u * v
    y = tl.sum(sums, 1)
    if paired:
        up = tl.sum(up_sums, 1)
    if parts > 0:
        y = y * tl.rsqrt(tl.sum(given, 0) / k + eps)
    if has_norm:
        factor = tl.rsqrt(tl.sum(own_squares, 1) / k + eps)
        y = y * factor
        if paired:
            up = up * factor
    if has_bias:
        y = y + shift
        if rotates:
            up = up + up_shift
    if gated:
        y = y * tl.sigmoid(y) * up
    elif squared:
        y = tl.maximum(y, 0.0)
        y = y * y
    if has_added:
        y = y.to(out.dtype.element_ty).to(tl.float32) + stream
    if rotates:
        store_heads(
            y, up, cosine, sine, 0, place, lane, head, inside,
            out, key_cache, value_cache, kv_heads, group, dim,
        )  # fmt: skip
    else:
        tl.store(out + first + line, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def tile_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    k: tl.constexpr,
    splits: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    gated: tl.constexpr,
    squared: tl.constexpr,
    has_bias: tl.constexpr,
    swap: tl.constexpr,
    ahead: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """All rows times `block_n` weight rows, over one share of the inputs, on the matrix units."""
    let_next_start(overlap)
    first = tl.program_id(0) * block_n
    part = tl.program_id(1)
    share: tl.constexpr = (k + splits * block_k - 1) // (splits * block_k) * block_k
    row_bytes: tl.constexpr = k * (weight.dtype.element_ty.primitive_bitwidth // 8)
    even: tl.constexpr = k % (splits * block_k) == 0
    start = weight + first.to(tl.int64) * k + part * share
    up_start = start + n.to(tl.int64) * k
    here = tl.minimum(n - first, block_n)
    # The last share is shorter: its last row's prefetch must end with the weight.
    fits = here if even else tl.where(part == splits - 1, 0, here)
    prefetch_rows(start, fits, row_bytes, ahead, overlap)
    if gated:
        prefetch_rows(up_start, fits, row_bytes, ahead, overlap)
    line = tl.arange(0, block_n)
    inside = (line < here)[:, None]
    batch = tl.arange(0, block_m)
    exists = (batch < rows)[:, None]
    column = tl.arange(0, block_k)
    cell = line[:, None] * k + column[None, :]
    source = x + batch[:, None].to(tl.int64) * x_stride + part * share + column[None, :]
    if has_bias:
        shift = tl.load(bias + first + line, mask=line < here, other=0.0).to(tl.float32)
    await_previous(overlap)
    if swap:
        sums = tl.zeros((block_n, block_m), tl.float32)
        up_sums = tl.zeros((block_n, block_m), tl.float32)
    else:
        sums = tl.zeros((block_m, block_n), tl.float32)
        up_sums = tl.zeros((block_m, block_n), tl.float32)
    limit = tl.minimum(k - part * share, share)
    for at in range(0, limit, block_k):
        if even:
            row_mask, cell_mask = exists, inside
        else:
            left = (column < limit - at)[None, :]
            row_mask, cell_mask = exists & left, inside & left
        v = tl.load(source + at, mask=row_mask, other=0.0)
        w = tl.load(start + cell + at, mask=cell_mask, other=0.0)
        if swap:
            sums = tl.dot(w, tl.trans(v), sums, input_precision="ieee")
        else:
            sums = tl.dot(v, tl.trans(w), sums, input_precision="ieee")
        if gated:
            u = tl.load(up_start + cell + at, mask=cell_mask, other=0.0)
            if swap:
                up_sums = tl.dot(u, tl.trans(v), up_sums, input_precision="ieee")
            else:
                up_sums = tl.dot(v, tl.trans(u), up_sums, input_precision="ieee")
    if swap:
        sums = tl.trans(sums)
        up_sums = tl.trans(up_sums)
    if has_bias:
        sums = sums + shift[None, :]
    if gated:
        sums = sums * tl.sigmoid(sums) * up_sums
    elif squared:
        sums = tl.maximum(sums, 0.0)
        sums = sums * sums
    row = (part * rows + batch[:, None]).to(tl.int64)
    target = out + row * n + first + line[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=exists & (line < here)[None, :])
