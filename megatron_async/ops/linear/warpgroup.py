"""Kernel of a product of 17 to 768 rows whose weights are in shared memory before the rows are
there.

A block of 64 or 128 rows meets a program's weights on the matrix units of one or two warpgroups
(Hopper's `wgmma`). Its rows are as many bytes as the weights, or more. Triton's own loop loads
both behind the wait, and takes a turn for each tile. Here the copy engine brings all weights before
the wait, and behind it the rows, chunk by chunk, each multiplied when it is there.

Up to 64 rows every program takes all of them (docs/records/products.md, 2026-11-24). More rows are
divided into blocks, so that each program brings about as many rows as weights. cuBLAS takes
as long at 16 rows of a narrow model as at 128: what is paid is the start of its kernels.
Measured: layers of SmolLM2 at 96 to 768 rows, of Granite-4.0-H-350M's width at 128 to 512 and of
Qwen3-0.6B at 96 to 256 (docs/records/products.md, 2026-11-26).

Written in Gluon, the form of Triton in which a program states the place of each element.
"""
# Gluon does not know `and` of the two kinds of `if`; mypy does not know that a loop over constants
# is unrolled.
# ruff: noqa: SIM102
# mypy: disable-error-code="assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
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

from megatron_async.ops.dependent_launch import launch_options
from megatron_async.ops.linear.product_kernel import (
    IN_ORDER,
    PROCESSORS,
    WIDE,
    Activation,
    Operands,
    Problem,
    ProductKernel,
    Wants,
    check_copied,
)
from megatron_async.ops.linear.qkv_places import (
    QkvPlaces,
    first_of_pairs,
    place,
    split_pairs,
    store_heads,
)
from megatron_async.ops.linear.stream import Stream

WARPGROUP_ROWS = 64
"""Rows that a warpgroup multiplies at once."""
WARPGROUP_INPUTS = 1024
"""Most inputs of a program: its weights, and most of its rows, are in shared memory."""
WARPGROUP_LONGEST = 3072
"""Most inputs of a product that is split."""
WARPGROUP_OUTPUTS = 32
"""Outputs of a program, where all programs can run at once."""
SHARED_MEMORY = 200_000
"""Bytes of chunks that one program may have."""

# Of more than `WARPGROUP_ROWS` rows.
MOST_ROWS = 768
"""More were not measured."""
MOST_ELEMENTS = 300_000
"""Most elements of x of a product that cannot be split. Where there are more, cuBLAS's larger tiles
bring each element to fewer processors (512 rows of 768: 5.0 us, this kernel 5.9)."""
MOST_PARTIAL_BYTES = 3_000_000
"""Most bytes of partial sums: Qwen3-0.6B's step of 256 rows gained nothing by 3.1 and 4.2 MB."""
MOST_BYTES = 42_000_000
"""Most bytes that all programs of an unsplit product bring together: with 50 MB, Qwen3-0.6B's qkv
of 256 rows takes 9.7 us, and cuBLAS 7.7."""
SHARE = 768
"""Most inputs of a program of a product that is split."""
ENOUGH_PROGRAMS = 72
"""Fewer programs than this are split further."""
ALONE, SHARED = 216_000, 112_000
"""Bytes of shared memory for the chunks of a program that has a processor for itself, and of one of
two that share a processor."""
IN_SHARED_MEMORY = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""How the copy engine stores a chunk, and the matrix units read it."""
HALVES_IN_SHARED_MEMORY = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
"""`IN_SHARED_MEMORY` of two pieces of a chunk's rows, which lie behind each other."""


@dataclass(frozen=True)
class WarpgroupPlan:
    """Layout of `warpgroup_kernel`: each program takes `block_n` outputs of `block_m` rows and one
    of `splits` shares of the inputs, in chunks."""

    block_m: int
    """A multiple of `WARPGROUP_ROWS`."""
    block_n: int
    splits: int
    chunk: int
    """Inputs of a chunk, a multiple of 64."""
    chunks: int
    """Chunks of a program; the last ones of the last share may reach beyond the inputs."""
    ring: int
    """Chunks of the rows that are in shared memory at a time."""


def warpgroup_plan(problem: Problem) -> WarpgroupPlan | None:
    """The layout of a product of rows that a thread cannot load, whose weights fit the processors;
    None: another kernel's.

    From 17 rows on; fewer, and up to 32 where resident weights fit, are `resident_kernel`'s:
    products after those can include a norm, which partial sums forbid (Granite's step at 32 rows
    1.010 -> 1.088 ms with this kernel).
    """
    rows, outputs, k, dtype, gated, may_split, *_ = problem
    itemsize = dtype.itemsize
    # float16 would overflow where a row meets its norm's factors before it is normalised.
    if dtype != torch.bfloat16 or not problem.aligned:
        return None
    if rows <= 16 or outputs >= WIDE:
        return None
    if k > (WARPGROUP_LONGEST if may_split else WARPGROUP_INPUTS):
        return None
    if rows > WARPGROUP_ROWS:
        return _of_many_rows(rows, outputs, k, itemsize, gated, may_split)
    chunk = 256 if k >= 1024 and k % 256 == 0 else 128
    total = triton.cdiv(k, chunk)
    chunks = triton.cdiv(total, max(2, triton.cdiv(k, WARPGROUP_INPUTS)) if may_split else 1)
    weights = chunks * (2 if gated else 1) * WARPGROUP_OUTPUTS * chunk * itemsize
    ring = min(chunks, (SHARED_MEMORY - weights) // (WARPGROUP_ROWS * chunk * itemsize))
    if ring < 2 <= chunks:
        return None
    return WarpgroupPlan(
        WARPGROUP_ROWS, WARPGROUP_OUTPUTS, triton.cdiv(total, chunks), chunk, chunks, ring
    )


def _of_many_rows(
    rows: int, outputs: int, k: int, itemsize: int, gated: bool, may_split: bool
) -> WarpgroupPlan | None:
    """The smallest tile whose programs all run at once."""
    if rows > MOST_ROWS or itemsize != 2 or not (may_split or rows * k <= MOST_ELEMENTS):
        return None
    tiles = ((64, 32), (128, 32), (128, 64)) if gated else ((64, 32), (64, 64), (128, 64))
    for block_m, block_n in tiles:
        tile_count = triton.cdiv(outputs, block_n) * triton.cdiv(rows, block_m)
        splits = triton.cdiv(k, SHARE) if may_split else 1
        if may_split and splits == 1 and tile_count < ENOUGH_PROGRAMS:
            splits = 2
        height = (2 if gated else 1) * block_n
        if splits == 1 and tile_count * (block_m + height) * k * itemsize > MOST_BYTES:
            continue
        if splits > 1 and splits * rows * outputs * 4 > MOST_PARTIAL_BYTES:
            continue
        plan = _layout(block_m, block_n, splits, k, itemsize, gated, tile_count)
        if plan is not None:
            return plan
    return None


def _layout(
    block_m: int, block_n: int, splits: int, k: int, itemsize: int, gated: bool, tile_count: int
) -> WarpgroupPlan | None:
    """None: its programs would not all run at once. Two of SwiGLU may share a processor: that won
    where one larger tile was the other choice, and lost elsewhere."""
    in_strips = k % 128 if gated else splits > 1 and k < 1024
    chunk = 64 if in_strips else 128
    total = triton.cdiv(k, chunk)
    chunks = triton.cdiv(total, splits)
    programs = tile_count * triton.cdiv(total, chunks)
    if programs > PROCESSORS * (2 if gated else 1):
        return None
    weights = chunks * (2 if gated else 1) * block_n * chunk * itemsize
    room = ALONE if programs <= PROCESSORS else SHARED
    ring = min(chunks, (room - weights) // (block_m * chunk * itemsize))
    if ring < 2 <= chunks:
        return None
    return WarpgroupPlan(block_m, block_n, triton.cdiv(total, chunks), chunk, chunks, ring)


def _served(problem: Problem, wants: Wants, plan: WarpgroupPlan) -> set[str]:
    served = {"activation", "squares"}
    if wants.rotate and wants.rotate % plan.block_n == 0:
        served.add("rotate")
    return served


def warpgroup_product(
    x: Tensor | Stream,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    plan: WarpgroupPlan,
    places: QkvPlaces | None = None,
) -> Tensor:
    """`product` of 16-bit numbers by a given plan, on a GPU with warpgroups (Hopper); partial sums
    if it splits. A `Stream` must have squares, of one group."""
    given = Operands(x, weight, bias, activation)
    x, n = given.rows, given.outputs
    rows, k = x.shape
    if x.itemsize != 2:
        raise ValueError(f"warpgroup_product: x is {x.dtype}; it is for 16-bit numbers.")
    check_copied("warpgroup_product", x, weight)
    if plan.splits > 1 and (activation or bias is not None or places):
        raise ValueError("warpgroup_product: partial sums can have neither bias nor activation.")
    placed = place(places, given, plan.block_n, activation, plan.splits)
    if places is None:
        weight_chunks = chunks_of(weight, plan.block_n, plan.chunk)
    else:
        weight_chunks = pairs_of(weight, places.dim, plan.block_n // 2, plan.chunk)
    grid = (triton.cdiv(n, plan.block_n), plan.splits, triton.cdiv(rows, plan.block_m))
    warpgroup_kernel[grid](
        chunks_of(x, plan.block_m, plan.chunk),
        weight_chunks,
        given.bias,
        given.squares,
        *placed.tensors,
        rows,
        n,
        k,
        given.eps,
        chunks=plan.chunks,
        ring=plan.ring,
        **placed.constants,
        **given.constants,
        num_warps=plan.block_m // 16,
        **launch_options(x),
    )
    return placed.tensors[-1]


def chunks_of(rows: Tensor, block: int, chunk: int) -> TensorDescriptor:
    """`[rows, elements]` for the copy engine, which brings `block` rows of `chunk` elements at a
    time; zeros for what is outside."""
    return TensorDescriptor.from_tensor(rows, [block, chunk], IN_SHARED_MEMORY)


def pairs_of(weight: Tensor, dim: int, pairs: int, chunk: int) -> TensorDescriptor:
    """A qkv weight for the copy engine, which brings `pairs` rows of one half of a head, and as
    many half a head behind them, at a time."""
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
    cache_scales: gl.tensor,
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
            out, key_cache, value_cache, cache_scales, kv_heads, group, dim,
        )  # fmt: skip
    else:
        target = out + (part * rows + row) * n + column
        gl.store(target, y.to(out.dtype.element_ty), mask=(row < rows) & (column < n))


WARPGROUP = ProductKernel(
    "warpgroup", warpgroup_plan, _served, warpgroup_product, IN_ORDER._replace(factor="sums")
)
