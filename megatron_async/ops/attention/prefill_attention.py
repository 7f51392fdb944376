"""Paged attention of prefill chunks: many query tokens a row, causal, over the paged cache.

Flash attention (Dao et al. 2022) with a block-table lookup: one program takes a tile of a chunk's
queries, the query heads of one KV head packed together (as FlashAttention-3 does for few queries),
and walks their keys and values once, or a part of them. Lengths and places stay on the device,
which decides what each program does (`prefill_schedule.py`), so that a captured step serves any
chunks that fit its shape.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_async.ops.attention.join_parts import (
    LOG2_E,
    add_sink,
    add_tile,
    bounded,
    is_last_part,
    join_one,
    join_parts,
)
from megatron_async.ops.attention.narrow_cache import check_dtypes
from megatron_async.ops.attention.narrow_tile import WEIGHT_BITS, as_halves, evens_first, padded_dim
from megatron_async.ops.attention.prefill_schedule import UNIT, PrefillSchedule
from megatron_async.ops.attention.prefill_tile import Tile
from megatron_async.ops.dependent_launch import launch_options, wait_for_previous


def check_rows(
    name: str,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    schedule: PrefillSchedule,
    queries: int,
    out: Tensor,
) -> None:
    """Refuse, with a ValueError, arguments of the function `name` whose shapes do not match."""
    heads, dim = query.shape[1:]
    kv_heads, cache_dim = key_cache.shape[2:]
    if cache_dim != dim or heads % kv_heads or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"{name}: query {tuple(query.shape)} does not fit caches {tuple(key_cache.shape)} and "
            f"{tuple(value_cache.shape)}."
        )
    if block_tables.size(0) != schedule.rows or out.shape != query.shape:
        raise ValueError(
            f"{name}: {schedule.rows} rows want {schedule.rows} block tables, found "
            f"{block_tables.size(0)}; out must be like query."
        )
    made_for = schedule.kv_heads, schedule.group, schedule.queries, schedule.dim
    if made_for != (kv_heads, heads // kv_heads, queries, dim):
        raise ValueError(
            f"{name}: the schedule was made for {made_for[0]} KV heads of {made_for[1]} query "
            f"heads and tiles of {made_for[2]} queries of {made_for[3]}; here are {kv_heads} of "
            f"{heads // kv_heads}, {queries} and {dim}."
        )


AT_ONCE = tl.constexpr(2)
"""Parts of their own length that a tile's last program asks for at once; not measured."""
NO_MAXIMUM = tl.constexpr(-1e30)
"""Maximum before the first score; finite, so that a query that sees nothing of a tile or a part has
weights of 0, and no NaN."""


def paged_prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    schedule: PrefillSchedule,
    tile: Tile,
    scale: float,
    out: Tensor,
    is_settled: bool = False,
    first_key: int = 0,
    part: int = 0,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Attention of prefill rows over the paged cache, this step's keys and values already in place.

    Args:
        query: `[tokens, heads, dim]`, contiguous: the chunks' tokens end to end, perhaps between
            others.
        key_cache, value_cache: `[blocks, block size, kv heads, dim]`, contiguous; of the dtype of
            `query`, or e4m3.
        block_tables: int32 `[rows, blocks]`.
        schedule: of the step's rows, made for `tile`.
        tile: as `tile_of` chooses it.
        scale: softmax scale, above 0.
        out: `[tokens, heads, dim]`, contiguous; written for the rows' tokens, left alone for
            others.
        is_settled: the schedule was written before the previous kernel, and that kernel, or one
            between, waited for it before it let the next one start: so it may be read while the
            previous kernel still runs.
        first_key: queries behind this position do not see the keys before it; less than 16. Then
            the schedule divides no keys.
        part: keys of the parts of `DecodeSchedule.part`, which are joined in order: a query has the
            bits of a decode row, whatever the chunk. Then the schedule is made for them, if it
            divides keys, and the tile is `in_parts`. 0: there are none.
        scales: of caches in e4m3 (`narrow_cache.py`).
        sinks, window, softcap: of `TorchPagedAttention`. With a window the schedule divides no
            keys.

    Raises:
        ValueError: shapes do not match.
    """
    name = "paged_prefill_attention"
    check_rows(name, query, key_cache, value_cache, block_tables, schedule, tile.queries, out)
    check_dtypes(name, query.dtype, key_cache, value_cache, scales)
    dim = query.size(2)
    block_size, kv_heads = key_cache.shape[1:3]
    parts = schedule.parts
    if parts is not None and (first_key or window):
        raise ValueError(
            f"{name}: keys are divided, which first_key={first_key} and window={window} do not "
            "allow; make the schedule with processors=0."
        )
    is_cut_otherwise = parts is not None and schedule.part != part
    if is_cut_otherwise or (part and (first_key or part % tile.keys)):
        raise ValueError(
            f"{name}: parts of {part} keys want a schedule of processors=0 or for such parts, "
            f"first_key=0 and whole tiles; found processors={schedule.processors}, "
            f"part={schedule.part}, {first_key} and tiles of {tile.keys}."
        )
    if not len(schedule.units):
        return
    _prefill_kernel[kv_heads, len(schedule.units)](
        query,
        key_cache,
        value_cache,
        block_tables,
        block_tables.stride(0),
        schedule.units,
        scale * LOG2_E.value,
        query if scales is None else scales,
        sinks,
        out,
        *_descriptors(key_cache, value_cache, tile),
        *(parts or (None,) * 4),
        schedule.slots,
        divides=parts is not None,
        block_size=block_size,
        group=schedule.group,
        kv_heads=kv_heads,
        dim=dim,
        dim_tile=padded_dim(dim, scales is not None),
        query_tile=tile.queries,
        key_tile=tile.keys,
        first_key=first_key,
        window=window,
        softcap=softcap,
        part=part,
        is_settled=is_settled,
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
def _scores(
    queries: tl.tuple, key_cache: tl.tensor, value_cache: tl.tensor, key_descriptor: tl.tensor,
    value_descriptor: tl.tensor, table: tl.tensor, position: tl.tensor, first: tl.tensor,
    length: tl.tensor, kv_head: tl.tensor, masked: tl.constexpr, block_size: tl.constexpr,
    kv_heads: tl.constexpr, dim: tl.constexpr, dim_tile: tl.constexpr, key_tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Scores of the tile of keys from `first` on, and its values. `queries`: as the product takes
    them; what scores are multiplied by; the first key that one of the queries sees, and that each
    sees; the scale and the cap of scores. The last five may be None."""
    q, back, begin_key, least, own_scale, softcap = queries
    column = tl.arange(0, dim_tile)
    inside = column < dim
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
            if masked and begin_key is not None:
                exists = exists & (key_position >= begin_key)
            block = tl.load(table + key_position // block_size, mask=exists, other=0)
            cell = block.to(tl.int64) * block_size + key_position % block_size
        place = (cell * kv_heads + kv_head) * dim
        if masked or dim != dim_tile:
            loaded = (key_position < length)[:, None] & inside[None, :]
            if masked and begin_key is not None:
                loaded = loaded & (key_position >= begin_key)[:, None]
            k = tl.load(key_cache + place[:, None] + column[None, :], mask=loaded, other=0.0)
            v = tl.load(value_cache + place[:, None] + column[None, :], mask=loaded, other=0.0)
        else:
            k = tl.load(key_cache + place[:, None] + column[None, :])
            v = tl.load(value_cache + place[:, None] + column[None, :])
    if k.dtype == tl.float8e4nv:
        # In the order of decode attention; to widen is exact.
        k = evens_first(k.to(q.dtype))
        v = v.to(q.dtype)
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if back is not None:
        score *= back[:, None]
    if own_scale is not None:
        score = bounded(score, own_scale, softcap)
    if masked:
        sees = position[:, None] >= key_position[None, :]
        if least is not None:
            sees = sees & (key_position[None, :] >= least[:, None])
        score = tl.where(sees, score, -float("inf"))
    return score, v


@triton.jit
def _attend_tiles(
    queries: tl.tuple, key_cache: tl.tensor, value_cache: tl.tensor, key_descriptor: tl.tensor,
    value_descriptor: tl.tensor, table: tl.tensor, position: tl.tensor, gathered: tl.tensor,
    maximum: tl.tensor, total: tl.tensor, begin: tl.tensor, end: tl.tensor, length: tl.tensor,
    kv_head: tl.tensor, scale: tl.tensor, masked: tl.constexpr, block_size: tl.constexpr,
    kv_heads: tl.constexpr, dim: tl.constexpr, dim_tile: tl.constexpr, key_tile: tl.constexpr,
    in_parts: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    more: tl.constexpr = WEIGHT_BITS if key_cache.dtype.element_ty == tl.float8e4nv else 0
    for first in tl.range(begin, end, key_tile):
        score, v = _scores(
            queries, key_cache, value_cache, key_descriptor, value_descriptor, table, position,
            first, length, kv_head, masked, block_size, kv_heads, dim, dim_tile, key_tile,
        )  # fmt: skip
        if in_parts:
            maximum, total, gathered = add_tile(score, v, maximum, total, gathered, scale, more)
        else:
            # Maxima are of scores before scaling: scaling and subtracting are one instruction.
            new_maximum = tl.maximum(maximum, tl.max(score, 1))
            weight = tl.exp2(score * scale - (new_maximum * scale - more)[:, None])
            shrink = tl.exp2((maximum - new_maximum) * scale)
            added = tl.sum(weight, 1)
            if more > 0:
                added *= 2.0**-more
            total = total * shrink + added
            gathered = gathered * shrink[:, None]
            gathered = tl.dot(weight.to(v.dtype), v, gathered, input_precision="ieee")
            maximum = new_maximum
    return gathered, maximum, total


@triton.jit
def _attend_parts(
    queries: tl.tuple, key_cache: tl.tensor, value_cache: tl.tensor, key_descriptor: tl.tensor,
    value_descriptor: tl.tensor, table: tl.tensor, position: tl.tensor, gathered: tl.tensor,
    maximum: tl.tensor, total: tl.tensor, joined: tl.tensor, joined_maximum: tl.tensor,
    joined_total: tl.tensor, begin: tl.tensor, end: tl.tensor, length: tl.tensor,
    kv_head: tl.tensor, scale: tl.tensor, masked: tl.constexpr, block_size: tl.constexpr,
    kv_heads: tl.constexpr, dim: tl.constexpr, dim_tile: tl.constexpr, key_tile: tl.constexpr,
    part: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The tiles of all parts, whose copies go on over a part's border. A part is joined where the
    next one begins: at its own end Triton 3.6 would not wait in the branch for its last product."""
    more: tl.constexpr = WEIGHT_BITS if key_cache.dtype.element_ty == tl.float8e4nv else 0
    for first in tl.range(begin, end, key_tile):
        score, v = _scores(
            queries, key_cache, value_cache, key_descriptor, value_descriptor, table, position,
            first, length, kv_head, masked, block_size, kv_heads, dim, dim_tile, key_tile,
        )  # fmt: skip
        if first % part == 0:
            joined_maximum, joined_total, joined = join_one(
                joined_maximum, joined_total, joined, maximum, total, gathered, scale
            )
            # What was gathered is multiplied by 0 with this maximum.
            maximum = tl.full(maximum.shape, -float("inf"), tl.float32)
            total = tl.zeros(total.shape, tl.float32)
        maximum, total, gathered = add_tile(score, v, maximum, total, gathered, scale, more)
    return gathered, maximum, total, joined, joined_maximum, joined_total


@triton.jit
def _store(
    result: tl.tensor, value_scale: tl.tensor, out: tl.tensor, place: tl.tensor, inside: tl.tensor
) -> None:
    if value_scale is not None:
        result *= value_scale
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["table_stride", "slots"], do_not_specialize_on_alignment=["tables"])
def _prefill_kernel(
    query: tl.tensor, key_cache: tl.tensor, value_cache: tl.tensor, tables: tl.tensor,
    table_stride: tl.tensor, units: tl.tensor, scale: tl.tensor, scales: tl.tensor,
    sinks: tl.tensor, out: tl.tensor, key_descriptor: tl.tensor, value_descriptor: tl.tensor,
    part_output: tl.tensor, part_maximum: tl.tensor, part_total: tl.tensor, arrived: tl.tensor,
    slots: tl.tensor, divides: tl.constexpr, block_size: tl.constexpr, group: tl.constexpr,
    kv_heads: tl.constexpr, dim: tl.constexpr, dim_tile: tl.constexpr, query_tile: tl.constexpr,
    key_tile: tl.constexpr, first_key: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr,
    part: tl.constexpr, is_settled: tl.constexpr, overlap: tl.constexpr,
) -> None:  # fmt: skip
    if not is_settled:
        wait_for_previous(overlap)
    kv_head = tl.program_id(0)
    if key_cache.dtype.element_ty == tl.float8e4nv:
        # One for all keys of the head, so it belongs to the scores; one of values to the output.
        scale *= tl.load(scales + kv_head)
        value_scale = tl.load(scales + kv_heads + kv_head) * 2.0**-WEIGHT_BITS
    else:
        value_scale = None
    number = tl.program_id(1)
    unit = units + number * UNIT
    row = tl.load(unit)
    first_query = tl.load(unit + 1)
    start = tl.load(unit + 2)
    tokens = tl.load(unit + 3)
    length = tl.load(unit + 4)
    begin_tile = tl.load(unit + 5)
    end_tile = tl.load(unit + 6)
    # The query heads of a KV head share its keys: they are rows of one tile, token by token.
    local = first_query + tl.arange(0, query_tile)
    token = local // group
    head = kv_head * group + local % group
    column = tl.arange(0, dim_tile)
    inside = (token < tokens)[:, None] & (column < dim)[None, :]
    query_row = (start + token).to(tl.int64) * (kv_heads * group) + head
    place = query_row[:, None] * dim + column[None, :]
    if is_settled:
        wait_for_previous(overlap)
    if row >= 0:
        before = length - tokens
        q = tl.load(query + place, mask=inside, other=0.0)
        if value_scale is None:
            halves, back = q, None
        elif q.dtype == tl.bfloat16:
            halves, back = as_halves(q)
            halves = evens_first(halves)
        else:
            halves, back = evens_first(q), None
        # Tokens behind the chunk's end attend like its last one, and are not stored.
        position = before + tl.minimum(token, tokens - 1)
        gathered = tl.zeros((query_tile, dim_tile), tl.float32)
        maximum = tl.full((query_tile,), NO_MAXIMUM, tl.float32)
        total = tl.zeros((query_tile,), tl.float32)
        table = tables + row.to(tl.int64) * table_stride
        begin = begin_tile * key_tile
        last = before + (first_query + query_tile - 1) // group + 1
        end = tl.minimum(tl.minimum(last, length), end_tile * key_tile)
        # Keys that every query of the tile sees need no mask.
        seen = (before + first_query // group + 1) // key_tile * key_tile
        masked = seen
        if divides:
            seen = tl.minimum(seen, end)
            masked = tl.maximum(seen, begin)
        own_scale, cap, begin_key, least = None, None, None, None
        if softcap > 0:
            own_scale, cap = scale, softcap
            scale = tl.full((), LOG2_E, tl.float32)
        if first_key > 0:
            least = tl.minimum(position, first_key)
            led = key_tile  # where the tiles end that have keys which a query does not see
        if window > 0:
            # Tiles before the first query's window are skipped.
            begin_key = tl.maximum(before + first_query // group + 1 - window, 0)
            begin = begin_key // key_tile * key_tile
            last_begin = tl.maximum(tl.minimum(last, length) - window, 0)
            if first_key > 0:
                least = tl.maximum(least, position + 1 - window)
                last_begin = tl.maximum(last_begin, key_tile)
            else:
                least = position + 1 - window
            led = tl.cdiv(last_begin, key_tile) * key_tile
        queries = (halves, back, begin_key, least, own_scale, cap)
        if first_key > 0 or window > 0:
            if part == 0:
                gathered, maximum, total = _attend_tiles(
                    queries, key_cache, value_cache, key_descriptor, value_descriptor, table,
                    position, gathered, maximum, total, begin, tl.minimum(led, end), length,
                    kv_head, scale, True, block_size, kv_heads, dim, dim_tile, key_tile, False,
                )  # fmt: skip
                begin = led
            seen = tl.maximum(seen, led)
            masked = seen
        if part > 0:
            joined_maximum = tl.full((query_tile,), -float("inf"), tl.float32)
            joined_total, joined = total, gathered
            maximum = joined_maximum
            if divides:
                units_of_tile, first_slot = tl.load(unit + 8), tl.load(unit + 9)
                first_slot += kv_head * slots
                query_in_tile = tl.arange(0, query_tile)
                place_in_slot = query_in_tile[:, None] * dim + column[None, :]
                for first in range(begin, end, part):
                    part_end = tl.minimum(first + part, end)
                    masked = tl.minimum(tl.maximum(seen, first), part_end)
                    maximum = tl.full((query_tile,), -float("inf"), tl.float32)
                    total = tl.zeros((query_tile,), tl.float32)
                    gathered = tl.zeros((query_tile, dim_tile), tl.float32)
                    gathered, maximum, total = _attend_tiles(
                        queries, key_cache, value_cache, key_descriptor, value_descriptor, table,
                        position, gathered, maximum, total, first, masked, length, kv_head,
                        scale, False, block_size, kv_heads, dim, dim_tile, key_tile,
                        True,
                    )  # fmt: skip
                    gathered, maximum, total = _attend_tiles(
                        queries, key_cache, value_cache, key_descriptor, value_descriptor, table,
                        position, gathered, maximum, total, masked, part_end, length, kv_head,
                        scale, True, block_size, kv_heads, dim, dim_tile, key_tile, True,
                    )  # fmt: skip
                    # Joined from memory, one after another, by the tile's last program.
                    is_stored = units_of_tile > 1
                    at = (first_slot + first // part).to(tl.int64) * query_tile
                    tl.store(part_maximum + at + query_in_tile, maximum, mask=is_stored)
                    tl.store(part_total + at + query_in_tile, total, mask=is_stored)
                    in_slot = part_output + at * dim + place_in_slot
                    tl.store(in_slot, gathered, mask=inside & is_stored)
                    joined_maximum, joined_total, joined = join_one(
                        joined_maximum, joined_total, joined, maximum, total, gathered, scale
                    )
            else:
                led_or_begin = 0
                if window > 0:
                    gathered, maximum, total, joined, joined_maximum, joined_total = _attend_parts(
                        queries, key_cache, value_cache, key_descriptor, value_descriptor, table,
                        position, gathered, maximum, total, joined, joined_maximum, joined_total,
                        begin, tl.minimum(led, end), length, kv_head, scale, True,
                        block_size, kv_heads, dim, dim_tile, key_tile, part,
                    )  # fmt: skip
                    led_or_begin = led
                gathered, maximum, total, joined, joined_maximum, joined_total = _attend_parts(
                    queries, key_cache, value_cache, key_descriptor, value_descriptor, table,
                    position, gathered, maximum, total, joined, joined_maximum, joined_total,
                    led_or_begin, seen, length, kv_head, scale, False,
                    block_size, kv_heads, dim, dim_tile, key_tile, part,
                )  # fmt: skip
                gathered, maximum, total, joined, joined_maximum, joined_total = _attend_parts(
                    queries, key_cache, value_cache, key_descriptor, value_descriptor, table,
                    position, gathered, maximum, total, joined, joined_maximum, joined_total,
                    seen, end, length, kv_head, scale, True,
                    block_size, kv_heads, dim, dim_tile, key_tile, part,
                )  # fmt: skip
                joined_maximum, joined_total, joined = join_one(
                    joined_maximum, joined_total, joined, maximum, total, gathered, scale
                )
            total, gathered = joined_total, joined
        else:
            gathered, maximum, total = _attend_tiles(
                queries, key_cache, value_cache, key_descriptor, value_descriptor, table, position,
                gathered, maximum, total, begin, seen, length, kv_head, scale, False,
                block_size, kv_heads, dim, dim_tile, key_tile, part > 0,
            )  # fmt: skip
            gathered, maximum, total = _attend_tiles(
                queries, key_cache, value_cache, key_descriptor, value_descriptor, table, position,
                gathered, maximum, total, masked, end, length, kv_head, scale, True,
                block_size, kv_heads, dim, dim_tile, key_tile, part > 0,
            )  # fmt: skip
        sink, whole = None, total
        if sinks is not None:
            sink = tl.load(sinks + head, mask=token < tokens, other=0.0)
            if part > 0:
                whole = add_sink(total, joined_maximum, sink, scale)
            else:
                whole = add_sink(total, maximum, sink, scale)
        if divides and part > 0:
            if units_of_tile > 1:
                if is_last_part(arrived + first_slot, units_of_tile):
                    result = join_parts(
                        part_output, part_maximum, part_total, first_slot, tl.load(unit + 10),
                        query_in_tile, place_in_slot, inside, query_tile, dim, AT_ONCE, scale, sink,
                    )  # fmt: skip
                    _store(result, value_scale, out, place, inside)
            else:
                _store(gathered / whole[:, None], value_scale, out, place, inside)
        elif divides:
            nth = tl.load(unit + 7)
            parts = tl.load(unit + 8)
            if parts > 1:
                slot = kv_head * slots + number
                query_in_tile = tl.arange(0, query_tile)
                place_in_slot = query_in_tile[:, None] * dim + column[None, :]
                at = slot * query_tile + query_in_tile
                tl.store(part_maximum + at, maximum * scale)
                tl.store(part_total + at, total)
                in_slot = part_output + slot.to(tl.int64) * query_tile * dim + place_in_slot
                tl.store(in_slot, gathered, mask=inside)
                first_slot = slot - nth
                if is_last_part(arrived + first_slot, parts):
                    result = join_parts(
                        part_output, part_maximum, part_total, first_slot, parts, query_in_tile,
                        place_in_slot, inside, query_tile, dim, sink=sink,
                    )  # fmt: skip
                    _store(result, value_scale, out, place, inside)
            else:
                _store(gathered / whole[:, None], value_scale, out, place, inside)
        else:
            _store(gathered / whole[:, None], value_scale, out, place, inside)
