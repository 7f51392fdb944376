"""Paged attention of prefill chunks: many query tokens a row, causal, over the paged cache.

Flash attention (Dao et al. 2022) with a block-table lookup: one program takes a tile of a chunk's
queries, the query heads of one KV head packed together (as FlashAttention-3 does for few queries),
and walks their keys and values once. Lengths and places stay on the device: programs find their row
by the chunks' starts, so that a captured step serves any chunks that fit its shape. A program
without tokens ends at once. The keys of few queries are divided among programs
(`prefill_parts.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_async.ops.attention.join_parts import is_last_part, join_parts
from megatron_async.ops.attention.prefill_parts import LEAST_KEYS, PrefillParts, parts_of_rows
from megatron_async.ops.attention.prefill_tiles import Tile, check_rows, most_tiles, tile_of
from megatron_async.ops.dependent_launch import launch_options, wait_for_previous

LOG2_E = 1.4426950408889634


def paged_prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    starts: Tensor,
    max_query_length: int,
    scale: float,
    out: Tensor,
    first_key: int = 0,
    parts: PrefillParts | None = None,
) -> None:
    """Attention of prefill rows over the paged cache, this step's keys and values already in place.

    Args:
        query: `[tokens, heads, dim]`, contiguous: the chunks' tokens end to end, perhaps between
            others.
        key_cache, value_cache: `[blocks, block size, kv heads, dim]`, contiguous.
        block_tables: int32 `[rows, blocks]`.
        kv_lengths: int32 `[rows]`: a chunk's last token is at position KV length - 1.
        starts: int32 `[rows + 1]`: tokens of row i are starts[i] .. starts[i + 1] - 1.
        max_query_length: no chunk has more tokens.
        scale: softmax scale, above 0.
        out: `[tokens, heads, dim]`, contiguous; written for the rows' tokens, left alone for
            others.
        first_key: queries behind this position do not see the keys before it; less than 16.
        parts: for partial results; then the keys of few queries are divided, unless there is a
            `first_key`. None: they are not.

    Raises:
        ValueError: shapes do not match.
    """
    check_rows(
        "paged_prefill_attention",
        query,
        key_cache,
        value_cache,
        block_tables,
        kv_lengths,
        starts,
        out,
    )
    tokens, heads, dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    rows = kv_lengths.numel()
    if not rows or not max_query_length:
        return
    group = heads // kv_heads
    tile = tile_of(query, block_size)
    tiles = most_tiles(query, group, rows, max_query_length, tile.queries)
    shares = 0
    if parts is not None and not first_key:
        if (parts.kv_heads, parts.queries, parts.dim) != (kv_heads, tile.queries, dim):
            raise ValueError(
                f"paged_prefill_attention: parts were made for {parts.kv_heads} KV heads and tiles "
                f"of {parts.queries} queries of {parts.dim}; here are {kv_heads}, {tile.queries} "
                f"and {dim}."
            )
        # If the tokens are tiles for the whole device there is nothing to divide.
        shares = parts.shares_of(tile.programs(dim))
        shares = shares if tokens * group < shares * tile.queries else 0
    buffers = None
    if parts is not None and shares:
        buffers = parts.output, parts.maximum, parts.total, parts.arrived
    _prefill_kernel[kv_heads, max(tiles, shares)](
        query,
        key_cache,
        value_cache,
        block_tables,
        block_tables.stride(0),
        kv_lengths,
        starts,
        rows,
        scale * LOG2_E,
        out,
        *_descriptors(key_cache, value_cache, tile),
        *(buffers or (None,) * 4),
        shares,
        divides=buffers is not None,
        least_keys=LEAST_KEYS,
        block_size=block_size,
        group=group,
        kv_heads=kv_heads,
        dim=dim,
        dim_tile=triton.next_power_of_2(dim),
        rows_tile=max(triton.next_power_of_2(rows), 16),
        query_tile=tile.queries,
        key_tile=tile.keys,
        first_key=first_key,
        num_warps=4,
        num_stages=tile.stages,
        **launch_options(query),
    )


def _descriptors(
    key_cache: Tensor, value_cache: Tensor, tile: Tile
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """The caches as matrices of tokens by KV heads and dimensions, in tiles of one KV head."""
    if not tile.descriptors:
        return None, None
    dim = key_cache.size(3)
    keys, values = (
        TensorDescriptor.from_tensor(cache.view(-1, cache.size(2) * dim), [tile.keys, dim])
        for cache in (key_cache, value_cache)
    )
    return keys, values


@triton.jit
def _attend_tiles(
    q: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    key_descriptor: tl.tensor,
    value_descriptor: tl.tensor,
    table: tl.tensor,
    position: tl.tensor,
    gathered: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    length: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    masked: tl.constexpr,
    divides: tl.constexpr,
    block_size: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    dim_tile: tl.constexpr,
    key_tile: tl.constexpr,
    first_key: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    column = tl.arange(0, dim_tile)
    inside = column < dim
    for first in tl.range(begin, end, key_tile):
        key_position = first + tl.arange(0, key_tile)
        # What a row's last block holds beyond its length may be anything, so masked tiles are
        # loaded by pointers, which can leave cells out.
        if key_descriptor is not None and not masked:
            first_cell = tl.load(table + first // block_size) * block_size + first % block_size
            k = key_descriptor.load([first_cell, kv_head * dim])
            v = value_descriptor.load([first_cell, kv_head * dim])
        else:
            if block_size % key_tile == 0:
                # The tile lies in one block.
                block = tl.load(table + first // block_size).to(tl.int64)
                cell = block * block_size + first % block_size + tl.arange(0, key_tile)
            else:
                exists = key_position < length
                block = tl.load(table + key_position // block_size, mask=exists, other=0)
                cell = block.to(tl.int64) * block_size + key_position % block_size
            place = (cell * kv_heads + kv_head) * dim
            if masked or dim != dim_tile:
                loaded = (key_position < length)[:, None] & inside[None, :]
                k = tl.load(key_cache + place[:, None] + column[None, :], mask=loaded, other=0.0)
                v = tl.load(value_cache + place[:, None] + column[None, :], mask=loaded, other=0.0)
            else:
                k = tl.load(key_cache + place[:, None] + column[None, :])
                v = tl.load(value_cache + place[:, None] + column[None, :])
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if masked:
            sees = position[:, None] >= key_position[None, :]
            if first_key > 0:
                sees = sees & (key_position[None, :] >= tl.minimum(position, first_key)[:, None])
            score = tl.where(sees, score, -float("inf"))
        # Maxima are of scores before scaling, so that scaling and subtracting are one instruction.
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        base = new_maximum
        if masked and divides:
            # A query may see nothing of a part: its weights are 0, and no NaN.
            base = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
        weight = tl.exp2(score * scale - (base * scale)[:, None])
        shrink = tl.exp2((maximum - base) * scale)
        total = total * shrink + tl.sum(weight, 1)
        gathered = gathered * shrink[:, None]
        gathered = tl.dot(weight.to(v.dtype), v, gathered, input_precision="ieee")
        maximum = new_maximum
    return gathered, maximum, total


@triton.jit
def _store(result: tl.tensor, out: tl.tensor, place: tl.tensor, inside: tl.tensor) -> None:
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


# Where prefill rows begin among a step's rows varies, and with it what is aligned.
@triton.jit(
    do_not_specialize=["table_stride", "rows", "shares"],
    do_not_specialize_on_alignment=["tables", "kv_lengths", "starts"],
)
def _prefill_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    kv_lengths: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    key_descriptor: tl.tensor,
    value_descriptor: tl.tensor,
    part_output: tl.tensor,
    part_maximum: tl.tensor,
    part_total: tl.tensor,
    arrived: tl.tensor,
    shares: tl.tensor,
    divides: tl.constexpr,
    least_keys: tl.constexpr,
    block_size: tl.constexpr,
    group: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    dim_tile: tl.constexpr,
    rows_tile: tl.constexpr,
    query_tile: tl.constexpr,
    key_tile: tl.constexpr,
    first_key: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    # Which row's tile this is. The last tiles of a chunk have the most keys: they begin first, for
    # all heads.
    kv_head = tl.program_id(0)
    each = tl.arange(0, rows_tile)
    begins = tl.load(starts + each, mask=each < rows, other=0)
    ends = tl.load(starts + each + 1, mask=each < rows, other=0)
    tiles_of = ((ends - begins) * group + query_tile - 1) // query_tile
    # A unit is a tile of queries, or a part of its keys.
    units_of = tiles_of
    if divides:
        lengths = tl.load(kv_lengths + each, mask=each < rows, other=0)
        parts_of = parts_of_rows(tiles_of, lengths, shares, key_tile, least_keys)
        units_of = tiles_of * parts_of
    units_to = tl.cumsum(units_of, 0)
    number = tl.sum(units_of, 0) - 1 - tl.program_id(1)
    if number >= 0:
        row = tl.sum((units_to <= number).to(tl.int32), 0)
        tile = number - tl.sum(tl.where(each < row, units_of, 0), 0)
        if divides:
            parts = tl.sum(tl.where(each == row, parts_of, 0), 0)
            part = tile % parts
            tile = tile // parts
        start = tl.load(starts + row)
        tokens = tl.load(starts + row + 1) - start
        length = tl.load(kv_lengths + row)
        before = length - tokens
        # The query heads of a KV head share its keys: they are rows of one tile, token by token.
        local = tile * query_tile + tl.arange(0, query_tile)
        token = local // group
        head = kv_head * group + local % group
        column = tl.arange(0, dim_tile)
        inside = (token < tokens)[:, None] & (column < dim)[None, :]
        query_row = (start + token).to(tl.int64) * (kv_heads * group) + head
        place = query_row[:, None] * dim + column[None, :]
        q = tl.load(query + place, mask=inside, other=0.0)
        # Tokens behind the chunk's end attend like its last one, and are not stored.
        position = before + tl.minimum(token, tokens - 1)
        gathered = tl.zeros((query_tile, dim_tile), tl.float32)
        maximum = tl.full((query_tile,), -float("inf"), tl.float32)
        total = tl.zeros((query_tile,), tl.float32)
        table = tables + row.to(tl.int64) * table_stride
        # Keys that every query of the tile sees need no mask.
        first = before + tile * query_tile // group
        seen = (first + 1) // key_tile * key_tile
        end = tl.minimum(before + (tile * query_tile + query_tile - 1) // group + 1, length)
        begin = 0
        masked = seen
        if divides:
            tiles = tl.cdiv(tl.cdiv(end, key_tile), parts)
            begin = part * tiles * key_tile
            end = tl.minimum(begin + tiles * key_tile, end)
            seen = tl.minimum(seen, end)
            masked = tl.maximum(seen, begin)
        if first_key > 0:
            # The first tile has keys that are not seen.
            begin = tl.minimum(key_tile, end)
            gathered, maximum, total = _attend_tiles(
                q, key_cache, value_cache, key_descriptor, value_descriptor, table, position,
                gathered, maximum, total, 0, begin, length, kv_head, scale, True, divides,
                block_size, kv_heads, dim, dim_tile, key_tile, first_key,
            )  # fmt: skip
            begin = key_tile
            seen = tl.maximum(seen, key_tile)
            masked = seen
        gathered, maximum, total = _attend_tiles(
            q, key_cache, value_cache, key_descriptor, value_descriptor, table, position,
            gathered, maximum, total, begin, seen, length, kv_head, scale, False, divides,
            block_size, kv_heads, dim, dim_tile, key_tile, first_key,
        )  # fmt: skip
        gathered, maximum, total = _attend_tiles(
            q, key_cache, value_cache, key_descriptor, value_descriptor, table, position,
            gathered, maximum, total, masked, end, length, kv_head, scale, True, divides,
            block_size, kv_heads, dim, dim_tile, key_tile, first_key,
        )  # fmt: skip
        if divides:
            slot = kv_head * shares + number
            query_in_tile = tl.arange(0, query_tile)
            place_in_slot = query_in_tile[:, None] * dim + column[None, :]
            if parts > 1:
                at = slot * query_tile + query_in_tile
                tl.store(part_maximum + at, maximum * scale)
                tl.store(part_total + at, total)
                in_slot = part_output + slot.to(tl.int64) * query_tile * dim + place_in_slot
                tl.store(in_slot, gathered, mask=inside)
                first_slot = slot - part
                if is_last_part(arrived + first_slot, parts):
                    result = join_parts(
                        part_output, part_maximum, part_total, first_slot, parts, query_in_tile,
                        place_in_slot, inside, query_tile, dim,
                    )  # fmt: skip
                    _store(result, out, place, inside)
            else:
                _store(gathered / total[:, None], out, place, inside)
        else:
            _store(gathered / total[:, None], out, place, inside)
