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

from megatron_async.ops.linear.qkv_places import split_pairs
from megatron_async.ops.linear.quantised_weight import E4M3_MAX, LEAST_MAXIMUM

LARGEST, LEAST = gl.constexpr(E4M3_MAX), gl.constexpr(LEAST_MAXIMUM)
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
def grid_of(lines: int, warps: int, bits: int, swaps: bool = False) -> Any:
    """How warps share sums of so many rows, of numbers of so many bits: warps along the rows, 16
    rows each, and along the columns; inputs that are multiplied at once; rows if it `swaps`: then
    each warp has 16 outputs at a time, of all rows."""
    along_rows = min(warps, lines // 16) if not swaps else 0
    along_columns = warps // along_rows if along_rows else warps
    return along_rows, along_columns, 256 // bits, lines if swaps else 0


@gluon.constexpr_function
def sums_layout(grid: Any, piece: int, halves: int) -> Any:
    """Layout of sums of a piece, and behind them of up's: `[rows, halves * piece]`, or `[halves *
    piece, rows]`. The sums of an output, of gate and up, are in one thread."""
    along_rows, along_columns, inputs, swapped = grid
    if swapped:
        return gl.NVMMADistributedLayout([3, 0], [along_columns, 1], [16, swapped, inputs])
    columns = piece * halves if along_columns == 1 else piece // along_columns
    return gl.NVMMADistributedLayout([3, 0], [along_rows, along_columns], [16, columns, inputs])


@gluon.constexpr_function
def side_of_sums(grid: Any, piece: int, halves: int, side: str) -> Any:
    """Layout of one axis of sums: of "rows" or "outputs"."""
    dim = (side == "rows") != (grid[3] > 0)
    return gl.SliceLayout(int(dim), sums_layout(grid, piece, halves))


@gluon.jit
def over_rows(of_outputs: gl.tensor, grid: gl.constexpr) -> gl.tensor:
    """A number of each output, as sums are multiplied by it."""
    return of_outputs[:, None] if grid[3] > 0 else of_outputs[None, :]


@gluon.jit
def over_outputs(of_rows: gl.tensor, grid: gl.constexpr) -> gl.tensor:
    """A number of each row, as sums are multiplied by it."""
    return of_rows[None, :] if grid[3] > 0 else of_rows[:, None]


@gluon.jit
def split_halves(
    y: gl.tensor, lines: gl.constexpr, piece: gl.constexpr, grid: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """Sums of gate and of up."""
    if grid[3] > 0:
        gate, up = gl.split(y.reshape([2, piece, lines]).permute([1, 2, 0]))
        layout: gl.constexpr = sums_layout(grid, piece, 1)
        gate, up = gl.convert_layout(gate, layout), gl.convert_layout(up, layout)
    else:
        gate, up = split_pairs(y, lines, piece, sums_layout(grid, piece, 1))
    return gate, up


@gluon.jit
def round_outputs(
    y: gl.tensor, input_scale: gl.tensor | None, grid: gl.constexpr, piece: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """Codes of a piece's outputs, a block, and of each row its scale: `round_blocks` in Gluon."""
    axis: gl.constexpr = 0 if grid[3] > 0 else 1
    if input_scale is None:
        scale = gl.maximum(gl.max(gl.abs(y), axis), LEAST) / LARGEST
    else:
        lines: gl.constexpr = y.shape[1 - axis]
        scale = gl.full([lines], 0.0, gl.float32, side_of_sums(grid, piece, 1, "rows"))
        scale = scale + gl.load(input_scale)
    y = gl.div_rn(y, gl.zeros_like(y) + over_outputs(scale, grid))
    y = gl.minimum(gl.maximum(y, -LARGEST), LARGEST)
    return y.to(gl.float8e4nv), scale


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
            [halves * pieces[i], lines] if grid[3] > 0 else [lines, halves * pieces[i]],
            0.0, gl.float32, sums_layout(grid, pieces[i], halves),
        )  # fmt: skip
        zeros = zeros + (zero,)
    return zeros


@gluon.jit
def scales_of_blocks(
    scales: gl.tensor,
    block: gl.tensor,
    first: gl.tensor,
    n: gl.tensor,
    strips: gl.constexpr,
    halves: gl.constexpr,
    scale_rows: gl.constexpr,
    blocks: gl.constexpr,
    one_block: gl.constexpr,
) -> gl.tuple:
    """Scales of a tile's blocks at each strip of a chunk, from a block of inputs on: of the tile's
    first output and, unless it lies in `one_block`, of the next block; then those of up's. None
    where each output has scales of its own, `scale_rows` at most 1."""
    found = ()
    if scale_rows > 1:
        for each in gl.static_range(strips):
            column = gl.minimum(block + each, blocks - 1)
            for half in gl.static_range(halves):
                for nth in gl.static_range(1 if one_block else 2):
                    row = gl.minimum(first + nth * scale_rows, n - 1) + half * n
                    found = found + (gl.load(scales + row // scale_rows * blocks + column),)
    return found


@gluon.jit
def spread(
    found: gl.tuple,
    each: gl.constexpr,
    first: gl.tensor,
    n: gl.tensor,
    start: gl.constexpr,
    piece: gl.constexpr,
    halves: gl.constexpr,
    scale_rows: gl.constexpr,
    one_block: gl.constexpr,
    layout: gl.constexpr,
) -> gl.tensor:
    """Scales of a piece's outputs, and behind them of up's, from those of a strip's blocks; the
    piece begins with the tile's output `start`."""
    column = gl.arange(0, halves * piece, layout=layout)
    if one_block:
        scale = gl.where(column >= 0, found[each * halves], 0.0)
        if halves == 2:
            scale = gl.where(column < piece, scale, found[each * halves + 1])
    else:
        own: gl.constexpr = each * halves * 2
        place = column + start
        scale = gl.where(place < scale_rows - first % scale_rows, found[own], found[own + 1])
        if halves == 2:
            left = scale_rows - (first + n) % scale_rows
            up = gl.where(place - piece < left, found[own + 2], found[own + 3])
            scale = gl.where(column < piece, scale, up)
    return scale


@gluon.jit
def scales_of_outputs(
    scales: gl.tensor,
    block: gl.tensor,
    first: gl.tensor,
    n: gl.tensor,
    piece: gl.constexpr,
    halves: gl.constexpr,
    blocks: gl.constexpr,
    layout: gl.constexpr,
) -> gl.tensor:
    """Scales of a piece's outputs, and behind them of up's, that each have their own at one of a
    weight row's `blocks` blocks of inputs."""
    column = gl.arange(0, halves * piece, layout=layout)
    place = first + column % piece
    row = gl.where(column < piece, place, place + n)
    block = gl.minimum(block, blocks - 1)
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
    grid: gl.constexpr,
) -> gl.tuple:
    """Sums of all pieces, to those of one of which a strip's product is added.

    The sums went through the wait for the product, as operands: else the compiler adds up all
    products of a chunk at its end, and keeps each in registers until then.
    """
    sums = ()
    for i in gl.static_range(1, len(waited)):
        if i == piece + 1:
            factor = over_outputs(row_scale, grid)
            if by_blocks:
                factor = factor * over_rows(weight_scale, grid)
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
    of_blocks: gl.tuple,
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
    before is multiplied, and those of blocks, which memory has, while the two before are:
    `of_blocks` has those of the first two chunks.
    """
    dtype: gl.constexpr = x_strips.dtype
    strips: gl.constexpr = x_strips.block_shape[0]
    products: gl.constexpr = len(pieces)
    by_blocks: gl.constexpr = scale_rows > 0
    zeros = zeros_of(pieces, halves, lines, grid)
    side: gl.constexpr = side_of_sums(grid, pieces[0], halves, "rows")
    next_blocks, later_blocks = of_blocks
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
        here = next_blocks
        next_blocks = later_blocks
        later_blocks = scales_of_blocks(
            weight_scales, block + 2 * strips, first, n, strips, halves, scale_rows, blocks,
            one_block,
        )  # fmt: skip
        mbarrier.wait(arrived.index(slot), phase)
        before, row_before, weight_before = zeros[0], zeros[0], zeros[0]
        for each in gl.static_range(strips):
            place = slot * strips + each
            values = x.index(place)._reinterpret(dtype, [lines, 128], strip_layout(8))
            for i in gl.static_range(products):
                weight = buffers[i].index(place)
                left, right = values, weight
                if grid[3] > 0:
                    left, right = weight, values
                running = warpgroup_mma(
                    left, right.permute((1, 0)), zeros[i], use_acc=False, is_async=True
                )
                row_scale = gl.convert_layout(
                    of_rows[each], side_of_sums(grid, pieces[i], halves, "rows")
                )
                weight_scale = row_scale
                if scale_rows > 1:
                    weight_scale = spread(
                        here, each, first, n, start_of(pieces, i), pieces[i], halves, scale_rows,
                        one_block, side_of_sums(grid, pieces[i], halves, "outputs"),
                    )  # fmt: skip
                elif by_blocks:
                    weight_scale = scales_of_outputs(
                        weight_scales, block + each, first + start_of(pieces, i), n, pieces[i],
                        halves, blocks, side_of_sums(grid, pieces[i], halves, "outputs"),
                    )  # fmt: skip
                if each + i > 0:
                    waited = warpgroup_mma_wait(1, deps=(before,) + sums)
                    sums = promote(
                        waited,
                        row_before,
                        weight_before,
                        (i + products - 1) % products,
                        by_blocks,
                        grid,
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
        sums = promote(waited, row_before, weight_before, products - 1, by_blocks, grid)
        slot = gl.where(slot + 1 == ring, 0, slot + 1)
        phase = gl.where(slot == 0, 1 - phase, phase)
    return sums
