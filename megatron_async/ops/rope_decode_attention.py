"""Decode attention from the qkv projection on: q/k norm, rotary, KV append and attention.

In a step of decode rows alone every new token belongs to one row, so `ops/rope_append.py` need not
stand between the projection and `ops/decode_attention.py`: each program rotates the queries that it
needs, and the one whose part ends with the row's sequence appends the row's key and value first.
Roundings are those of the two kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.decode_attention import (
    HEAD_TILE,
    LOG2_E,
    WARPS,
    DecodeWorkspace,
    check_decode,
    join_parts,
    pipeline_stages,
)
from megatron_async.ops.decode_part import attend_part, first_block, store_part
from megatron_async.ops.dependent_launch import launch_options, prefetch_heads, wait_for_previous
from megatron_async.ops.rope_append import check_append, norm_factor, rotate


def rope_decode_attention(
    mixed_qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    write_index: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    block_tables: Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    is_settled: bool = False,
    prefetch: bool = True,
) -> Tensor:
    """`rope_append` of one token a row, then `paged_decode_attention`.

    Args:
        mixed_qkv: `[rows, kv_heads * (group + 2) * dim]`, as for `rope_append`, dtype of the
            caches; dim even, 16 to 256.
        cos, sin, q_weight, k_weight, eps: as for `rope_append`.
        position_ids: int64 `[rows]`: each row's length in the schedule, less one.
        write_index: int64 `[rows]`: place in the cache of each row's last token, as its block table
            says. Rows may share a place if none of their outputs is read (dummy rows).
        key_cache, value_cache: as for `rope_append`; the new tokens are written.
        block_tables, scale, workspace: as for `paged_decode_attention`. A row of no tokens gives
            zeros and writes nothing.
        is_settled: positions, places, block tables and schedule were written before a kernel that
            waits before it lets its successor start (as the last one launched here does); they are
            then read without waiting. A product alone between is not enough: it lets its successor
            start at once.
        prefetch: where things are settled, ask for the first keys and values of each part too.

    Returns:
        `[rows, heads, dim]`, contiguous.

    Raises:
        ValueError: shapes, dtypes or strides that the kernels cannot serve.
    """
    rows, width = mixed_qkv.shape
    _blocks, block_size, kv_heads, dim = key_cache.shape
    check_append(mixed_qkv, cos, sin, key_cache, value_cache, q_weight, k_weight)
    group = width // (kv_heads * dim) - 2
    out = torch.empty((rows, kv_heads * group, dim), dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    check_decode(out, key_cache, value_cache, block_tables, workspace, out)
    if position_ids.shape != (rows,) or write_index.shape != (rows,):
        raise ValueError(
            f"rope_decode_attention: {rows} rows want as many positions and places; found "
            f"{tuple(position_ids.shape)} and {tuple(write_index.shape)}: one token a row."
        )
    schedule = workspace.schedule
    _rope_parts_kernel[(kv_heads, rows + schedule.extra)](
        mixed_qkv,
        mixed_qkv.stride(0),
        cos,
        sin,
        position_ids,
        write_index,
        q_weight if q_weight is not None else cos,
        k_weight if k_weight is not None else cos,
        eps,
        key_cache,
        value_cache,
        block_tables,
        block_tables.stride(0),
        schedule.items,
        scale * LOG2_E,
        out,
        workspace.output,
        workspace.maximum,
        workspace.total,
        block_size=block_size,
        kv_heads=kv_heads,
        group=group,
        head_tile=max(HEAD_TILE, triton.next_power_of_2(group)),
        dim=dim,
        dim_tile=triton.next_power_of_2(dim),
        tile=schedule.tile,
        has_norm=q_weight is not None,
        prefetch=prefetch and is_settled,
        is_settled=is_settled,
        num_warps=WARPS,
        num_stages=pipeline_stages(out.element_size(), rows * kv_heads, dim, schedule.processors),
        **launch_options(mixed_qkv),
    )
    join_parts(workspace, out)
    return out


@triton.jit(do_not_specialize=["table_stride"])
def _rope_parts_kernel(
    mixed_qkv: tl.tensor,
    qkv_stride: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    position_ids: tl.tensor,
    write_index: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    eps: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    items: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    part_output: tl.tensor,
    part_maximum: tl.tensor,
    part_total: tl.tensor,
    block_size: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_tile: tl.constexpr,
    dim: tl.constexpr,
    dim_tile: tl.constexpr,
    tile: tl.constexpr,
    has_norm: tl.constexpr,
    prefetch: tl.constexpr,
    is_settled: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    if not is_settled:
        wait_for_previous(overlap)
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * 4
    row, start = tl.load(item), tl.load(item + 1)
    end, slot = tl.load(item + 2), tl.load(item + 3)
    table = tables + row.to(tl.int64) * table_stride
    block = first_block(table, start, end, block_size, tile)
    position = tl.load(position_ids + row, mask=row >= 0, other=0)
    new_place = tl.load(write_index + row, mask=row >= 0, other=0)
    appends = (start < end) & (end == position + 1)

    # Whole heads, and beside each element the one that it is rotated with, read again: queries have
    # to end up as an operand of the matrix units, and halves would first have to be put together.
    half: tl.constexpr = dim // 2
    run: tl.constexpr = half & -half  # elements that stay adjacent when halves change places
    member = tl.arange(0, head_tile)[:, None]
    column = tl.arange(0, dim_tile)
    other = tl.where(column < half, column + half, column - half)
    other = tl.max_contiguous(tl.multiple_of(other, run), run)
    # As high as the tile of queries, what is the same for all and the key too, so that threads have
    # nothing to exchange.
    column, other = column[None, :] + member * 0, other[None, :] + member * 0
    in_head = column < dim
    angle = tl.maximum(position, 0) * dim + column
    cosine = tl.load(cos + angle, mask=in_head, other=0.0)
    sine = tl.load(sin + angle, mask=in_head, other=0.0)
    sine = tl.where(column < half, -sine, sine)
    if has_norm:
        q_scale = tl.load(q_weight + column, mask=in_head, other=0.0).to(tl.float32)
        k_scale = tl.load(k_weight + column, mask=in_head, other=0.0).to(tl.float32)
        q_scale_other = tl.load(q_weight + other, mask=in_head, other=0.0).to(tl.float32)
        k_scale_other = tl.load(k_weight + other, mask=in_head, other=0.0).to(tl.float32)
    if prefetch:
        # The new token's place comes along, whatever is there: the cache stays coherent.
        token = start + tl.arange(0, tile)
        cached = block.to(tl.int64) * block_size + token % block_size
        cached = (cached * kv_heads + kv_head)[:, None] * dim
        prefetch_heads(key_cache + cached, (token < end)[:, None], dim, dim_tile, overlap)
        prefetch_heads(value_cache + cached, (token < end)[:, None], dim, dim_tile, overlap)
    if is_settled:
        wait_for_previous(overlap)
    if row >= 0:
        is_query = (member < group) & in_head
        is_new = (member == 0) & in_head & appends
        query = mixed_qkv + row.to(tl.int64) * qkv_stride + kv_head * ((group + 2) * dim)
        key, value = query + group * dim, query + (group + 1) * dim
        raw_q = tl.load(query + member * dim + column, mask=is_query, other=0.0)
        raw_q_other = tl.load(query + member * dim + other, mask=is_query, other=0.0)
        raw_k = tl.load(key + column, mask=is_new, other=0.0)
        raw_k_other = tl.load(key + other, mask=is_new, other=0.0)
        v = tl.load(value + column, mask=is_new, other=0.0)
        q, q_other = raw_q.to(tl.float32), raw_q_other.to(tl.float32)
        k, k_other = raw_k.to(tl.float32), raw_k_other.to(tl.float32)
        if has_norm:
            # Summed in the order of `rope_append`, for the same bits.
            q_squares = tl.where(column < half, q * q + q_other * q_other, 0.0)
            k_squares = tl.where(column < half, k * k + k_other * k_other, 0.0)
            q_factor, k_factor = norm_factor(q_squares, eps, dim), norm_factor(k_squares, eps, dim)
            q, q_other = q * q_factor * q_scale, q_other * q_factor * q_scale_other
            k, k_other = k * k_factor * k_scale, k_other * k_factor * k_scale_other
        q = rotate(q, q_other, cosine, sine).to(raw_q.dtype)
        k = rotate(k, k_other, cosine, sine).to(raw_k.dtype)
        cell = (new_place * kv_heads + kv_head) * dim + column
        tl.store(key_cache + cell, k, mask=is_new)
        tl.store(value_cache + cell, v, mask=is_new)
        # Below, other threads of this program, and of no other, read what was just stored. Those
        # reads may be asynchronous copies, but ordinary ones (not through the tensor memory
        # accelerator), and each is issued by a thread that has passed the barrier, which orders
        # the stores of all threads before it.
        tl.debug_barrier()
        gathered, maximum, total = attend_part(
            q, key_cache, value_cache, table, block, start, end, kv_head, scale,
            block_size, kv_heads, head_tile, dim, dim_tile, tile,
        )  # fmt: skip
        store_part(
            gathered, maximum, total, row, slot, kv_head, out, part_output, part_maximum,
            part_total, kv_heads, group, head_tile, dim, dim_tile,
        )  # fmt: skip
