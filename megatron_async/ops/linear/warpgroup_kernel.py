"""Kernel of a product of 17 to 768 rows whose weights are in shared memory before the rows are
there.

A block of 64 or 128 rows meets a program's weights on the matrix units of one or two warpgroups
(Hopper's `wgmma`). Its rows are as many bytes as the weights, or more. Triton's own loop loads
both behind the wait, and takes a turn for each tile. Here the copy engine brings all weights before
the wait, and behind it the rows, chunk by chunk, each multiplied when it is there.

Written in Gluon, the form of Triton in which a program states the place of each element.
"""
# Gluon does not know `and` of the two kinds of `if`; mypy does not know that a loop over constants
# is unrolled.
# ruff: noqa: SIM102
# mypy: disable-error-code="assignment"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from megatron_async.ops.linear.qkv_places import first_of_pairs, split_pairs, store_heads

IN_SHARED_MEMORY = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""How the copy engine stores a chunk, and the matrix units read it."""
HALVES_IN_SHARED_MEMORY = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
"""`IN_SHARED_MEMORY` of two pieces of a chunk's rows, which lie behind each other."""


def chunks_of(rows: Tensor, block: int, chunk: int) -> TensorDescriptor:
    """What the copy engine must know of `[rows, elements]`, of which it brings `block` rows of
    `chunk` elements at a time; zeros for what is outside."""
    return TensorDescriptor.from_tensor(rows, [block, chunk], IN_SHARED_MEMORY)


def pairs_of(weight: Tensor, dim: int, pairs: int, chunk: int) -> TensorDescriptor:
    """What the copy engine must know of a qkv weight `[heads * dim, elements]`, of which it brings
    `pairs` rows of one half of a head, and as many half a head behind them, at a time."""
    halves = weight.view(-1, dim // 2, weight.size(1))
    return TensorDescriptor.from_tensor(halves, [2, pairs, chunk], HALVES_IN_SHARED_MEMORY)


@gluon.jit
def warpgroup_kernel(
    x_chunks: tma.tensor_descriptor,
    weight_chunks: tma.tensor_descriptor,
    bias: gl.tensor,
    squares: gl.tensor,
    cos: gl.tensor,
    sin: gl.tensor,
    position_ids: gl.tensor,
    write_index: gl.tensor,
    key_cache: gl.tensor,
    value_cache: gl.tensor,
    out: gl.tensor,
    rows: gl.tensor,
    n: gl.tensor,
    k: gl.tensor,
    eps: gl.tensor,
    chunks: gl.constexpr,
    ring: gl.constexpr,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    dim: gl.constexpr,
    gated: gl.constexpr,
    squared: gl.constexpr,
    parts: gl.constexpr,
    block_parts: gl.constexpr,
    has_bias: gl.constexpr,
    overlap: gl.constexpr,
) -> None:
    """A block of rows times a block of weight rows, or of two halves of the weight if `gated`, over
    one share of the inputs: `chunks` of them, of which `ring` are in shared memory at a time. The
    sums are divided by the root mean square that follows from `squares`, if a row has `parts` of
    them. With heads of `dim` elements the outputs are rotated and appended (`QkvPlaces`), and the
    next kernel starts after the wait, as behind `one_row_kernel`.
    """
    rotates: gl.constexpr = dim > 0
    if overlap:
        if not rotates:
            gdc_launch_dependents()
    dtype: gl.constexpr = x_chunks.dtype
    block_m: gl.constexpr = x_chunks.block_shape[0]
    pairs: gl.constexpr = weight_chunks.block_shape[1] if rotates else 0
    block_n: gl.constexpr = 2 * pairs if rotates else weight_chunks.block_shape[0]
    chunk: gl.constexpr = x_chunks.block_shape[1]
    halves: gl.constexpr = 2 if gated else 1
    warps: gl.constexpr = block_m // 16
    x_bytes: gl.constexpr = x_chunks.block_type.nbytes
    weight_bytes: gl.constexpr = weight_chunks.block_type.nbytes
    first = gl.program_id(0) * block_n
    part = gl.program_id(1)
    begin = part * (chunks * chunk)
    first_row = gl.program_id(2) * block_m
    weights = gl.allocate_shared_memory(dtype, [chunks * halves, block_n, chunk], IN_SHARED_MEMORY)
    x = gl.allocate_shared_memory(dtype, [ring, block_m, chunk], x_chunks.layout)
    # One barrier a chunk of x, and the last one for all weights.
    arrived = gl.allocate_shared_memory(gl.int64, [chunks + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(chunks + 1):
        mbarrier.init(arrived.index(i), count=1)
    mbarrier.expect(arrived.index(chunks), chunks * halves * weight_bytes)
    pair = gl.program_id(0) * pairs
    for i in gl.static_range(chunks * halves):
        to = weights.index(i)
        if rotates:
            # The same elements of both halves of a head, one half behind the other.
            to = to._reinterpret(dtype, weight_chunks.block_shape, weight_chunks.layout)
            source = [pair // (dim // 2) * 2, pair % (dim // 2), begin + i * chunk]
        else:
            source = [first + i // chunks * n, begin + i % chunks * chunk]
        tma.async_copy_global_to_shared(weight_chunks, source, arrived.index(chunks), to)
    for i in gl.static_range(chunks):
        mbarrier.expect(arrived.index(i), x_bytes)
    if rotates:
        in_pairs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, pairs, 16])
        token = first_row + gl.arange(0, block_m, layout=gl.SliceLayout(1, in_pairs))[:, None]
        lane = gl.arange(0, pairs, layout=gl.SliceLayout(0, in_pairs))[None, :]
        lane = pair % (dim // 2) + lane
        position = gl.load(position_ids + token, mask=token < rows, other=0)
        cell = gl.load(write_index + token, mask=token < rows, other=0)
        cosine = gl.load(cos + position * dim + lane)
        sine = gl.load(sin + position * dim + lane)
    if overlap:
        gdc_wait()
        if rotates:
            gdc_launch_dependents()
    for i in gl.static_range(ring):
        place = [first_row, begin + i * chunk]
        tma.async_copy_global_to_shared(x_chunks, place, arrived.index(i), x.index(i))
    if parts > 0:
        given: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0])
        line = first_row + gl.arange(0, block_m, layout=gl.SliceLayout(1, given))[:, None]
        piece = gl.arange(0, block_parts, layout=gl.SliceLayout(0, given))[None, :]
        there = (line < rows) & (piece < parts)
        whole = gl.sum(gl.load(squares + line * parts + piece, mask=there, other=0.0), 1)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, block_n, 16])
    zeros = gl.zeros([block_m, block_n], gl.float32, layout=layout)
    sums = warpgroup_mma_init(zeros)
    up_sums = warpgroup_mma_init(zeros)
    mbarrier.wait(arrived.index(chunks), 0)
    for i in gl.static_range(chunks):
        mbarrier.wait(arrived.index(i), 0)
        values = x.index(i % ring)
        weight = weights.index(i).permute((1, 0))
        sums = warpgroup_mma(values, weight, sums, is_async=True)
        if gated:
            weight = weights.index(chunks + i).permute((1, 0))
            up_sums = warpgroup_mma(values, weight, up_sums, is_async=True)
        if i + ring < chunks:
            # The products have read this chunk before the next one takes its place.
            done, up_done = warpgroup_mma_wait(0, deps=(sums, up_sums))
            sums = warpgroup_mma_init(done)
            up_sums = warpgroup_mma_init(up_done)
            place = [first_row, begin + (i + ring) * chunk]
            tma.async_copy_global_to_shared(x_chunks, place, arrived.index(i + ring), values)
    y, up = warpgroup_mma_wait(0, deps=(sums, up_sums))
    row = first_row + gl.arange(0, block_m, layout=gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, block_n, layout=gl.SliceLayout(0, layout))[None, :]
    if rotates:
        column = first_of_pairs(pair, dim) + column // pairs * (dim // 2) + column % pairs
    else:
        column = first + column
    if parts > 0:
        whole = gl.convert_layout(whole, gl.SliceLayout(1, layout))[:, None]
        y = y * gl.rsqrt(whole / k + eps)
    if has_bias:
        y = y + gl.load(bias + column, mask=column < n, other=0.0).to(gl.float32)
    if gated:
        y = y / (1.0 + gl.exp(-y)) * up
    elif squared:
        y = gl.maximum(y, 0.0)
        y = y * y
    if rotates:
        y, partner = split_pairs(y, block_m, pairs, in_pairs)
        head = pair // (dim // 2)
        store_heads(
            y, partner, cosine, sine, token, cell, lane, head, token < rows,
            out, key_cache, value_cache, kv_heads, group, dim,
        )  # fmt: skip
    else:
        target = out + (part * rows + row) * n + column
        gl.store(target, y.to(out.dtype.element_ty), mask=(row < rows) & (column < n))
