"""Paged attention of decode rows: one query token a row, keys and values read once.

Flash-decoding (Dao et al. 2023): programs take a row's KV head and a part of its sequence, with all
query heads of that KV head as one tile, so that each key and value is loaded once; a second kernel
joins the parts. Lengths and block tables stay on the device; only the largest number of parts is
the host's choice, and constant for a captured step. A short row uses fewer, and one that needs no
more than one part is done in the first kernel.

Constants measured on an H200 (docs/performance.md). Joining inside the first kernel, by the program
that finishes last, was slower than a second kernel with dependent launch: 5.7 against 4.9
microseconds at 16 rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous

HEAD_TILE = 16
"""Query heads are padded to this many, the smallest tile of the matrix units."""
TOKENS_A_PART = 64
"""Least tokens of a part."""
MAX_PARTS = 64
TILE = 64
"""Tokens that a program takes together."""
WARPS = 4
STAGES = 3


class DecodeWorkspace:
    """Partial results of the parts; made once, used by every layer in turn.

    Args:
        max_rows: decode rows.
        heads: query heads.
        dim: size of a head.
        device: a GPU.
    """

    def __init__(self, max_rows: int, heads: int, dim: int, device: torch.device) -> None:
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        shape = (max_rows, heads, MAX_PARTS)
        self.output = torch.empty(*shape, dim, dtype=torch.float32, device=device)
        self.maximum = torch.empty(shape, dtype=torch.float32, device=device)
        self.total = torch.empty(shape, dtype=torch.float32, device=device)


def number_of_parts(rows: int, kv_heads: int, max_kv_length: int, processors: int) -> int:
    """Parts of each row's sequence: enough programs to fill the device twice, each with enough
    tokens; a power of two."""
    wanted = -(-2 * processors // (rows * kv_heads))
    useful = max(max_kv_length // TOKENS_A_PART, 1)
    parts = max(min(wanted, useful, MAX_PARTS), 1)
    return 1 << (parts.bit_length() - 1)


def paged_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    scale: float,
    parts: int,
    workspace: DecodeWorkspace,
    out: Tensor,
) -> None:
    """Attention of decode rows over the paged cache.

    Args:
        query: `[rows, heads, dim]`, contiguous; dim a power of two.
        key_cache, value_cache: `[blocks, block size, kv heads, dim]`, contiguous.
        block_tables: int32 `[rows, blocks]`.
        kv_lengths: int32 `[rows]`.
        scale: softmax scale.
        parts: from `number_of_parts`.
        workspace: partial results.
        out: `[rows, heads, dim]`, contiguous, written.
    """
    rows, heads, dim = query.shape
    _blocks, block_size, kv_heads, _dim = key_cache.shape
    group = heads // kv_heads
    tile = TILE if dim <= 128 else TILE // 2
    _parts_kernel[(rows, kv_heads, parts)](
        query,
        key_cache,
        value_cache,
        block_tables,
        block_tables.stride(0),
        kv_lengths,
        scale * 1.4426950408889634,
        out,
        workspace.output,
        workspace.maximum,
        workspace.total,
        block_size=block_size,
        kv_heads=kv_heads,
        group=group,
        head_tile=max(HEAD_TILE, triton.next_power_of_2(group)),
        dim=dim,
        tile=tile,
        parts=parts,
        max_parts=MAX_PARTS,
        min_share=TOKENS_A_PART,
        num_warps=WARPS,
        num_stages=STAGES,
        **launch_options(query),
    )
    if parts > 1:
        _join_kernel[(rows, heads)](
            workspace.output,
            workspace.maximum,
            workspace.total,
            kv_lengths,
            out,
            heads=heads,
            dim=dim,
            parts=parts,
            min_share=TOKENS_A_PART,
            tile=tile,
            max_parts=MAX_PARTS,
            num_warps=2,
            **launch_options(query),
        )


@triton.jit
def _share(
    length: tl.tensor, parts: tl.constexpr, min_share: tl.constexpr, tile: tl.constexpr
) -> tl.tensor:
    """Tokens of one part: whole tiles, not too few."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, parts), tile) * tile, min_share)


@triton.jit
def _parts_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    kv_lengths: tl.tensor,
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
    tile: tl.constexpr,
    parts: tl.constexpr,
    max_parts: tl.constexpr,
    min_share: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    row, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(kv_lengths + row)
    share = _share(length, parts, min_share, tile)
    used = tl.maximum(tl.cdiv(length, share), 1)
    if part < used:
        start, end = part * share, tl.minimum((part + 1) * share, length)
        member = tl.arange(0, head_tile)
        column = tl.arange(0, dim)
        inside = member < group
        heads: tl.constexpr = kv_heads * group
        head = kv_head * group + member
        place = (row * heads + head)[:, None] * dim + column[None, :]
        q = tl.load(query + place, mask=inside[:, None], other=0.0)
        maximum = tl.full((head_tile,), -float("inf"), tl.float32)
        total = tl.zeros((head_tile,), tl.float32)
        gathered = tl.zeros((head_tile, dim), tl.float32)
        for first in range(start, end, tile):
            position = first + tl.arange(0, tile)
            exists = position < end
            block = tl.load(
                tables + row * table_stride + position // block_size, mask=exists, other=0
            ).to(tl.int64)
            token = (block * block_size + position % block_size) * kv_heads + kv_head
            cell = token[:, None] * dim + column[None, :]
            k = tl.load(key_cache + cell, mask=exists[:, None], other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            score = tl.where(exists[None, :], score, -float("inf"))
            new_maximum = tl.maximum(maximum, tl.max(score, 1))
            weight = tl.exp2(score - new_maximum[:, None])
            shrink = tl.exp2(maximum - new_maximum)
            v = tl.load(value_cache + cell, mask=exists[:, None], other=0.0)
            gathered = gathered * shrink[:, None]
            gathered += tl.dot(weight.to(v.dtype), v, input_precision="ieee")
            total = total * shrink + tl.sum(weight, 1)
            maximum = new_maximum
        if used == 1:
            result = gathered / tl.maximum(total, 1e-30)[:, None]
            tl.store(out + place, result.to(out.dtype.element_ty), mask=inside[:, None])
        else:
            slot = ((row * heads + head) * max_parts + part).to(tl.int64)
            tl.store(part_maximum + slot, maximum, mask=inside)
            tl.store(part_total + slot, total, mask=inside)
            cells = slot[:, None] * dim + column[None, :]
            tl.store(part_output + cells, gathered, mask=inside[:, None])


@triton.jit
def _join_kernel(
    part_output: tl.tensor,
    part_maximum: tl.tensor,
    part_total: tl.tensor,
    kv_lengths: tl.tensor,
    out: tl.tensor,
    heads: tl.constexpr,
    dim: tl.constexpr,
    parts: tl.constexpr,
    min_share: tl.constexpr,
    tile: tl.constexpr,
    max_parts: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    row = tl.program_id(0)
    length = tl.load(kv_lengths + row)
    used = tl.maximum(tl.cdiv(length, _share(length, parts, min_share, tile)), 1)
    if used > 1:
        row_head = row * heads + tl.program_id(1)
        part = tl.arange(0, parts)
        exists = part < used
        column = tl.arange(0, dim)
        slot = row_head.to(tl.int64) * max_parts + part
        maximum = tl.load(part_maximum + slot, mask=exists, other=-float("inf"))
        weight = tl.exp2(maximum - tl.max(maximum, 0))
        total = tl.sum(tl.load(part_total + slot, mask=exists, other=0.0) * weight, 0)
        cells = slot[:, None] * dim + column[None, :]
        gathered = tl.load(part_output + cells, mask=exists[:, None], other=0.0)
        result = tl.sum(gathered * weight[:, None], 0) / tl.maximum(total, 1e-30)
        tl.store(out + row_head * dim + column, result.to(out.dtype.element_ty))
