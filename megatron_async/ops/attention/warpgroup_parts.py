"""A warpgroup's attention in parts of one length, with the bits of a decode row.

Keys come in order, in the tiles of decode attention; each part begins from scratch, and is joined
behind the parts before it. What a tile adds to its part and a part to the others is said once, for
Triton's kernels and for this one (`join_parts.py`). The products are those of `warpgroup_mma`,
which adds up as decode attention's do (docs/records/one_order.md).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from megatron_async.ops.attention import join_parts
from megatron_async.ops.attention.narrow_tile import WEIGHT_BITS
from megatron_async.ops.attention.warpgroup_join import add_sink, load_sinks
from megatron_async.ops.attention.warpgroup_tiles import (
    again,
    as_factor,
    bring_queries,
    clear_behind,
    first_whole_tile,
    in_memory,
    of_product,
    places,
    seen,
    store_output,
)

# mypy: disable-error-code="assignment"

# As Gluon takes Triton's own functions.
weigh_tile = gluon.jit(join_parts.weigh_tile.fn)
join_one = gluon.jit(join_parts.join_one.fn)


@gluon.jit
def _add_tiles(
    begin: gl.tensor,
    stop: gl.tensor,
    queries: gl.shared_memory_descriptor,
    shared: gl.tuple,
    state: gl.tuple,
    position: gl.tensor,
    scale: gl.tensor,
    back: gl.tensor,
    number: gl.constexpr,
    masked: gl.constexpr,
    narrow: gl.constexpr,
    part: gl.constexpr,
    in_turns: gl.constexpr,
    begin_tile: gl.tensor,
    window: gl.constexpr,
) -> gl.tuple:
    """Tiles `begin` .. `stop` - 1, counted from `begin_tile`: their scores and weights, and the
    values of the tile before each. A part is joined where the next one begins."""
    keys, values, keys_there, values_there, keys_read, values_read, turns = shared
    weights, maximum, total, gathered, joined_maximum, joined_total, joined = state
    warpgroups: gl.constexpr = turns.shape[0]
    stages: gl.constexpr = keys.shape[0]
    key_tile: gl.constexpr = keys.shape[1]
    count: gl.constexpr = queries.shape[0]
    dim: gl.constexpr = queries.shape[1]
    rows: gl.constexpr = gl.SliceLayout(1, of_product(dim))
    for i in range(begin, stop):
        slot = i % stages
        before = (i - 1) % stages
        before_phase = (i - 1) // stages % 2
        multiplied = gl.convert_layout(weights.to(queries.dtype), as_factor(dim))
        mbarrier.wait(keys_there.index(slot), i // stages % 2)
        if in_turns:
            # As in `warpgroup_attention_kernel.py`.
            mbarrier.wait(turns.index(number), (i - 1) % 2 if number > 0 else i % 2)
        zeros = gl.zeros([count, key_tile], gl.float32, layout=of_product(key_tile))
        scores = warpgroup_mma(
            queries, keys.index(slot).permute((1, 0)), warpgroup_mma_init(zeros), is_async=True
        )
        mbarrier.wait(values_there.index(before), before_phase)
        adding = warpgroup_mma(
            multiplied, values.index(before), warpgroup_mma_init(gathered), is_async=True
        )
        if in_turns:
            mbarrier.arrive(turns.index((number + 1) % warpgroups), count=1)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(keys_read.index(slot), count=1)
        if narrow:
            scores = scores * back[:, None]
        first = (begin_tile + i) * key_tile
        if masked:
            key = first + gl.arange(0, key_tile, layout=gl.SliceLayout(0, of_product(key_tile)))
            scores = gl.where(seen(position, key, window), scores, -float("inf"))
        begins = first % part == 0
        its_maximum, its_total = maximum, total
        weights, maximum, total, shrink = weigh_tile(
            scores, gl.where(begins, -float("inf"), maximum), gl.where(begins, 0.0, total), scale
        )
        if narrow:
            weights = weights * 2.0**WEIGHT_BITS
        # These are there already. But ptxas moves nothing over a branch, and would move the
        # weights behind the wait below.
        mbarrier.wait(values_there.index(before), before_phase)
        gathered, multiplied, weights, shrink = warpgroup_mma_wait(
            0, deps=(adding, multiplied, weights, shrink)
        )
        mbarrier.arrive(values_read.index(before), count=1)
        if begins:
            joined_maximum, joined_total, joined = join_one(
                joined_maximum, joined_total, joined, gl.convert_layout(its_maximum, rows),
                gl.convert_layout(its_total, rows), gathered, scale,
            )  # fmt: skip
        # By 0, where a part begins.
        gathered = gathered * gl.convert_layout(shrink, rows)[:, None]
    return weights, maximum, total, gathered, joined_maximum, joined_total, joined


@gluon.jit
def attend_parts(
    number: gl.constexpr,
    query: gl.tensor,
    out: gl.tensor,
    chunk: gl.tuple,
    first_query: gl.tensor,
    kv_head: gl.tensor,
    end: gl.tensor,
    tiles: gl.tensor,
    unmasked: gl.tensor,
    scale: gl.tensor,
    all_queries: gl.shared_memory_descriptor,
    shared: gl.tuple,
    _partial: gl.tuple,
    value_scale: gl.tensor,
    sinks: gl.tuple,
    part: gl.constexpr,
    narrow: gl.constexpr,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    dim: gl.constexpr,
    in_turns: gl.constexpr,
    window: gl.constexpr,
    has_sinks: gl.constexpr,
) -> None:
    """One warpgroup's queries over the `tiles` tiles before tile `end`: the first ones, where there
    is no window."""
    start, tokens, length = chunk
    keys, values, keys_there, values_there, keys_read, _values_read, _turns = shared
    stages: gl.constexpr = keys.shape[0]
    key_tile: gl.constexpr = keys.shape[1]
    count: gl.constexpr = all_queries.shape[1]
    flat: gl.constexpr = in_memory(dim)
    layout: gl.constexpr = of_product(key_tile)
    sums: gl.constexpr = of_product(dim)
    rows: gl.constexpr = gl.SliceLayout(1, sums)
    own = first_query + number * count
    place, exists = places(own, start, tokens, kv_head, count, kv_heads, group, dim)
    queries = all_queries.index(number)
    found = gl.load(query + place, mask=exists, other=0.0)
    back = bring_queries(found, queries, gl.SliceLayout(1, layout), narrow)
    # What tokens behind the chunk's end attend to is not stored.
    token = (own + gl.arange(0, count, layout=gl.SliceLayout(1, layout))) // group
    position = length - tokens + token

    mbarrier.wait(keys_there.index(0), 0)
    zeros = gl.zeros([count, key_tile], gl.float32, layout=layout)
    scores = warpgroup_mma(
        queries, keys.index(0).permute((1, 0)), warpgroup_mma_init(zeros), is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(keys_read.index(0), count=1)
    if narrow:
        scores = scores * back[:, None]
    key = gl.arange(0, key_tile, layout=gl.SliceLayout(0, layout))
    begin_tile = 0
    if window > 0:
        begin_tile = end - tiles
        key += begin_tile * key_tile
    scores = gl.where(seen(position, key, window), scores, -float("inf"))
    maximum = gl.full([count], -float("inf"), gl.float32, layout=gl.SliceLayout(1, layout))
    total = gl.zeros([count], gl.float32, layout=gl.SliceLayout(1, layout))
    weights, maximum, total, _shrink = weigh_tile(scores, maximum, total, scale)
    if narrow:
        weights = weights * 2.0**WEIGHT_BITS
    gathered = gl.zeros([count, dim], gl.float32, layout=sums)
    joined = gl.zeros([count, dim], gl.float32, layout=sums)
    joined_maximum = gl.full([count], -float("inf"), gl.float32, layout=rows)
    joined_total = gl.zeros([count], gl.float32, layout=rows)
    state = (weights, maximum, total, gathered, joined_maximum, joined_total, joined)
    masked = gl.maximum(gl.minimum(unmasked - begin_tile, tiles), 1)
    led = 1
    if window > 0:
        all_count: gl.constexpr = all_queries.shape[0] * count
        led = first_whole_tile(chunk, first_query, all_count, group, window, key_tile)
        led = gl.maximum(gl.minimum(led - begin_tile, tiles), 1)
        masked = gl.maximum(masked, led)
        state = _add_tiles(
            1, led, queries, shared, state, position, scale, back, number, True, narrow, part,
            in_turns, begin_tile, window,
        )  # fmt: skip
    state = _add_tiles(
        led, masked, queries, shared, state, position, scale, back, number, False, narrow, part,
        in_turns, begin_tile, window,
    )  # fmt: skip
    state = _add_tiles(
        masked, tiles, queries, shared, state, position, scale, back, number, True, narrow, part,
        in_turns, begin_tile, window,
    )  # fmt: skip
    weights, maximum, total, gathered, joined_maximum, joined_total, joined = state
    last = (tiles - 1) % stages
    mbarrier.wait(values_there.index(last), (tiles - 1) // stages % 2)
    if length < (begin_tile + tiles) * key_tile:
        clear_behind(values.index(last), length - (begin_tile + tiles - 1) * key_tile, flat)
    multiplied = gl.convert_layout(weights.to(queries.dtype), as_factor(dim))
    adding = warpgroup_mma(
        multiplied, values.index(last), warpgroup_mma_init(gathered), is_async=True
    )
    gathered, multiplied = warpgroup_mma_wait(0, deps=(adding, multiplied))
    maximum, total, gathered = join_one(
        joined_maximum, joined_total, joined, gl.convert_layout(maximum, rows),
        gl.convert_layout(total, rows), gathered, scale,
    )  # fmt: skip
    if has_sinks:
        sink = load_sinks(sinks[0], own, kv_head, count, group, sums)
        total = add_sink(total, maximum, sink, scale)
    gathered = gathered / total[:, None]
    place, exists = places(again(own), start, tokens, kv_head, count, kv_heads, group, dim)
    store_output(gathered, value_scale, queries, out, place, exists, narrow)
