"""Strips of rows and weights for `streamed_kernel`, in Gluon: how they are asked for, where the
elements of sums are, and the loop of its products of FP8.

A strip is what lines of 128 bytes hold: 64 inputs of 16 bits, or 128 of FP8, which are one block of
scales. The matrix units keep 14 bits of a sum of FP8 products. So each strip's product starts from
zero, and is multiplied by its scales and added to sums in float32 (DeepSeek-V3, arXiv 2412.19437).
"""
# Gluon knows tuples and constants, but not `*` in a tuple; mypy does not know that a loop over
# constants is unrolled.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LINE_BYTES = gl.constexpr(128)
"""Bytes of a line in shared memory: what the matrix units' pattern of lines repeats."""


@gluon.constexpr_function
def strip_layout(bits: int) -> Any:
    """How the copy engine stores lines of numbers of so many bits, and the matrix units read
    them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)


@gluon.constexpr_function
def start_of(pieces: Any, piece: int) -> int:
    """Outputs before a piece."""
    return sum(pieces[:piece])


@gluon.constexpr_function
def size_of(pieces: Any, piece: int) -> int:
    """Number of a piece's size among the sizes that there are, from the largest on."""
    return sorted(set(pieces), reverse=True).index(pieces[piece])


@gluon.constexpr_function
def grid_of(lines: int, warps: int, bits: int) -> Any:
    """How warps share sums of so many rows, of numbers of so many bits: warps along the rows, 16
    rows each, and along the columns; inputs that are multiplied at once."""
    along_rows = min(warps, lines // 16)
    return along_rows, warps // along_rows, 256 // bits


@gluon.constexpr_function
def sums_layout(grid: Any, piece: int, halves: int) -> Any:
    """Layout of sums of a piece, and behind them of up's: `[rows, halves * piece]`. The sums of an
    output are in one thread."""
    along_rows, along_columns, inputs = grid
    columns = piece * halves if along_columns == 1 else piece // along_columns
    return gl.NVMMADistributedLayout([3, 0], [along_rows, along_columns], [16, columns, inputs])


@gluon.constexpr_function
def side_of_sums(grid: Any, piece: int, halves: int, dim: int) -> Any:
    """Layout of one axis of sums."""
    return gl.SliceLayout(dim, sums_layout(grid, piece, halves))


@gluon.jit
def ask(
    descriptor: tma.tensor_descriptor,
    buffer: gl.tensor,
    arrived: gl.tensor,
    slot: gl.tensor,
    source: gl.tuple,
    wanted: gl.tensor,
) -> None:
    """Ask for all strips of a chunk's block that begins at `source`."""
    shape: gl.constexpr = descriptor.block_shape
    place = buffer.index(slot * shape[0])._reinterpret(descriptor.dtype, shape, descriptor.layout)
    tma.async_copy_global_to_shared(descriptor, source, arrived.index(slot), place, pred=wanted)


@gluon.jit
def ask_weights(
    descriptors: gl.tuple,
    buffers: gl.tuple,
    arrived: gl.tensor,
    slot: gl.tensor,
    first: gl.tensor,
    strip: gl.tensor,
    wanted: gl.tensor,
    pieces: gl.constexpr,
) -> None:
    """Ask for one chunk of a tile's weights, from strip `strip` and output `first` on."""
    for i in gl.static_range(len(pieces)):
        source = [strip, 0, first + start_of(pieces, i), 0]
        ask(descriptors[size_of(pieces, i)], buffers[i], arrived, slot, source, wanted)


@gluon.jit
def zeros_of(
    pieces: gl.constexpr,
    halves: gl.constexpr,
    lines: gl.constexpr,
    grid: gl.constexpr,
) -> gl.tuple:
    """Sums of each piece before the first product."""
    zeros = ()
    for i in gl.static_range(len(pieces)):
        zero = gl.full(
            [lines, halves * pieces[i]], 0.0, gl.float32,
            sums_layout(grid, pieces[i], halves),
        )  # fmt: skip
        zeros = zeros + (zero,)
    return zeros


@gluon.jit
def scales_by_blocks(
    scales: gl.tensor,
    block: gl.tensor,
    first: gl.tensor,
    end: gl.tensor,
    column: gl.tensor,
    scale_rows: gl.constexpr,
    blocks: gl.constexpr,
    one_block: gl.constexpr,
) -> gl.tensor:
    """Scales of weight rows `first + column`, which are at most `scale_rows`, so of two blocks or
    `one_block`; of rows from `end` on any."""
    row = gl.minimum(first, end - 1)
    scale = gl.load(scales + row // scale_rows * blocks + block)
    if one_block:
        return gl.where(column >= 0, scale, 0.0)
    next_row = gl.minimum(first + scale_rows, end - 1)
    other = gl.load(scales + next_row // scale_rows * blocks + block)
    return gl.where(column < scale_rows - first % scale_rows, scale, other)


@gluon.jit
def scales_of_outputs(
    scales: gl.tensor,
    block: gl.tensor,
    first: gl.tensor,
    n: gl.tensor,
    piece: gl.constexpr,
    halves: gl.constexpr,
    scale_rows: gl.constexpr,
    blocks: gl.constexpr,
    one_block: gl.constexpr,
    layout: gl.constexpr,
) -> gl.tensor:
    """Scales of a piece's outputs, and behind them of up's, at one of a weight row's `blocks`
    blocks of inputs."""
    column = gl.arange(0, halves * piece, layout=layout)
    block = gl.minimum(block, blocks - 1)
    if scale_rows > 1:
        scale = scales_by_blocks(scales, block, first, n, column, scale_rows, blocks, one_block)
        if halves == 1:
            return scale
        up = scales_by_blocks(
            scales, block, first + n, 2 * n, column - piece, scale_rows, blocks, one_block
        )
        return gl.where(column < piece, scale, up)
    place = first + column % piece
    row = gl.where(column < piece, place, place + n)
    return gl.load(scales + row * blocks + block, mask=place < n, other=0.0)


@gluon.jit
def scales_of_rows(
    scales: gl.tensor,
    block: gl.tensor,
    first_row: gl.tensor,
    rows: gl.tensor,
    stride: gl.tensor,
    lines: gl.constexpr,
    strips: gl.constexpr,
    blocks: gl.constexpr,
    layout: gl.constexpr,
) -> gl.tuple:
    """Scales of all rows at each strip of a chunk, from a block of inputs on."""
    row = first_row + gl.arange(0, lines, layout=layout)
    found = ()
    for each in gl.static_range(strips):
        place = gl.minimum(block + each, blocks - 1) * stride + row
        found = found + (gl.load(scales + place, mask=row < rows, other=0.0),)
    return found


@gluon.jit
def promote(
    waited: gl.tuple,
    row_scale: gl.tensor,
    weight_scale: gl.tensor,
    piece: gl.constexpr,
    by_blocks: gl.constexpr,
) -> gl.tuple:
    """Sums of all pieces, to those of one of which a strip's product is added.

    The sums went through the wait for the product, as operands: else the compiler adds up all
    products of a chunk at its end, and keeps each in registers until then.
    """
    sums = ()
    for i in gl.static_range(1, len(waited)):
        if i == piece + 1:
            factor = row_scale[:, None]
            if by_blocks:
                factor = factor * weight_scale[None, :]
            sums = sums + (waited[i] + waited[0] * factor,)
        else:
            sums = sums + (waited[i],)
    return sums


@gluon.jit
def promoted_sums(
    sums: gl.tuple,
    x_strips: tma.tensor_descriptor,
    x: gl.tensor,
    descriptors: gl.tuple,
    buffers: gl.tuple,
    arrived: gl.tensor,
    row_scales: gl.tensor,
    weight_scales: gl.tensor,
    rows: gl.tensor,
    n: gl.tensor,
    scale_stride: gl.tensor,
    first: gl.tensor,
    first_row: gl.tensor,
    begin: gl.tensor,
    lines: gl.constexpr,
    grid: gl.constexpr,
    chunks: gl.constexpr,
    chunk_bytes: gl.constexpr,
    pieces: gl.constexpr,
    ring: gl.constexpr,
    halves: gl.constexpr,
    blocks: gl.constexpr,
    scale_rows: gl.constexpr,
    one_block: gl.constexpr,
) -> gl.tuple:
    """Sums of a tile, piece by piece, over one share of the inputs; `scale_rows` outputs of a
    weight have one scale for each of `blocks` blocks of inputs, or 0: none in the loop.

    While a product of a chunk runs, the one before is promoted. Rows' scales come while the chunk
    before is multiplied.
    """
    dtype: gl.constexpr = x_strips.dtype
    strips: gl.constexpr = x_strips.block_shape[0]
    products: gl.constexpr = len(pieces)
    by_blocks: gl.constexpr = scale_rows > 0
    zeros = zeros_of(pieces, halves, lines, grid)
    side: gl.constexpr = side_of_sums(grid, pieces[0], halves, 1)
    slot = first * 0
    phase = first * 0
    coming = scales_of_rows(
        row_scales, begin, first_row, rows, scale_stride, lines, strips, blocks, side
    )
    for number in range(chunks):
        of_rows = coming
        block = begin + number * strips
        coming = scales_of_rows(
            row_scales, block + strips, first_row, rows, scale_stride, lines, strips, blocks, side
        )
        mbarrier.wait(arrived.index(slot), phase)
        before, row_before, weight_before = zeros[0], zeros[0], zeros[0]
        for each in gl.static_range(strips):
            place = slot * strips + each
            values = x.index(place)._reinterpret(dtype, [lines, 128], strip_layout(8))
            for i in gl.static_range(products):
                weight = buffers[i].index(place).permute((1, 0))
                running = warpgroup_mma(values, weight, zeros[i], use_acc=False, is_async=True)
                row_scale = gl.convert_layout(
                    of_rows[each], side_of_sums(grid, pieces[i], halves, 1)
                )
                weight_scale = row_scale
                if by_blocks:
                    weight_scale = scales_of_outputs(
                        weight_scales, block + each, first + start_of(pieces, i), n, pieces[i],
                        halves, scale_rows, blocks, one_block,
                        side_of_sums(grid, pieces[i], halves, 0),
                    )  # fmt: skip
                if each + i > 0:
                    waited = warpgroup_mma_wait(1, deps=(before,) + sums)
                    sums = promote(
                        waited, row_before, weight_before, (i + products - 1) % products, by_blocks
                    )
                before = running
                row_before = row_scale
                weight_before = weight_scale
        waited = warpgroup_mma_wait(0, deps=(before,) + sums)
        if ring < chunks:
            strip = begin + (number + ring) * strips
            wanted = number + ring < chunks
            mbarrier.expect(arrived.index(slot), chunk_bytes, pred=wanted)
            ask_weights(descriptors, buffers, arrived, slot, first, strip, wanted, pieces)
            ask(x_strips, x, arrived, slot, [strip, first_row, 0], wanted)
        sums = promote(waited, row_before, weight_before, products - 1, by_blocks)
        slot = gl.where(slot + 1 == ring, 0, slot + 1)
        phase = gl.where(slot == 0, 1 - phase, phase)
    return sums
