"""Kernel of prefill attention for Hopper: warpgroups that multiply, and a warp that loads.

As in FlashAttention-3 (Shah et al. 2024), one warp brings keys and values by the copy engine, and
warpgroups of 64 queries each share them. Here a tile's queries are those of the query heads of one
KV head, keys and values are found by block tables, and a program has its work from a schedule
(`prefill_schedule.py`). Written in Gluon, the form of Triton in which a program states the place of
each element.

A warpgroup starts the scores of the next keys before it adds the values of the last ones, and
computes the weights of the next keys while the matrix units add. Warpgroups start their products in
turns: one computes weights while another multiplies.

Keys and values in e4m3 are loaded by a warpgroup that widens them, once for all queries of a tile:
the matrix units take values of 16 bits from shared memory alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from megatron_async.ops.attention.narrow_tile import WEIGHT_BITS
from megatron_async.ops.attention.prefill_schedule import GROUP_QUERIES, UNIT
from megatron_async.ops.attention.warpgroup_join import (
    add_sink,
    join_parts_of_queries,
    load_sinks,
)
from megatron_async.ops.attention.warpgroup_parts import attend_parts
from megatron_async.ops.attention.warpgroup_tiles import (
    IN_SHARED_MEMORY,
    again,
    as_factor,
    bring_queries,
    clear_behind,
    first_whole_tile,
    in_memory,
    of_product,
    of_words,
    places,
    seen,
    store_output,
    store_widened,
)

# mypy: disable-error-code="assignment"

NARROW_TILES = gl.constexpr(4)
"""Tiles of keys, and of values, of a narrow cache that the copy engine brings ahead."""


@gluon.jit
def _bring(
    chunks: tma.tensor_descriptor,
    cell: gl.tensor,
    column: gl.tensor,
    there: gl.shared_memory_descriptor,
    to: gl.shared_memory_descriptor,
) -> None:
    mbarrier.expect(there, chunks.block_type.nbytes)
    tma.async_copy_global_to_shared(chunks, [cell, column], there, to)


@gluon.jit
def _tile_of(
    i: gl.tensor,
    end: gl.tensor,
    tiles: gl.tensor,
    in_order: gl.constexpr,
    has_window: gl.constexpr,
) -> gl.tensor:
    """The `i`th of the `tiles` tiles before `end`. Without a window the first one in order is 0."""
    if in_order and not has_window:
        return i
    return end - tiles + i if in_order else end - 1 - i


@gluon.jit
def load_tiles(
    key_chunks: tma.tensor_descriptor,
    value_chunks: tma.tensor_descriptor,
    table: gl.tensor,
    end: gl.tensor,
    tiles: gl.tensor,
    column: gl.tensor,
    shared: gl.tuple,
    block_size: gl.constexpr,
    in_order: gl.constexpr,
    has_window: gl.constexpr,
) -> None:
    """Bring the `tiles` tiles of keys and values before tile `end`, in order or backwards, when
    their places are free."""
    keys, values, keys_there, values_there, keys_read, values_read, _turns = shared
    stages: gl.constexpr = keys.shape[0]
    key_tile: gl.constexpr = keys.shape[1]
    for i in range(tiles):
        first = _tile_of(i, end, tiles, in_order, has_window) * key_tile
        cell = gl.load(table + first // block_size) * block_size + first % block_size
        slot = i % stages
        phase = i // stages % 2
        mbarrier.wait(keys_read.index(slot), phase ^ 1)
        _bring(key_chunks, cell, column, keys_there.index(slot), keys.index(slot))
        mbarrier.wait(values_read.index(slot), phase ^ 1)
        _bring(value_chunks, cell, column, values_there.index(slot), values.index(slot))


@gluon.jit
def widen_tiles(
    key_chunks: tma.tensor_descriptor,
    value_chunks: tma.tensor_descriptor,
    table: gl.tensor,
    end: gl.tensor,
    tiles: gl.tensor,
    column: gl.tensor,
    shared: gl.tuple,
    narrow: gl.tuple,
    block_size: gl.constexpr,
    in_order: gl.constexpr,
    has_window: gl.constexpr,
) -> None:
    """Bring `tiles` tiles as `load_tiles` does, of a narrow cache: the copy engine brings keys and
    values in words of four numbers, some tiles ahead, and this warpgroup widens them.

    Args:
        column: of the KV head, in words.
        narrow: words `[tiles, 2, keys, dim / 4]` of keys and of values, and their barriers.
    """
    keys, values, keys_there, values_there, keys_read, values_read, _turns = shared
    key_words, value_words, key_words_there, value_words_there = narrow
    stages: gl.constexpr = keys.shape[0]
    ahead: gl.constexpr = key_words.shape[0]
    key_tile: gl.constexpr = keys.shape[1]
    dim: gl.constexpr = keys.shape[2]
    for i in range(gl.minimum(ahead, tiles)):
        first = _tile_of(i, end, tiles, in_order, has_window) * key_tile
        cell = gl.load(table + first // block_size) * block_size + first % block_size
        _bring(key_chunks, cell, column, key_words_there.index(i), key_words.index(i))
        _bring(value_chunks, cell, column, value_words_there.index(i), value_words.index(i))
    for i in range(tiles):
        slot = i % stages
        phase = i // stages % 2
        its = i % ahead
        its_phase = i // ahead % 2
        # The place of a later tile is asked for before it is needed.
        later = gl.minimum(i + ahead, tiles - 1)
        first = _tile_of(later, end, tiles, in_order, has_window) * key_tile
        cell = gl.load(table + first // block_size) * block_size + first % block_size
        is_one = i + ahead < tiles
        mbarrier.wait(key_words_there.index(its), its_phase)
        words = key_words.index(its).load(of_words(dim))
        mbarrier.wait(keys_read.index(slot), phase ^ 1)
        store_widened(words, keys.index(slot), True)
        mbarrier.arrive(keys_there.index(slot), count=1)
        if is_one:
            _bring(key_chunks, cell, column, key_words_there.index(its), key_words.index(its))
        mbarrier.wait(value_words_there.index(its), its_phase)
        words = value_words.index(its).load(of_words(dim))
        mbarrier.wait(values_read.index(slot), phase ^ 1)
        store_widened(words, values.index(slot), False)
        mbarrier.arrive(values_there.index(slot), count=1)
        if is_one:
            _bring(value_chunks, cell, column, value_words_there.index(its), value_words.index(its))


@gluon.jit
def _weights(
    scores: gl.tensor,
    maximum: gl.tensor,
    total: gl.tensor,
    position: gl.tensor,
    first: gl.tensor,
    scale: gl.tensor,
    masked: gl.constexpr,
    narrow: gl.constexpr,
    window: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Exponentials of one tile's scores, and what becomes of the maximum, the total and the sums so
    far. `scale`: of each query."""
    key_tile: gl.constexpr = scores.shape[1]
    if masked:
        key = first + gl.arange(0, key_tile, layout=gl.SliceLayout(0, of_product(key_tile)))
        scores = gl.where(seen(position, key, window), scores, -float("inf"))
    # Maxima are of scores before scaling, so that scaling and subtracting are one instruction.
    new_maximum = gl.maximum(maximum, gl.max(scores, 1))
    subtracted = new_maximum * scale
    if masked:
        # A query that sees nothing yet has no maximum.
        subtracted = gl.where(new_maximum == -float("inf"), 0.0, subtracted)
    shrink = gl.exp2(maximum * scale - subtracted)
    if narrow:
        weights = gl.exp2(scores * scale[:, None] - (subtracted - WEIGHT_BITS)[:, None])
        added = gl.sum(weights, 1) * 2.0**-WEIGHT_BITS
    else:
        weights = gl.exp2(scores * scale[:, None] - subtracted[:, None])
        added = gl.sum(weights, 1)
    return weights, new_maximum, total * shrink + added, shrink


@gluon.jit
def _add_tiles(
    begin: gl.tensor, stop: gl.tensor, end: gl.tensor, queries: gl.shared_memory_descriptor,
    shared: gl.tuple, weights: gl.tensor, gathered: gl.tensor, maximum: gl.tensor, total: gl.tensor,
    position: gl.tensor, scale: gl.tensor, number: gl.constexpr, masked: gl.constexpr,
    narrow: gl.constexpr, in_turns: gl.constexpr, window: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Tiles `begin` .. `stop` - 1 in the order of `load_tiles`, from `end` on backwards: their
    scores and weights, and the values of the tile before each."""
    keys, values, keys_there, values_there, keys_read, values_read, turns = shared
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
            # One warpgroup's products are behind the other's, not between them: so one computes
            # weights while the other multiplies. The first one's first turn is free.
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
        first = (end - 1 - i) * key_tile
        weights, maximum, total, shrink = _weights(
            scores, maximum, total, position, first, scale, masked, narrow, window
        )
        # These are there already. But ptxas moves nothing over a branch, and would move the
        # weights behind the wait below.
        mbarrier.wait(values_there.index(before), before_phase)
        gathered, multiplied, weights = warpgroup_mma_wait(0, deps=(adding, multiplied, weights))
        mbarrier.arrive(values_read.index(before), count=1)
        gathered = gathered * gl.convert_layout(shrink, rows)[:, None]
    return weights, gathered, maximum, total


@gluon.jit
def attend(
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
    partial: gl.tuple,
    value_scale: gl.tensor,
    sinks: gl.tuple,
    divides: gl.constexpr,
    narrow: gl.constexpr,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    dim: gl.constexpr,
    in_turns: gl.constexpr,
    window: gl.constexpr,
    has_sinks: gl.constexpr,
) -> None:
    """One warpgroup's queries over the `tiles` tiles before tile `end`. `sinks`: a pointer, or
    nothing."""
    start, tokens, length = chunk
    keys, values, keys_there, values_there, keys_read, _values_read, _turns = shared
    key_tile: gl.constexpr = keys.shape[1]
    count: gl.constexpr = all_queries.shape[1]
    flat: gl.constexpr = in_memory(dim)
    layout: gl.constexpr = of_product(key_tile)
    sums: gl.constexpr = of_product(dim)
    own = first_query + number * count
    place, exists = places(own, start, tokens, kv_head, count, kv_heads, group, dim)
    queries = all_queries.index(number)
    found = gl.load(query + place, mask=exists, other=0.0)
    scale = scale * bring_queries(found, queries, gl.SliceLayout(1, layout), narrow)
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
    maximum = gl.full([count], -float("inf"), gl.float32, layout=gl.SliceLayout(1, layout))
    total = gl.zeros([count], gl.float32, layout=gl.SliceLayout(1, layout))
    first = (end - 1) * key_tile
    weights, maximum, total, _shrink = _weights(
        scores, maximum, total, position, first, scale, True, narrow, window
    )
    gathered = gl.zeros([count, dim], gl.float32, layout=sums)
    if length < end * key_tile:
        mbarrier.wait(values_there.index(0), 0)
        clear_behind(values.index(0), length - first, flat)
    masked = gl.minimum(end - unmasked, tiles)
    weights, gathered, maximum, total = _add_tiles(
        1, masked, end, queries, shared,
        weights, gathered, maximum, total, position, scale, number, True, narrow, in_turns, window,
    )  # fmt: skip
    if window > 0:
        # The last tiles, which are the sequence's first, have keys that some queries do not see.
        all_count: gl.constexpr = all_queries.shape[0] * count
        led = first_whole_tile(chunk, first_query, all_count, group, window, key_tile)
        begun = gl.maximum(masked, 1)
        inside = gl.maximum(gl.minimum(end - led, tiles), begun)
        weights, gathered, maximum, total = _add_tiles(
            begun, inside, end, queries, shared, weights, gathered, maximum, total, position,
            scale, number, False, narrow, in_turns, window,
        )  # fmt: skip
        weights, gathered, maximum, total = _add_tiles(
            inside, tiles, end, queries, shared, weights, gathered, maximum, total, position,
            scale, number, True, narrow, in_turns, window,
        )  # fmt: skip
    else:
        weights, gathered, maximum, total = _add_tiles(
            gl.maximum(masked, 1), tiles, end, queries, shared, weights, gathered, maximum, total,
            position, scale, number, False, narrow, in_turns, window,
        )  # fmt: skip
    stages: gl.constexpr = keys.shape[0]
    last = (tiles - 1) % stages
    mbarrier.wait(values_there.index(last), (tiles - 1) // stages % 2)
    multiplied = gl.convert_layout(weights.to(queries.dtype), as_factor(dim))
    adding = warpgroup_mma(
        multiplied, values.index(last), warpgroup_mma_init(gathered), is_async=True
    )
    gathered, multiplied = warpgroup_mma_wait(0, deps=(adding, multiplied))
    total = gl.convert_layout(total, gl.SliceLayout(1, sums))
    is_there = True
    if divides:
        _parts = partial[6]
        is_there = _parts == 1
        if is_there:
            if has_sinks:
                highest = gl.convert_layout(maximum * scale, gl.SliceLayout(1, sums))
                sink = load_sinks(sinks[0], own, kv_head, count, group, sums)
                total = add_sink(total, highest, sink, 1.0)
            gathered = gathered / total[:, None]
        else:
            highest = gl.convert_layout(maximum * scale, gl.SliceLayout(1, sums))
            gathered, is_there = join_parts_of_queries(
                partial, gathered, highest, total, number, all_queries.shape[0], sinks, own,
                kv_head, group, has_sinks,
            )  # fmt: skip
    else:
        if has_sinks:
            highest = gl.convert_layout(maximum * scale, gl.SliceLayout(1, sums))
            sink = load_sinks(sinks[0], own, kv_head, count, group, sums)
            total = add_sink(total, highest, sink, 1.0)
        gathered = gathered / total[:, None]
    if is_there:
        place, exists = places(again(own), start, tokens, kv_head, count, kv_heads, group, dim)
        store_output(gathered, value_scale, queries, out, place, exists, narrow)


@gluon.jit
def _uniform(value: gl.tensor) -> gl.tensor:
    """Value of a warp's first thread, which all have: the compiler knows it then, and keeps what
    follows from it in registers of the whole warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [value], dtype=gl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["table_stride", "slots"], do_not_specialize_on_alignment=["tables"])
def warpgroup_attention_kernel(
    query: gl.tensor, key_chunks: tma.tensor_descriptor, value_chunks: tma.tensor_descriptor,
    tables: gl.tensor, table_stride: gl.tensor, units: gl.tensor, scale: gl.tensor,
    scales: gl.tensor, sinks: gl.tensor, out: gl.tensor, part_output: gl.tensor,
    part_maximum: gl.tensor, part_total: gl.tensor, arrived: gl.tensor, slots: gl.tensor,
    divides: gl.constexpr, block_size: gl.constexpr, group: gl.constexpr, kv_heads: gl.constexpr,
    dim: gl.constexpr, key_tile: gl.constexpr, warpgroups: gl.constexpr, stages: gl.constexpr,
    registers: gl.constexpr, in_turns: gl.constexpr, part: gl.constexpr, window: gl.constexpr,
    is_settled: gl.constexpr, overlap: gl.constexpr,
) -> None:  # fmt: skip
    """A tile of `warpgroups` times 64 queries of one chunk and one KV head, and its keys or a part
    of them. Of a narrow cache `scales` are given, and descriptors of words of four numbers."""
    if overlap and not is_settled:
        gdc_wait()
        gdc_launch_dependents()
    narrow: gl.constexpr = scales is not None
    dtype: gl.constexpr = gl.float16 if narrow else query.dtype.element_ty
    kv_head = gl.program_id(0)
    number = gl.program_id(1)
    unit = units + number * UNIT
    row = _uniform(gl.load(unit))
    first_query = _uniform(gl.load(unit + 1))
    start = gl.load(unit + 2)
    tokens = gl.load(unit + 3)
    length = gl.load(unit + 4)
    begin = gl.load(unit + 5)
    end = gl.load(unit + 6)
    nth = gl.load(unit + 7)
    parts = gl.load(unit + 8)
    if overlap and is_settled:
        gdc_wait()
        gdc_launch_dependents()
    has_sinks: gl.constexpr = sinks is not None
    if row >= 0:
        if window > 0:
            # Tiles before the first query's window are skipped.
            begin = gl.maximum(length - tokens + first_query // group + 1 - window, 0) // key_tile
        tiles = end - begin
        # Keys that every query of the tile sees need no mask.
        unmasked = (length - tokens + first_query // group + 1) // key_tile
        table = tables + row.to(gl.int64) * table_stride

        barriers: gl.constexpr = mbarrier.MBarrierLayout()
        value_scale = scale
        if narrow:
            # One for all keys of the head, so it belongs to the scores; one of values to the
            # output.
            value_scale = gl.load(scales + kv_heads + kv_head) * 2.0**-WEIGHT_BITS
            scale *= gl.load(scales + kv_head)
            key_words = gl.allocate_shared_memory(
                gl.int32, [NARROW_TILES, key_tile, dim // 4], key_chunks.layout
            )
            value_words = gl.allocate_shared_memory(
                gl.int32, [NARROW_TILES, key_tile, dim // 4], key_chunks.layout
            )
            key_words_there = gl.allocate_shared_memory(gl.int64, [NARROW_TILES, 1], barriers)
            value_words_there = gl.allocate_shared_memory(gl.int64, [NARROW_TILES, 1], barriers)
            for i in gl.static_range(NARROW_TILES):
                mbarrier.init(key_words_there.index(i), count=1)
                mbarrier.init(value_words_there.index(i), count=1)
            words = (key_words, value_words, key_words_there, value_words_there)
        queries = gl.allocate_shared_memory(
            dtype, [warpgroups, GROUP_QUERIES, dim], IN_SHARED_MEMORY
        )
        keys = gl.allocate_shared_memory(dtype, [stages, key_tile, dim], IN_SHARED_MEMORY)
        values = gl.allocate_shared_memory(dtype, [stages, key_tile, dim], IN_SHARED_MEMORY)
        keys_there = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
        values_there = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
        keys_read = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
        values_read = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
        turns = gl.allocate_shared_memory(gl.int64, [warpgroups, 1], barriers)
        for i in gl.static_range(stages):
            mbarrier.init(keys_there.index(i), count=1)
            mbarrier.init(values_there.index(i), count=1)
            mbarrier.init(keys_read.index(i), count=warpgroups)
            mbarrier.init(values_read.index(i), count=warpgroups)
        for i in gl.static_range(warpgroups):
            mbarrier.init(turns.index(i), count=1)
        chunk = (start, tokens, length)
        slot = kv_head * slots + number
        partial = (part_output, part_maximum, part_total, arrived, slot, nth, parts)
        shared = (keys, values, keys_there, values_there, keys_read, values_read, turns)
        if has_sinks:
            its_sinks = (sinks,)
        else:
            its_sinks = ()
        # A tuple that is assigned has no constants, so these are written where they are used.
        cut: gl.constexpr = part if part > 0 else divides
        loading_warps: gl.constexpr = 4 if narrow else 1
        # What two warpgroups leave.
        loading_registers: gl.constexpr = 512 - 2 * registers if narrow else 24
        if warpgroups == 2:
            gl.warp_specialize([
                (attend_parts if part > 0 else attend, (
                    0, query, out, chunk, first_query, kv_head, end, tiles, unmasked, scale,
                    queries, shared, partial, value_scale, its_sinks, cut, narrow, kv_heads, group,
                    dim, in_turns, window, has_sinks,
                )),
                (attend_parts if part > 0 else attend, (
                    1, query, out, chunk, first_query, kv_head, end, tiles, unmasked, scale,
                    queries, shared, partial, value_scale, its_sinks, cut, narrow, kv_heads, group,
                    dim, in_turns, window, has_sinks,
                )),
                (widen_tiles, (
                    key_chunks, value_chunks, table, end, tiles, kv_head * (dim // 4), shared,
                    words, block_size, part > 0, window > 0,
                )) if narrow else (load_tiles, (
                    key_chunks, value_chunks, table, end, tiles, kv_head * dim, shared, block_size,
                    part > 0, window > 0,
                )),
            ], [4, loading_warps], [registers, loading_registers])  # fmt: skip
        else:
            gl.warp_specialize([
                (attend_parts if part > 0 else attend, (
                    0, query, out, chunk, first_query, kv_head, end, tiles, unmasked, scale,
                    queries, shared, partial, value_scale, its_sinks, cut, narrow, kv_heads, group,
                    dim, in_turns, window, has_sinks,
                )),
                (attend_parts if part > 0 else attend, (
                    1, query, out, chunk, first_query, kv_head, end, tiles, unmasked, scale,
                    queries, shared, partial, value_scale, its_sinks, cut, narrow, kv_heads, group,
                    dim, in_turns, window, has_sinks,
                )),
                (attend_parts if part > 0 else attend, (
                    2, query, out, chunk, first_query, kv_head, end, tiles, unmasked, scale,
                    queries, shared, partial, value_scale, its_sinks, cut, narrow, kv_heads, group,
                    dim, in_turns, window, has_sinks,
                )),
                (load_tiles, (
                    key_chunks, value_chunks, table, end, tiles, kv_head * dim, shared, block_size,
                    part > 0, window > 0,
                )),
            ], [4, 4, 1], [registers, registers, 24])  # fmt: skip
