"""Kernel of prefill attention for Hopper: warpgroups that multiply, and a warp that loads.

As FlashAttention-3 (Shah et al. 2024) does, one warp brings keys and values by the copy engine, and
warpgroups of 64 queries each share them. Here a tile's queries are those of the query heads of one
KV head, and keys and values are found by block tables.

Written in Gluon, the form of Triton in which a program states the place of each element.
"""
# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from megatron_async.ops.attention.warpgroup_attention_steps import attend, load_tiles

GROUP_QUERIES = gl.constexpr(64)
"""Queries of a warpgroup: rows of one product of the matrix units."""


@gluon.jit
def _add(one: gl.tensor, other: gl.tensor) -> gl.tensor:
    return one + other


@gluon.jit
def _uniform(value: gl.tensor) -> gl.tensor:
    """Value of a warp's first thread, which all have: the compiler knows it then, and keeps what
    follows from it in registers of the whole warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [value], dtype=gl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=["table_stride", "rows"],
    do_not_specialize_on_alignment=["tables", "kv_lengths", "starts"],
)
def warpgroup_attention_kernel(
    query: gl.tensor,
    key_chunks: tma.tensor_descriptor,
    value_chunks: tma.tensor_descriptor,
    tables: gl.tensor,
    table_stride: gl.tensor,
    kv_lengths: gl.tensor,
    starts: gl.tensor,
    rows: gl.tensor,
    scale: gl.tensor,
    out: gl.tensor,
    block_size: gl.constexpr,
    group: gl.constexpr,
    kv_heads: gl.constexpr,
    rows_tile: gl.constexpr,
    warpgroups: gl.constexpr,
    stages: gl.constexpr,
    registers: gl.constexpr,
    in_turns: gl.constexpr,
    overlap: gl.constexpr,
) -> None:
    """A tile of `warpgroups` times 64 queries of one chunk and one KV head."""
    if overlap:
        gdc_wait()
        gdc_launch_dependents()
    dtype: gl.constexpr = key_chunks.dtype
    key_tile: gl.constexpr = key_chunks.block_shape[0]
    dim: gl.constexpr = key_chunks.block_shape[1]
    query_tile: gl.constexpr = warpgroups * GROUP_QUERIES
    # Which row's tile this is. The last tiles of a chunk have the most keys: they begin first, for
    # all heads.
    kv_head = gl.program_id(0)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    each = gl.arange(0, rows_tile, layout=line)
    begins = gl.load(starts + each, mask=each < rows, other=0)
    ends = gl.load(starts + each + 1, mask=each < rows, other=0)
    tiles_of = ((ends - begins) * group + query_tile - 1) // query_tile
    tiles_to = gl.associative_scan(tiles_of, 0, _add)
    number = gl.sum(tiles_of, 0) - 1 - gl.program_id(1)
    if number >= 0:
        row = _uniform(gl.sum((tiles_to <= number).to(gl.int32), 0))
        tile = _uniform(number - gl.sum(gl.where(each < row, tiles_of, 0), 0))
        start = gl.load(starts + row)
        tokens = gl.load(starts + row + 1) - start
        length = gl.load(kv_lengths + row)
        first_query = tile * query_tile
        before = length - tokens
        # Keys that every query of the tile sees need no mask.
        unmasked = (before + first_query // group + 1) // key_tile
        end = gl.minimum(before + (first_query + query_tile - 1) // group + 1, length)
        tiles = (end + key_tile - 1) // key_tile
        table = tables + row.to(gl.int64) * table_stride

        queries = gl.allocate_shared_memory(
            dtype, [warpgroups, GROUP_QUERIES, dim], key_chunks.layout
        )
        keys = gl.allocate_shared_memory(dtype, [stages, key_tile, dim], key_chunks.layout)
        values = gl.allocate_shared_memory(dtype, [stages, key_tile, dim], value_chunks.layout)
        barriers: gl.constexpr = mbarrier.MBarrierLayout()
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
        shared = (keys, values, keys_there, values_there, keys_read, values_read, turns)
        # A tuple that is assigned has no constants, so these are written where they are used.
        if warpgroups == 2:
            gl.warp_specialize([
                (attend, (
                    0, query, out, chunk, first_query, kv_head, tiles, unmasked, scale,
                    queries, shared, kv_heads, group, dim, in_turns,
                )),
                (attend, (
                    1, query, out, chunk, first_query, kv_head, tiles, unmasked, scale,
                    queries, shared, kv_heads, group, dim, in_turns,
                )),
                (load_tiles, (
                    key_chunks, value_chunks, table, tiles, kv_head * dim, shared, block_size,
                )),
            ], [4, 1], [registers, 24])  # fmt: skip
        else:
            gl.warp_specialize([
                (attend, (
                    0, query, out, chunk, first_query, kv_head, tiles, unmasked, scale,
                    queries, shared, kv_heads, group, dim, in_turns,
                )),
                (attend, (
                    1, query, out, chunk, first_query, kv_head, tiles, unmasked, scale,
                    queries, shared, kv_heads, group, dim, in_turns,
                )),
                (attend, (
                    2, query, out, chunk, first_query, kv_head, tiles, unmasked, scale,
                    queries, shared, kv_heads, group, dim, in_turns,
                )),
                (load_tiles, (
                    key_chunks, value_chunks, table, tiles, kv_head * dim, shared, block_size,
                )),
            ], [4, 4, 1], [registers, registers, 24])  # fmt: skip
