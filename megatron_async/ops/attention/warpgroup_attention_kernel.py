"""Kernel of prefill attention for Hopper: warpgroups that multiply, and a warp that loads.

As FlashAttention-3 (Shah et al. 2024) does, one warp brings keys and values by the copy engine, and
warpgroups of 64 queries each share them. Here a tile's queries are those of the query heads of one
KV head, keys and values are found by block tables, and a program has its work from a schedule
(`prefill_schedule.py`).

Written in Gluon, the form of Triton in which a program states the place of each element.
"""
# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from megatron_async.ops.attention.prefill_schedule import GROUP_QUERIES, UNIT
from megatron_async.ops.attention.warpgroup_attention_steps import attend, load_tiles


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
    query: gl.tensor,
    key_chunks: tma.tensor_descriptor,
    value_chunks: tma.tensor_descriptor,
    tables: gl.tensor,
    table_stride: gl.tensor,
    units: gl.tensor,
    scale: gl.tensor,
    out: gl.tensor,
    part_output: gl.tensor,
    part_maximum: gl.tensor,
    part_total: gl.tensor,
    arrived: gl.tensor,
    slots: gl.tensor,
    divides: gl.constexpr,
    block_size: gl.constexpr,
    group: gl.constexpr,
    kv_heads: gl.constexpr,
    warpgroups: gl.constexpr,
    stages: gl.constexpr,
    registers: gl.constexpr,
    in_turns: gl.constexpr,
    is_settled: gl.constexpr,
    overlap: gl.constexpr,
) -> None:
    """A tile of `warpgroups` times 64 queries of one chunk and one KV head, and its keys or a part
    of them."""
    if overlap and not is_settled:
        gdc_wait()
        gdc_launch_dependents()
    dtype: gl.constexpr = key_chunks.dtype
    key_tile: gl.constexpr = key_chunks.block_shape[0]
    dim: gl.constexpr = key_chunks.block_shape[1]
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
    part = gl.load(unit + 7)
    parts = gl.load(unit + 8)
    if overlap and is_settled:
        gdc_wait()
        gdc_launch_dependents()
    if row >= 0:
        tiles = end - begin
        # Keys that every query of the tile sees need no mask.
        unmasked = (length - tokens + first_query // group + 1) // key_tile
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
        slot = kv_head * slots + number
        partial = (part_output, part_maximum, part_total, arrived, slot, part, parts)
        shared = (keys, values, keys_there, values_there, keys_read, values_read, turns)
        # A tuple that is assigned has no constants, so these are written where they are used.
        if warpgroups == 2:
            gl.warp_specialize([
                (attend, (
                    0, query, out, chunk, first_query, kv_head, end, tiles, unmasked, scale,
                    queries, shared, partial, divides, kv_heads, group, dim, in_turns,
                )),
                (attend, (
                    1, query, out, chunk, first_query, kv_head, end, tiles, unmasked, scale,
                    queries, shared, partial, divides, kv_heads, group, dim, in_turns,
                )),
                (load_tiles, (
                    key_chunks, value_chunks, table, end, tiles, kv_head * dim, shared, block_size,
                )),
            ], [4, 1], [registers, 24])  # fmt: skip
        else:
            gl.warp_specialize([
                (attend, (
                    0, query, out, chunk, first_query, kv_head, end, tiles, unmasked, scale,
                    queries, shared, partial, divides, kv_heads, group, dim, in_turns,
                )),
                (attend, (
                    1, query, out, chunk, first_query, kv_head, end, tiles, unmasked, scale,
                    queries, shared, partial, divides, kv_heads, group, dim, in_turns,
                )),
                (attend, (
                    2, query, out, chunk, first_query, kv_head, end, tiles, unmasked, scale,
                    queries, shared, partial, divides, kv_heads, group, dim, in_turns,
                )),
                (load_tiles, (
                    key_chunks, value_chunks, table, end, tiles, kv_head * dim, shared, block_size,
                )),
            ], [4, 4, 1], [registers, registers, 24])  # fmt: skip
