"""All layers of a dense decoder for one row: one launch a step, whose programs stay.

Each program has its outputs of every product, eight rows of weights a round, a warp each. What a
phase of a layer needs of all other programs comes as words with an epoch (`messages.py`), while
the weights after it are on their way (`weight_ring.py`): there is no barrier, and memory is never
idle.

Words are overwritten a layer later. That is safe, as every word that a program sends depends on
all words of the phase before: when the first word of a phase is sent again, all programs that read
that phase have read it. All programs have an output of fc1, and none begins late: all run at once
(a cooperative launch).

The residual stream is float32 from the first layer to the last.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from megatron_async.ops.persistent.messages import MOST_TOGETHER, last_sent, receive, send
from megatron_async.ops.persistent.persistent_attention import (
    LOG2_E,
    attend,
    copy_first_keys,
    join_parts,
    places_of,
    send_attended,
)
from megatron_async.ops.persistent.weight_ring import (
    CHUNK,
    address_of,
    ask_next,
    multiply_pair,
    multiply_unit,
)

PART_KEYS = gl.constexpr(256)
"""Keys of a part, if there are parts enough."""


@gluon.jit
def _gather(
    words: gl.tensor,
    vector: gl.tensor,
    size: gl.constexpr,
    padded: gl.constexpr,
    epoch: gl.tensor,
    warps: gl.constexpr,
) -> None:
    """All values of a phase to shared memory, 0 behind them; a word is read once a program."""
    each: gl.constexpr = min(MOST_TOGETHER, padded // (32 * warps))
    layout: gl.constexpr = gl.BlockedLayout([each], [32], [warps], [0])
    index = gl.arange(0, padded, layout)
    value = receive(words, index, epoch, index < size, each)
    gl.thread_barrier()  # all have read the vector before
    _flat(vector, padded).store(value)
    gl.thread_barrier()


@gluon.jit
def _gather_normed(
    words: gl.tensor,
    vector: gl.tensor,
    factors: gl.tensor,
    size: gl.constexpr,
    padded: gl.constexpr,
    epoch: gl.tensor,
    eps: gl.tensor,
    warps: gl.constexpr,
) -> gl.tensor:
    """The residual stream times a norm's factors; gives what products are to be multiplied by."""
    each: gl.constexpr = min(MOST_TOGETHER, padded // (32 * warps))
    layout: gl.constexpr = gl.BlockedLayout([each], [32], [warps], [0])
    index = gl.arange(0, padded, layout)
    value = receive(words, index, epoch, index < size, each)
    gl.thread_barrier()  # all have read the vector before, and their factors are there
    scale = factors.load(layout).to(gl.float32)
    _flat(vector, padded).store(gl.where(index < size, value * scale, 0.0))
    gl.thread_barrier()
    return gl.rsqrt(gl.sum(value * value, 0) / size + eps)


@gluon.jit
def _flat(vector: gl.tensor, padded: gl.constexpr) -> gl.tensor:
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return vector._reinterpret(gl.float32, [padded], layout)


@gluon.jit
def _copy_factors(
    shared: gl.tensor,
    factors: gl.tensor,
    size: gl.constexpr,
    padded: gl.constexpr,
    warps: gl.constexpr,
) -> None:
    """Ask for a norm's factors; the caller ends the group of copies."""
    index = gl.arange(0, padded, gl.BlockedLayout([8], [32], [warps], [0]))
    async_copy.async_copy_global_to_shared(shared, factors + index, mask=index < size)


@gluon.jit
def persistent_layers_kernel(
    hidden_states: gl.tensor,
    out: gl.tensor,
    table: gl.tensor,
    words: gl.tensor,
    step: gl.tensor,
    cos: gl.tensor,
    sin: gl.tensor,
    position_ids: gl.tensor,
    write_index: gl.tensor,
    cache: gl.tensor,
    block_table: gl.tensor,
    layer_elements: gl.tensor,
    value_offset: gl.tensor,
    layers: gl.tensor,
    eps: gl.tensor,
    scale: gl.tensor,
    hidden: gl.constexpr,
    ffn: gl.constexpr,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    dim: gl.constexpr,
    block_size: gl.constexpr,
    programs: gl.constexpr,
    parts: gl.constexpr,
    slots: gl.constexpr,
    unit_chunks: gl.constexpr,
    slot_width: gl.constexpr,
    hidden_padded: gl.constexpr,
    heads_padded: gl.constexpr,
    ffn_padded: gl.constexpr,
    group_padded: gl.constexpr,
    parts_padded: gl.constexpr,
    members: gl.constexpr,
    tile: gl.constexpr,
    warps: gl.constexpr,
) -> None:
    """The layers of one token; `PersistentLayers.run` has the arguments, `PersistentPlan` the
    constants."""
    heads: gl.constexpr = kv_heads * group
    half: gl.constexpr = dim // 2
    qkv: gl.constexpr = kv_heads * (group + 2) * dim
    rows: gl.constexpr = programs * warps
    long: gl.constexpr = unit_chunks * CHUNK
    units: gl.constexpr = (hidden + long - 1) // long
    head_units: gl.constexpr = (heads * dim + long - 1) // long
    ffn_units: gl.constexpr = (ffn + long - 1) // long
    hidden_rounds: gl.constexpr = (hidden + rows - 1) // rows
    ffn_rounds: gl.constexpr = (ffn + rows - 1) // rows
    later_groups: gl.constexpr = 2 * ffn_rounds * units + hidden_rounds * ffn_units
    longest: gl.constexpr = max(max(hidden_padded, heads_padded), max(ffn_padded, members * dim))
    # Words of a step by phase.
    at_heads: gl.constexpr = qkv
    at_middle: gl.constexpr = at_heads + heads * dim
    at_ffn: gl.constexpr = at_middle + hidden
    at_hidden: gl.constexpr = at_ffn + ffn
    at_parts: gl.constexpr = at_hidden + hidden
    at_sums: gl.constexpr = at_parts + heads * parts * dim

    weights: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [warps, 1], [1, 0])
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])
    one_row: gl.constexpr = gl.SliceLayout(1, lanes)
    dim_lanes: gl.constexpr = dim // 8
    scores: gl.constexpr = gl.BlockedLayout(
        [1, group_padded, 8], [32 // dim_lanes, 1, dim_lanes], [warps, 1, 1], [2, 1, 0]
    )
    tiles: gl.constexpr = gl.SliceLayout(1, scores)
    joined: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // dim_lanes, dim_lanes], [warps, 1], [1, 0]
    )
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    eights: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    eight: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [0])

    vector = gl.allocate_shared_memory(gl.float32, [longest // CHUNK, CHUNK], line)
    ring = gl.allocate_shared_memory(gl.bfloat16, [slots, warps, slot_width], eights)
    first_keys = gl.allocate_shared_memory(gl.bfloat16, [tile, dim], eights)
    first_values = gl.allocate_shared_memory(gl.bfloat16, [tile, dim], eights)
    factors = gl.allocate_shared_memory(gl.bfloat16, [2, hidden_padded], eight)
    zeros = gl.zeros([warps, slot_width], gl.bfloat16, weights)
    for slot in range(slots):
        ring.index(slot).store(zeros)  # what is not copied is multiplied by 0, and no NaN

    program = gl.program_id(0)
    row = program * warps + gl.arange(0, warps, gl.SliceLayout(1, weights))
    here = program * warps + gl.arange(0, warps, one_row)
    position = gl.load(position_ids).to(gl.int32)
    new_place = gl.load(write_index)
    epoch = gl.cast(gl.load(step) * (layers + 1) + 1, gl.int32)

    # Which keys this program attends to.
    length = position + 1
    used = gl.minimum(parts, (length + PART_KEYS - 1) // PART_KEYS)
    part_keys = ((length + used - 1) // used + tile - 1) // tile * tile
    used = (length + part_keys - 1) // part_keys
    kv_head = program % kv_heads
    part = program // kv_heads
    attends = part < used
    begin = part * part_keys
    end = gl.minimum(begin + part_keys, length)
    key = begin + gl.arange(0, tile, gl.SliceLayout(1, tiles))
    is_kept = (key < end) & (key < length - 1) & attends
    place = places_of(block_table, key, is_kept, kv_head, block_size, kv_heads, dim)

    # The embedding is what the first layer's norm waits for.
    for t in range(hidden_rounds):
        at = here + t * rows
        first = gl.load(hidden_states + at, mask=at < hidden, other=0.0).to(gl.float32)
        send(words + at_hidden, at, first, epoch, at < hidden)

    copy_first_keys(first_keys, first_values, cache, value_offset, place, is_kept, dim, tiles)
    _copy_factors(factors.index(0), address_of(table, 0, 4), hidden, hidden_padded, warps)
    _copy_factors(factors.index(1), address_of(table, 0, 5), hidden, hidden_padded, warps)
    async_copy.commit_group()
    cursor = (0, 0, 0, 0)
    for _slot in range(slots):
        cursor = ask_next(
            ring, cursor, table, layers, row,
            hidden, ffn, kv_heads, group, dim, rows, unit_chunks, weights,
        )  # fmt: skip
    nothing = gl.zeros([warps, 32], gl.float32, lanes)
    for layer in range(layers):
        keys = cache + gl.cast(layer, gl.int64) * layer_elements
        # qkv, rotated and appended. Behind the copies of its first keys and factors were those of
        # some units.
        async_copy.wait_group(min(slots - 1, later_groups))
        norm = _gather_normed(
            words + at_hidden, vector, factors.index(0), hidden, hidden_padded, epoch, eps, warps
        )
        first_sums = nothing
        second_sums = nothing
        for n in range((qkv // 2 + rows - 1) // rows * units):
            first_sums, second_sums = multiply_pair(
                first_sums, second_sums, vector, n % units, ring, cursor[0], unit_chunks, weights,
                lanes,
            )  # fmt: skip
            if n % units == units - 1:
                pair = here + n // units * rows
                fits = pair < qkv // 2
                a = gl.sum(first_sums, 1) * norm
                b = gl.sum(second_sums, 1) * norm
                head = pair // half
                member = head % (group + 2)
                column = pair % half
                turns = fits & (member <= group)
                turn = position * dim + column
                c = gl.load(cos + turn, mask=turns, other=1.0)
                s = gl.load(sin + turn, mask=turns, other=0.0)
                x = a * c - b * s
                y = b * c + a * s
                send(words, head * dim + column, x, epoch, fits)
                send(words, head * dim + column + half, y, epoch, fits)
                to = (new_place * kv_heads + head // (group + 2)) * dim + column
                to = gl.where(member > group, to + value_offset, to)
                is_cached = fits & (member >= group)
                gl.store(keys + to, x.to(gl.bfloat16), mask=is_cached)
                gl.store(keys + to + half, y.to(gl.bfloat16), mask=is_cached)
                first_sums = nothing
                second_sums = nothing
            cursor = ask_next(
                ring, cursor, table, layers, row,
                hidden, ffn, kv_heads, group, dim, rows, unit_chunks, weights,
            )  # fmt: skip
            cursor = ask_next(
                ring, cursor, table, layers, row,
                hidden, ffn, kv_heads, group, dim, rows, unit_chunks, weights,
            )  # fmt: skip
        # Attention.
        if attends:
            member_words = words + kv_head * ((group + 2) * dim)
            _gather(member_words, vector, (group + 2) * dim, members * dim, epoch, warps)
            attended, logarithm = attend(
                vector._reinterpret(gl.float32, [members, dim], line),
                first_keys, first_values, keys, value_offset, block_table, begin, end, length,
                kv_head, scale, block_size, kv_heads, group_padded, group, dim, tile, scores,
            )  # fmt: skip
            send_attended(
                words + at_heads, words + at_parts, words + at_sums, attended, logarithm, kv_head,
                part, used, epoch, group_padded, group, parts, dim, scores,
            )  # fmt: skip
        if (used > 1) & (program < heads):
            join_parts(
                words + at_parts, words + at_sums, words + at_heads, program, used, epoch,
                parts, parts_padded, dim, joined,
            )  # fmt: skip
        # proj.
        _gather(words + at_heads, vector, heads * dim, heads_padded, epoch, warps)
        sums = nothing
        for n in range(hidden_rounds * head_units):
            at = here + n // head_units * rows
            fits = at < hidden
            before = last_sent(words + at_hidden, gl.minimum(at, hidden - 1))
            sums = multiply_unit(
                sums,
                vector,
                n % head_units,
                ring,
                cursor[0],
                slots - 1,
                unit_chunks,
                weights,
                lanes,
            )
            if n % head_units == head_units - 1:
                send(words + at_middle, at, before + gl.sum(sums, 1), epoch, fits)
                sums = nothing
            cursor = ask_next(
                ring, cursor, table, layers, row,
                hidden, ffn, kv_heads, group, dim, rows, unit_chunks, weights,
            )  # fmt: skip
        # fc1 and SwiGLU.
        norm = _gather_normed(
            words + at_middle, vector, factors.index(1), hidden, hidden_padded, epoch, eps, warps
        )
        # What the next layer reads besides weights; nobody reads this layer's any more.
        later = gl.minimum(layer + 1, layers - 1)
        later_keys = cache + gl.cast(later, gl.int64) * layer_elements
        copy_first_keys(
            first_keys, first_values, later_keys, value_offset, place, is_kept, dim, tiles
        )
        _copy_factors(factors.index(0), address_of(table, later, 4), hidden, hidden_padded, warps)
        _copy_factors(factors.index(1), address_of(table, later, 5), hidden, hidden_padded, warps)
        async_copy.commit_group()
        first_sums = nothing
        second_sums = nothing
        for n in range(ffn_rounds * units):
            first_sums, second_sums = multiply_pair(
                first_sums, second_sums, vector, n % units, ring, cursor[0], unit_chunks, weights,
                lanes,
            )  # fmt: skip
            if n % units == units - 1:
                at = here + n // units * rows
                gate = gl.sum(first_sums, 1) * norm
                up = gl.sum(second_sums, 1) * norm
                activated = gate / (1 + gl.exp2(-gate * LOG2_E)) * up
                send(words + at_ffn, at, activated, epoch, at < ffn)
                first_sums = nothing
                second_sums = nothing
            cursor = ask_next(
                ring, cursor, table, layers, row,
                hidden, ffn, kv_heads, group, dim, rows, unit_chunks, weights,
            )  # fmt: skip
            cursor = ask_next(
                ring, cursor, table, layers, row,
                hidden, ffn, kv_heads, group, dim, rows, unit_chunks, weights,
            )  # fmt: skip
        # fc2.
        _gather(words + at_ffn, vector, ffn, ffn_padded, epoch, warps)
        sums = nothing
        for n in range(hidden_rounds * ffn_units):
            at = here + n // ffn_units * rows
            fits = at < hidden
            before = last_sent(words + at_middle, gl.minimum(at, hidden - 1))
            sums = multiply_unit(
                sums, vector, n % ffn_units, ring, cursor[0], slots - 1, unit_chunks, weights, lanes
            )
            if n % ffn_units == ffn_units - 1:
                total = before + gl.sum(sums, 1)
                send(words + at_hidden, at, total, epoch + 1, fits)
                gl.store(out + at, total.to(gl.bfloat16), mask=fits & (layer + 1 == layers))
                sums = nothing
            cursor = ask_next(
                ring, cursor, table, layers, row,
                hidden, ffn, kv_heads, group, dim, rows, unit_chunks, weights,
            )  # fmt: skip
        epoch += 1
    async_copy.wait_group(0)
    if program == 0:
        gl.store(step, gl.load(step) + 1)
