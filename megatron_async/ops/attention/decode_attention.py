"""Paged attention of decode rows: one query token a row, or a few, keys and values read once.

Flash-decoding (Dao et al. 2023): a program processes one KV head of a row and a part of its
sequence. All query heads of the KV head and all query tokens of the row are one tile, so that each
key and value is loaded once. The device chooses the parts once a step (`DecodeSchedule`). A second
kernel joins them; or, if rows fill the device, the last program of each row that has several. Then
no second kernel runs, which costs 1.3 to 1.8 microseconds a layer even if it has nothing to do.

Where parts have a length of their own (`DecodeSchedule.part`), a program takes several, each from
scratch, and joins them in order: in registers if it has the whole row, else the last program does,
from memory, by the same formula. So a row has the same bits in any company, on any device.

Rows that decode beside prompts run at the same time as those: each kernel alone leaves processors
idle (`is_beside`).

Constants measured on an H200 (docs/records/decode_attention.md). Rotating queries and appending
keys inside the kernel was slower than in a kernel before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.attention.decode_schedule import DecodeSchedule
from megatron_async.ops.attention.join_parts import (
    JOIN_AT_ONCE,
    JOIN_CHUNK,
    LOG2_E,
    add_sink,
    add_tile,
    bounded,
    is_last_part,
    join_kernel,
    join_one,
    join_parts,
    store_output,
    weigh_tile,
)
from megatron_async.ops.attention.narrow_cache import check_dtypes
from megatron_async.ops.attention.narrow_tile import (
    WEIGHT_BITS,
    as_halves,
    even_and_odd,
    of_units,
    padded_dim,
)
from megatron_async.ops.dependent_launch import (
    await_previous,
    launch_options,
    let_next_start,
    wait_for_previous,
)
from megatron_async.ops.linear.quantised_weight import BLOCK
from megatron_async.ops.linear.rounded_rows import RoundedRows, rounding_of

HEAD_TILE = 16
"""Query heads are padded to this many, the smallest tile of the matrix units."""
WARPS = 4
MAX_DIM = 256


def decode_tile(dim: int) -> int:
    """Tokens of keys that a program processes at once."""
    return 64 if dim <= 128 else 32


class DecodeWorkspace:
    """The schedule and the partial results of its parts, for decode rows of up to `max_width` query
    tokens; made once, used by every layer in turn. `part`, `longest` and `window` are
    `DecodeSchedule`'s."""

    def __init__(
        self,
        max_rows: int,
        heads: int,
        kv_heads: int,
        dim: int,
        device: torch.device,
        max_width: int = 1,
        part: int = 0,
        longest: int = 0,
        window: int = 0,
    ) -> None:
        tile = decode_tile(dim)
        if window:
            longest = min(longest, window + max_width + part)
        self.schedule = DecodeSchedule(max_rows, kv_heads, tile, device, part, longest, window)
        self.heads, self.max_width = heads, max_width
        shape = (self.schedule.slots, heads * max_width)
        self.output = torch.empty((*shape, dim), dtype=torch.float32, device=device)
        self.maximum = torch.empty(shape, dtype=torch.float32, device=device)
        self.total = torch.empty(shape, dtype=torch.float32, device=device)
        # Parts of a row's head that have been stored; zeros between two launches.
        self.arrived = torch.zeros(max_rows * kv_heads, dtype=torch.int32, device=device)


def paged_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    out: Tensor,
    is_settled: bool = False,
    positions: Tensor | None = None,
    first_key: int = 0,
    is_beside: bool = False,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    rounded: RoundedRows | None = None,
) -> None:
    """Attention of decode rows over the paged cache; their lengths are those of the schedule, and
    so is the window.

    Args:
        query: `[rows * width, heads, dim]`, contiguous, the query tokens of a row as neighbours;
            bfloat16, float16 or float32; dim 16 to 256.
        key_cache, value_cache: `[blocks, block size, kv heads, dim]`, contiguous, dtype of `query`
            or e4m3.
        block_tables: int32 `[rows, blocks]`; rows may be strided.
        scale: softmax scale.
        workspace: its schedule updated for these rows; partial results are overwritten.
        out: like `query`, written for the rows that the schedule has.
        is_settled: schedule and block tables were written before the previous kernel, and that
            kernel waits before it lets its successor start (as `rope_append` does). Then both are
            read without waiting for the previous kernel.
        positions: int64 `[rows * width]`, contiguous: each query token sees the keys up to its own
            position, which is in its row's length. Needed where width is more than 1.
        first_key: queries after this position do not see the keys before it.
        is_beside: the previous kernel waits before it lets its successor start (as the one of
            `ops/attention/prefill_attention.py` does) and writes nothing that this one reads or
            writes. Then both run at the same time, and this one ends behind the other.
        scales: of caches in e4m3 (`narrow_cache.py`).
        sinks, softcap: of `TorchPagedAttention`.
        rounded: rows for a product in FP8, of which `out` is a view of the codes; heads of 128.

    Raises:
        ValueError: shapes, dtypes or strides that the kernel cannot serve.
    """
    schedule = workspace.schedule
    _check(query, key_cache, value_cache, block_tables, workspace, out, positions, scales, rounded)
    tokens, heads, dim = query.shape
    rows = len(block_tables)
    width = tokens // rows
    _blocks, block_size, kv_heads, _dim = key_cache.shape
    group = heads // kv_heads
    dim_tile = padded_dim(dim, scales is not None)
    joins = schedule.is_full or schedule.part > 0
    # Heads of an item are neighbours in memory, and the longest items begin first.
    _parts_kernel[(kv_heads, rows + schedule.shares)](
        query,
        key_cache,
        value_cache,
        block_tables,
        block_tables.stride(0),
        schedule.items,
        schedule.splits,
        schedule.items if positions is None else positions,
        scale * LOG2_E.value,
        query if scales is None else scales,
        sinks,
        out,
        *rounding_of(rounded),
        workspace.output,
        workspace.maximum,
        workspace.total,
        workspace.arrived,
        block_size=block_size,
        kv_heads=kv_heads,
        group=group,
        width=width,
        head_tile=max(HEAD_TILE, triton.next_power_of_2(group * width)),
        dim=dim,
        dim_tile=dim_tile,
        tile=schedule.tile,
        part=schedule.part,
        at_once=JOIN_AT_ONCE if schedule.part else 1,
        first_key=first_key,
        window=schedule.window,
        softcap=softcap,
        joins=joins,
        is_settled=is_settled,
        is_beside=is_beside,
        num_warps=WARPS,
        num_stages=_stages(key_cache.element_size(), rows * kv_heads, dim, schedule.processors),
        **launch_options(query),
    )
    if joins:
        return
    units = rows * heads * width
    join_kernel[(min(units, 4 * schedule.processors),)](
        workspace.output,
        workspace.maximum,
        workspace.total,
        schedule.splits,
        query,
        out,
        *rounding_of(rounded),
        sinks,
        units,
        heads=heads * width,
        width=width,
        dim=dim,
        dim_tile=dim_tile,
        chunk=JOIN_CHUNK,
        is_settled=is_settled,
        num_warps=1,
        **launch_options(query),
    )


def _stages(element_size: int, programs: int, dim: int, processors: int) -> int:
    """Tiles of keys and values in flight, plus one. With three stages of 128 x 64 elements three
    programs fit a processor at a time, and a little more than three programs for each would leave a
    second wave mostly empty: four stages, two programs a processor."""
    if element_size == 4:
        return 2
    return 4 if dim > 64 and 3 * processors < programs <= 4 * processors else 3


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    workspace: DecodeWorkspace,
    out: Tensor,
    positions: Tensor | None,
    scales: Tensor | None,
    rounded: RoundedRows | None,
) -> None:
    """Raise on arguments that would read or write the wrong memory."""
    tokens, heads, dim = query.shape
    rows = max(len(block_tables), 1)
    width = tokens // rows
    kv_heads, cache_dim = key_cache.shape[2:]
    if cache_dim != dim or heads % kv_heads or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"paged_decode_attention: query {tuple(query.shape)} does not fit caches "
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}: pass this model's KV cache."
        )
    if not HEAD_TILE <= dim <= MAX_DIM:
        raise ValueError(
            f"paged_decode_attention: heads of {dim} elements are not served, {HEAD_TILE} to "
            f"{MAX_DIM} are: use the torch backend."
        )
    if out.shape != query.shape or tokens != rows * width or workspace.schedule.rows != rows:
        raise ValueError(
            f"paged_decode_attention: query {tuple(query.shape)} wants an output of this shape, "
            f"equally many tokens for each of {rows} block tables, and a schedule of {rows} rows; "
            f"found {tuple(out.shape)}, {block_tables.size(0)} and {workspace.schedule.rows}: call "
            "schedule.update first."
        )
    made_for = workspace.heads, workspace.output.size(2), workspace.schedule.kv_heads
    if made_for != (heads, dim, kv_heads) or width > workspace.max_width:
        raise ValueError(
            f"paged_decode_attention: the workspace was made for heads of {made_for[:2]} over "
            f"{made_for[2]} KV heads and up to {workspace.max_width} query tokens a row, the query "
            f"has {tuple(query.shape[1:])} over {kv_heads} and {width} tokens a row."
        )
    if width > 1 and (
        positions is None
        or positions.shape != (tokens,)
        or positions.dtype != torch.int64
        or not positions.is_contiguous()
    ):
        raise ValueError(
            f"paged_decode_attention: rows of {width} query tokens want their positions, "
            f"contiguous int64 [{tokens}]."
        )
    check_dtypes("paged_decode_attention", query.dtype, key_cache, value_cache, scales)
    if rounded is not None and (dim != BLOCK or out.data_ptr() != rounded.codes.data_ptr()):
        raise ValueError(
            f"paged_decode_attention: heads of {BLOCK} are rounded, into `rounded`; found {dim}."
        )
    dtype = query.dtype if rounded is None else rounded.codes.dtype
    if out.dtype != dtype or block_tables.dtype != torch.int32:
        raise ValueError(
            f"paged_decode_attention: query and output must have one dtype and block tables int32; "
            f"found {query.dtype}, {out.dtype} and {block_tables.dtype}."
        )
    whole = (query, key_cache, value_cache, out)
    if block_tables.stride(1) != 1 or not all(tensor.is_contiguous() for tensor in whole):
        raise ValueError(
            "paged_decode_attention: query, caches and output must be contiguous and the entries "
            "of a block table adjacent: pass whole layers of the cache."
        )


@triton.jit(do_not_specialize=["table_stride", "scale_stride"])
def _parts_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    items: tl.tensor,
    splits: tl.tensor,
    positions: tl.tensor,
    scale: tl.tensor,
    scales: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    rounded_scales: tl.tensor,
    scale_stride: tl.tensor,
    input_scale: tl.tensor,
    part_output: tl.tensor,
    part_maximum: tl.tensor,
    part_total: tl.tensor,
    arrived: tl.tensor,
    block_size: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    width: tl.constexpr,
    head_tile: tl.constexpr,
    dim: tl.constexpr,
    dim_tile: tl.constexpr,
    tile: tl.constexpr,
    part: tl.constexpr,
    at_once: tl.constexpr,
    first_key: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    joins: tl.constexpr,
    is_settled: tl.constexpr,
    is_beside: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    if is_beside:
        let_next_start(overlap)
    elif not is_settled:
        wait_for_previous(overlap)
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * 4
    row, start = tl.load(item), tl.load(item + 1)
    end, slot = tl.load(item + 2), tl.load(item + 3)
    table = tables + row.to(tl.int64) * table_stride
    offset = tl.arange(0, tile)
    if window > 0:
        begin = start  # the first key that is seen
        start = start // tile * tile
    # A lookup inside the loop would take a stage of its pipeline: block numbers are read one tile
    # ahead, one number where a tile lies in one block.
    if block_size % tile == 0:
        block = tl.load(table + start // block_size, mask=start < end, other=0)
    else:
        position = start + offset
        block = tl.load(table + position // block_size, mask=position < end, other=0)
    if is_settled and not is_beside:
        wait_for_previous(overlap)
    narrow: tl.constexpr = key_cache.dtype.element_ty == tl.float8e4nv
    # Elements of a key or value in a cell that is loaded, and the powers of two by which weights,
    # and so sums of values, are larger.
    per: tl.constexpr = 2 if narrow else 1
    more: tl.constexpr = WEIGHT_BITS if narrow else 0
    if narrow:
        # One for all keys of the head, so it belongs to the scores; one of values to the output.
        scale *= tl.load(scales + kv_head)
        value_scale = tl.load(scales + kv_heads + kv_head) * 2.0**-more
        key_cache = key_cache.to(tl.pointer_type(tl.int16))
        value_cache = value_cache.to(tl.pointer_type(tl.int16))
    else:
        value_scale = None
    if softcap > 0:
        own_scale = scale
        scale = tl.full((), LOG2_E, tl.float32)
    if row >= 0:
        member = tl.arange(0, head_tile)
        column = tl.arange(0, dim_tile)
        is_member = member < width * group
        inside = is_member[:, None] & (column < dim)[None, :]
        # Heads of one row, over all of its query tokens.
        heads: tl.constexpr = kv_heads * group * width
        head = kv_head * group + member
        if width > 1:
            query_token = member // group
            head = query_token * (kv_heads * group) + kv_head * group + member % group
            place_of_token = positions + row * width + query_token
            visible = tl.load(place_of_token, mask=is_member, other=0) + 1
        place = head[:, None] * dim + column[None, :]
        target, nth = out + row * heads * dim + place, row * heads + head
        rounding = (rounded_scales, scale_stride, input_scale)
        q = tl.load(query + row * heads * dim + place, mask=inside, other=0.0)
        if narrow:
            if q.dtype == tl.bfloat16:
                q, back = as_halves(q)
            q, odd_q = even_and_odd(q)
        maximum = tl.full((head_tile,), -float("inf"), tl.float32)
        total = tl.zeros((head_tile,), tl.float32)
        gathered = tl.zeros((head_tile, dim_tile // per), tl.float32)
        odd = gathered
        if part > 0:
            joined_maximum, joined_total = maximum, total
            joined = tl.zeros((head_tile, dim_tile), tl.float32)
        unit = tl.arange(0, dim_tile // per)
        for first in range(start, end, tile):
            position = first + offset
            exists = position < end
            if window > 0:
                exists = exists & (position >= begin)
            following = position + tile
            if block_size % tile == 0:
                token = block.to(tl.int64) * block_size + first % block_size + offset
                block = tl.load(
                    table + (first + tile) // block_size, mask=first + tile < end, other=0
                )
            else:
                token = block.to(tl.int64) * block_size + position % block_size
                block = tl.load(table + following // block_size, mask=following < end, other=0)
            cell = (token * kv_heads + kv_head)[:, None] * (dim // per) + unit[None, :]
            loaded = exists[:, None]
            if dim != dim_tile:
                loaded &= (unit < dim // per)[None, :]
            k = tl.load(key_cache + cell, mask=loaded, other=0)
            v = tl.load(value_cache + cell, mask=loaded, other=0)
            if narrow:
                k, odd_k = of_units(k, q.dtype, overlap)
                v, odd_v = of_units(v, q.dtype, overlap)
                score = tl.dot(q, tl.trans(k), input_precision="ieee")
                score = tl.dot(odd_q, tl.trans(odd_k), score, input_precision="ieee")
                if query.dtype.element_ty == tl.bfloat16:
                    score *= back[:, None]
            else:
                score = tl.dot(q, tl.trans(k), input_precision="ieee")
            if softcap > 0:
                score = bounded(score, own_scale, softcap)
            if part == 0:
                score *= scale
            if width > 1:
                seen = exists[None, :] & (position[None, :] < visible[:, None])
                if first_key > 0:
                    begins = tl.minimum(visible - 1, first_key)
                    seen = seen & (position[None, :] >= begins[:, None])
                if window > 0:
                    seen = seen & (position[None, :] >= visible[:, None] - window)
                score = tl.where(seen, score, -float("inf"))
                new_maximum = tl.maximum(maximum, tl.max(score, 1))
                # A query token may see nothing of a part: its weights are 0, and no NaN.
                base = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
            else:
                if first_key > 0:
                    # Each row has a key behind it, in its first part too, or this one alone.
                    exists = exists & ((position >= first_key) | (end <= first_key))
                score = tl.where(exists[None, :], score, -float("inf"))
                new_maximum = tl.maximum(maximum, tl.max(score, 1))
                base = new_maximum
            if part > 0:
                if narrow:
                    weight, maximum, total, shrink = weigh_tile(score, maximum, total, scale)
                    weight = (weight * 2.0**more).to(v.dtype)
                    shrink = shrink[:, None]
                    gathered = tl.dot(weight, v, gathered * shrink, input_precision="ieee")
                    odd = tl.dot(weight, odd_v, odd * shrink, input_precision="ieee")
                    whole = tl.reshape(tl.join(gathered, odd), (head_tile, dim_tile))
                else:
                    maximum, total, gathered = add_tile(score, v, maximum, total, gathered, scale)
                    whole = gathered
                # No branch: the loop's loads stay in their pipeline.
                ends = ((first + tile) % part == 0) | (first + tile >= end)
                is_stored = ends & (slot >= 0)
                # A window may begin within a part, whose item then ends where another part does.
                at = (slot + (first - start) // part).to(tl.int64) * heads
                tl.store(part_maximum + at + head, maximum, mask=is_stored & is_member)
                tl.store(part_total + at + head, total, mask=is_stored & is_member)
                tl.store(part_output + at * dim + place, whole, mask=is_stored & inside)
                behind_maximum, behind_total, behind = join_one(
                    joined_maximum, joined_total, joined, maximum, total, whole, scale
                )
                joined_maximum = tl.where(ends, behind_maximum, joined_maximum)
                joined_total = tl.where(ends, behind_total, joined_total)
                joined = tl.where(ends, behind, joined)
                maximum = tl.where(ends, -float("inf"), maximum)
                total = tl.where(ends, 0.0, total)
                gathered = tl.where(ends, 0.0, gathered)
                if narrow:
                    odd = tl.where(ends, 0.0, odd)
            else:
                weight = tl.exp2(score - (base - more)[:, None])
                shrink = tl.exp2(maximum - base)
                gathered = gathered * shrink[:, None]
                gathered = tl.dot(weight.to(v.dtype), v, gathered, input_precision="ieee")
                if narrow:
                    odd = odd * shrink[:, None]
                    odd = tl.dot(weight.to(v.dtype), odd_v, odd, input_precision="ieee")
                added = tl.sum(weight, 1)
                if narrow:
                    added *= 2.0**-more
                total = total * shrink + added
                maximum = new_maximum
        if part > 0:
            total, gathered = joined_total, joined
        elif narrow:
            gathered = tl.reshape(tl.join(gathered, odd), (head_tile, dim_tile))
        if sinks is not None:
            sink = tl.load(sinks + kv_head * group + member % group, mask=is_member, other=0.0)
        else:
            sink = None
        if slot < 0:
            if sinks is not None:
                if part > 0:
                    total = add_sink(total, joined_maximum, sink, scale)
                else:
                    total = add_sink(total, maximum, sink, 1.0)
            result = gathered / tl.maximum(total, 1e-30)[:, None]
            if narrow:
                result *= value_scale
            store_output(target, result, inside, nth, is_member, rounding, heads // width, query)
        else:
            if joins:
                first_slot, parts = tl.load(splits + row * 2), tl.load(splits + row * 2 + 1)
            if part > 0:
                own = tl.cdiv(end - start, part)
            else:
                own = 1
                tl.store(part_maximum + slot * heads + head, maximum, mask=is_member)
                tl.store(part_total + slot * heads + head, total, mask=is_member)
                if narrow and not joins:
                    gathered *= value_scale  # the second kernel knows of no scales
                tl.store(part_output + slot * heads * dim + place, gathered, mask=inside)
            if joins:
                counter = arrived + row * kv_heads + kv_head
                if is_last_part(counter, parts, own):
                    result = join_parts(
                        part_output, part_maximum, part_total, first_slot, parts, head, place,
                        inside, heads, dim, at_once, scale if part > 0 else 1.0, sink,
                    )  # fmt: skip
                    if narrow:
                        result *= value_scale
                    store_output(
                        target, result, inside, nth, is_member, rounding, heads // width, query
                    )
    if is_beside and tl.program_id(1) == tl.num_programs(1) - 1:
        # A kernel behind this one waits for the one before too. The last programs' wait is enough;
        # if all waited, they would keep processors from the programs that have yet to begin.
        await_previous(overlap)
