"""Attention of one row inside the kernel of all layers: programs share heads and keys.

A program attends with all query heads of one KV head to a part of the keys. Those but the newest
are in the cache since earlier steps, so the first ones are asked for a layer ahead; the newest
comes with the queries. A sequence of few keys has one part; else one more program for each query
head joins the parts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from megatron_async.ops.persistent.messages import receive, send

NOTHING = gl.constexpr(-1e30)
"""Maximum of no scores; finite, so that it has no NaN."""
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def places_of(
    block_table: gl.tensor,
    key: gl.tensor,
    is_kept: gl.tensor,
    kv_head: gl.tensor,
    block_size: gl.constexpr,
    kv_heads: gl.constexpr,
    dim: gl.constexpr,
) -> gl.tensor:
    """First elements of keys in a layer's cache, int64 like `key`; of any where not kept."""
    block = gl.load(block_table + key // block_size, mask=is_kept, other=0).to(gl.int64)
    return ((block * block_size + key % block_size) * kv_heads + kv_head) * dim


@gluon.jit
def copy_first_keys(
    shared_keys: gl.tensor,
    shared_values: gl.tensor,
    keys: gl.tensor,
    value_offset: gl.tensor,
    place: gl.tensor,
    is_kept: gl.tensor,
    dim: gl.constexpr,
    layout: gl.constexpr,
) -> None:
    """Ask for the first tile of a layer; the caller ends the group of copies."""
    column = gl.arange(0, dim, gl.SliceLayout(0, layout))
    source = keys + place[:, None] + column[None, :]
    mask = is_kept[:, None] & (column < dim)[None, :]
    async_copy.async_copy_global_to_shared(shared_keys, source, mask=mask)
    async_copy.async_copy_global_to_shared(shared_values, source + value_offset, mask=mask)


@gluon.jit
def attend(
    heads_of_row: gl.tensor,
    shared_keys: gl.tensor,
    shared_values: gl.tensor,
    keys: gl.tensor,
    value_offset: gl.tensor,
    block_table: gl.tensor,
    begin: gl.tensor,
    end: gl.tensor,
    length: gl.tensor,
    kv_head: gl.tensor,
    scale: gl.tensor,
    block_size: gl.constexpr,
    kv_heads: gl.constexpr,
    group_padded: gl.constexpr,
    group: gl.constexpr,
    dim: gl.constexpr,
    tile: gl.constexpr,
    layout: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Attention to the keys `[begin, end)` of a sequence of `length`, the last of which is new.

    Args:
        heads_of_row: float32 `[8 or more, dim]` in shared memory: the group's queries, the new key
            and value.
        shared_keys, shared_values: `[tile, dim]`, those from `begin` on that are not new.
        keys: pointer to the layer's keys; its values are `value_offset` elements behind.
        layout: of `[tile, group_padded, dim]`, all of `group_padded` in each thread.

    Returns:
        float32 `[group_padded, dim]`, normalised, and the binary logarithm of the weights' sum,
        `[group_padded]`.
    """
    flat: gl.constexpr = gl.SliceLayout(1, layout)
    by_head: gl.constexpr = gl.SliceLayout(0, layout)
    score_layout: gl.constexpr = gl.SliceLayout(2, layout)
    head_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    column = gl.arange(0, dim, gl.SliceLayout(0, flat))
    whole: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    query = heads_of_row._reinterpret(gl.float32, [group_padded, dim], whole).load(by_head)
    new_key = heads_of_row.index(group).load(gl.SliceLayout(0, flat))
    new_value = heads_of_row.index(group + 1).load(gl.SliceLayout(0, flat))
    maximum = gl.full([group_padded], NOTHING, gl.float32, head_layout)
    total = gl.zeros([group_padded], gl.float32, head_layout)
    gathered = gl.zeros([group_padded, dim], gl.float32, by_head)
    key_tile = shared_keys.load(flat)
    value_tile = shared_values.load(flat)
    for first in range(begin, end, tile):
        key = first + gl.arange(0, tile, gl.SliceLayout(1, flat))
        is_new = (key == length - 1)[:, None]
        is_seen = (key < end)[:, None]
        k = gl.where(is_new, new_key[None, :], key_tile.to(gl.float32))
        v = gl.where(is_new, new_value[None, :], value_tile.to(gl.float32))
        # Behind the end there may be anything, also NaN.
        v = gl.where(is_seen, v, 0.0)
        after = key + tile
        is_kept = (after < end) & (after < length - 1)
        place = places_of(block_table, after, is_kept, kv_head, block_size, kv_heads, dim)
        source = keys + place[:, None] + column[None, :]
        key_tile = gl.load(source, mask=is_kept[:, None], other=0.0)
        value_tile = gl.load(source + value_offset, mask=is_kept[:, None], other=0.0)
        score = gl.sum(k[:, None, :] * query[None, :, :], 2) * (scale * LOG2_E)
        seen = first + gl.arange(0, tile, gl.SliceLayout(1, score_layout)) < end
        score = gl.where(seen[:, None], score, -float("inf"))
        new_maximum = gl.maximum(maximum, gl.max(score, 0))
        weight = gl.exp2(score - new_maximum[None, :])
        shrink = gl.exp2(maximum - new_maximum)
        total = total * shrink + gl.sum(weight, 0)
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, by_head))
        gathered = gathered * shrink[:, None] + gl.sum(v[:, None, :] * weight[:, :, None], 0)
        maximum = new_maximum
    row_total = gl.convert_layout(total, gl.SliceLayout(1, by_head))
    return gathered / row_total[:, None], maximum + gl.log2(total)


@gluon.jit
def send_attended(
    out_words: gl.tensor,
    part_words: gl.tensor,
    sum_words: gl.tensor,
    attended: gl.tensor,
    logarithm: gl.tensor,
    kv_head: gl.tensor,
    part: gl.tensor,
    used: gl.tensor,
    epoch: gl.tensor,
    group_padded: gl.constexpr,
    group: gl.constexpr,
    parts: gl.constexpr,
    dim: gl.constexpr,
    layout: gl.constexpr,
) -> None:
    """Send what `attend` gave: as a part, or, where there is one part, as the output."""
    by_head: gl.constexpr = gl.SliceLayout(0, layout)
    member = gl.arange(0, group_padded, gl.SliceLayout(1, by_head))
    lone = gl.arange(0, group_padded, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    column = gl.arange(0, dim, gl.SliceLayout(0, by_head))
    wanted = (member < group)[:, None] & (column < dim)[None, :]
    head = kv_head * group + member
    if used == 1:
        send(out_words, (head * dim)[:, None] + column[None, :], attended, epoch, wanted)
    else:
        index = ((head * parts + part) * dim)[:, None] + column[None, :]
        send(part_words, index, attended, epoch, wanted)
        send(sum_words, (kv_head * group + lone) * parts + part, logarithm, epoch, lone < group)


@gluon.jit
def join_parts(
    part_words: gl.tensor,
    sum_words: gl.tensor,
    out_words: gl.tensor,
    head: gl.tensor,
    used: gl.tensor,
    epoch: gl.tensor,
    parts: gl.constexpr,
    parts_padded: gl.constexpr,
    dim: gl.constexpr,
    layout: gl.constexpr,
) -> None:
    """Join the `used` parts of a query head and send its output.

    Args:
        part_words, sum_words: `[heads, parts, dim]` and `[heads, parts]` words.
        layout: of `[parts_padded, dim]`, eight adjacent columns a thread.
    """
    part = gl.arange(0, parts_padded, gl.SliceLayout(1, layout))
    column = gl.arange(0, dim, gl.SliceLayout(0, layout))
    index = ((head * parts + part) * dim)[:, None] + column[None, :]
    is_used = (part < used)[:, None] & (column < dim)[None, :]
    logarithm = receive(sum_words, head * parts + part, epoch, part < used, 1)
    output = receive(part_words, index, epoch, is_used, 8)
    logarithm = gl.where(part < used, logarithm, NOTHING)
    weight = gl.exp2(logarithm - gl.max(logarithm, 0))
    joined = gl.sum(output * weight[:, None], 0) / gl.sum(weight, 0)
    send(out_words, head * dim + column, joined, epoch, column < dim)
