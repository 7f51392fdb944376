"""Product of few rows, chosen for 9 to 128, and for 1 to 64 in one order, whose weights arrive
without a pause.

Each program has one tile, and about as many programs as there are processors run at once. A tile
may be as high as any sum of powers of two: 112 outputs of 14,336, or 48 of 6,144, are one tile for
each of 128 programs. (`tile_kernel`'s 224 tiles of 64 leave 40 of 132 processors idle at the end.)
The copy engine brings chunks of weights and rows to a ring in shared memory. The ring's first
weights are asked for before the wait. As soon as a chunk's products are done, its place is asked
for again.

Gate and up of a tile's outputs lie behind each other in shared memory and are multiplied as one
weight: the matrix units read the rows once for both.

Products that are split along their inputs give partial sums, as `tile_kernel` does. Nothing is
added up across programs, so results are the same in every run. Where a row's bits may not depend on
the number of rows, all of K is one chain of products of the matrix units, 16 inputs deep each, so
what counts behind the wait is how soon each of them follows the one before: few chunks, and one
product for all outputs of a tile. Then an activation takes the rounded product, as `swiglu` and
`squared_relu` do behind other kernels.

Written in Gluon, the form of Triton in which a program states the place of each element.
"""
# Gluon knows tuples and constants, but not `*` in a tuple; mypy does not know that a loop over
# constants is unrolled.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated, unreachable, union-attr"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from megatron_async.ops.dependent_launch import launch_options
from megatron_async.ops.linear.activations import gated_by, round_to, squared_relu_of
from megatron_async.ops.linear.product_kernel import (
    IN_ORDER,
    PROCESSORS,
    Activation,
    Operands,
    Problem,
    ProductKernel,
    check_copied,
    new_sums,
)
from megatron_async.ops.linear.strips import (
    LINE_BYTES,
    ask,
    ask_weights,
    grid_of,
    over_outputs,
    over_rows,
    promoted_sums,
    round_outputs,
    scales_of_blocks,
    scales_of_outputs,
    side_of_sums,
    split_halves,
    start_of,
    strip_layout,
    zeros_of,
)

STREAMED_ROWS = 128
"""Most rows of such a product: what two warpgroups multiply at once."""
ONE_WARPGROUP = 64
"""Rows up to which nearly all products gain; beyond, SwiGLU and long rows alone."""
FEW_ROWS = 16
"""Fewest rows that are brought."""
STREAMED_FROM = 9
"""Fewest rows of such a product, but in one order."""
STREAMED_INPUTS, WIDE_INPUTS = 4096, 2048
"""Fewest inputs, and those of tiles of more than `TILE_OUTPUTS`; less was not measured."""
TILE_OUTPUTS, HIGH_FROM = 64, 17
"""Outputs of most tiles of `tile_kernel`, and fewest rows of products by higher tiles: at 16 rows
in_proj of Nemotron-3-Nano behind a norm gains nothing."""
STRIP = 64
"""Inputs of a line in shared memory: 128 bytes, what the matrix units' pattern of lines repeats."""
STRIPS = 2
"""Strips of a chunk. Chunks of one strip need more copies, and lost at 64 rows. Beyond, two strips
leave too few chunks of ring."""
LEAST_PROGRAMS = 120
"""Processors run a program each: nearly all must have one."""
SHARED_MEMORY, MORE_SHARED_MEMORY = 216 << 10, 226 << 10
"""Bytes for the ring, of 227 KiB that a program may have: three chunks of 64 rows and 112 gated
outputs; beyond 64 rows five smaller ones. A longer ring for 64 rows made their step 0.6 % longer.
"""
SPLIT_OUTPUTS = 64
"""Outputs of a tile whose inputs are split in two."""
LONG_INPUTS, LONG_OUTPUTS, LONG_SPLITS = 8192, 128, 4
"""Fewest inputs of a long row, and outputs and shares of its tiles, beyond 64 rows."""
LEAST_OUTPUTS, MOST_OUTPUTS = 40, 112
"""Outputs of a tile that is not split. Higher ones would leave less than three chunks of ring, and
lower ones read the rows too often."""
LEAST_ROWS = 8
"""Fewest rows that are brought in one order: lines that the matrix units' pattern repeats after."""
CHAIN_INPUTS = 512
"""Fewest inputs in one order: shorter products were not measured."""
ONE_PIECE, LEAST_LINES = 64, 16
"""Outputs up to which a tile in one order has the next power of two of them, and the fewest lines
of weights."""
LONG_CHAIN = 4096
"""Inputs from which on tiles of at most 8 rows have twice as many lines at the least: fewer
programs end sooner."""
MOST_LINES = 256
"""Lines of weights of a tile in one order: a thread holds half as many sums."""
MOST_RUNNING = gl.constexpr(7)
"""Products that a warpgroup can leave running while it waits for those before."""
STRIPS_IN_SHARED_MEMORY = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
"""`IN_SHARED_MEMORY` of several strips, one behind the other."""
HALVES_OF_STRIPS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
"""`IN_SHARED_MEMORY` of several strips, of which each has lines of the gate, then those of up."""
STRIPS_OF_FP8 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3)
HALVES_OF_FP8 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4)
MOST_PIECES = 3
"""Powers of two that a tile's outputs may be the sum of: each has a descriptor of its own."""


@dataclass(frozen=True)
class StreamedPlan:
    """Layout of `streamed_kernel`: each program takes a tile of `sum(pieces)` outputs of all rows
    and one of `splits` shares of the inputs."""

    pieces: tuple[int, ...]
    """Outputs of each part of a tile that is multiplied at once: powers of two from 8 on, of at
    most three sizes."""
    splits: int
    strips: int
    """Strips of 64 inputs that a chunk has: what is brought, and waited for, at a time."""
    ring: int
    """Chunks that are in shared memory, or asked for, at a time; at least 2."""
    block_m: int
    """Rows that are brought: 8, 16, 32, 64 or 128."""
    rounds: bool = False
    """Whether an activation takes the rounded product instead of the sums."""
    warps: int = 0
    """Warps of a program; 0: a warpgroup for each 64 rows. More share the outputs."""
    row_blocks: int = 1
    """Programs that share the rows, in FP8."""
    swaps: bool = False
    """Whether weights are the matrix units' lines, in FP8; then there is one piece."""


def streamed_plan(problem: Problem) -> StreamedPlan | None:
    """The layout of a product whose tiles all run at once; None: another kernel's.

    Measured: steps of Llama-3.1-8B's shape at 16, 32 and 64 rows and of Nemotron-H-8B's at 16 and
    64, 0.6 to 4 % shorter (docs/records/products.md, 2026-11-25); layers of the former at 96 and
    128 rows, 5 to 7 % (2026-11-27); products of 9,216 to 12,352 outputs of 2,048 and 2,688 inputs
    at 64 rows, 19 to 29 % (docs/records/one_order.md). Other lengths were not measured.
    """
    rows, outputs, k, dtype, gated, may_split, *_ = problem
    if not problem.aligned or dtype.itemsize != 2:
        return None
    if problem.invariant:
        return _in_one_order(problem)
    if not STREAMED_FROM <= rows <= STREAMED_ROWS:
        return None
    if k < WIDE_INPUTS or k % (STRIPS * STRIP):
        return None
    block_m = max(FEW_ROWS, triton.next_power_of_2(rows))
    is_wide = rows > ONE_WARPGROUP
    if may_split:
        if not is_wide and k >= STREAMED_INPUTS:
            return _tiles((SPLIT_OUTPUTS,), 2, outputs, gated, block_m)
        if k >= LONG_INPUTS:
            return _tiles((LONG_OUTPUTS,), LONG_SPLITS, outputs, gated, block_m)
        return None
    height = -(-outputs // (8 * PROCESSORS)) * 8
    if not LEAST_OUTPUTS <= height <= MOST_OUTPUTS or (is_wide and not gated):
        return None
    is_high = height > TILE_OUTPUTS and not gated
    if rows < HIGH_FROM if is_high else k < STREAMED_INPUTS:
        return None
    return _tiles(_pieces(height), 1, outputs, gated, block_m)


def _in_one_order(problem: Problem) -> StreamedPlan | None:
    """The layout of a product of few rows that is never split."""
    rows, outputs, k, dtype, gated, *_ = problem
    if rows > ONE_WARPGROUP or k < CHAIN_INPUTS or k % STRIP:
        return None
    halves = 2 if gated else 1
    block_m = max(LEAST_ROWS, triton.next_power_of_2(rows))
    is_low = block_m == LEAST_ROWS
    height = -(-outputs // (8 * PROCESSORS)) * 8
    if height <= ONE_PIECE:
        least = LEAST_LINES * (2 if is_low and k >= LONG_CHAIN else 1)
        height = max(least // halves, triton.next_power_of_2(height))
    pieces = _pieces(height)
    if len(pieces) > MOST_PIECES or height * halves > MOST_LINES:
        return None
    line_bytes = STRIP * dtype.itemsize
    room = MORE_SHARED_MEMORY - max(ONE_WARPGROUP - block_m, 0) * line_bytes
    rings = {s: room // (s * (block_m + height * halves) * line_bytes) for s in (8, 4, 2, 1)}
    longest = min(k // (2 * STRIP), 2 if len(pieces) > 1 else 8 if is_low else 4)
    strips = next(s for s in rings if s <= longest and (s == 1 or rings[s] >= (5 if s > 2 else 3)))
    ring = min(rings[strips], -(-k // (strips * STRIP)))
    return StreamedPlan(pieces, 1, strips, ring, block_m, True)


def _pieces(height: int) -> tuple[int, ...]:
    """Powers of two whose sum is a height."""
    bits = range(height.bit_length() - 1, -1, -1)
    return tuple(1 << bit for bit in bits if height >> bit & 1)


def _tiles(
    pieces: tuple[int, ...], splits: int, outputs: int, gated: bool, block_m: int
) -> StreamedPlan | None:
    """None: its programs would not be about as many as run at once."""
    height = sum(pieces)
    if not LEAST_PROGRAMS <= -(-outputs // height) * splits <= PROCESSORS:
        return None
    strips = STRIPS if block_m <= ONE_WARPGROUP else 1
    chunk_bytes = (block_m + height * (2 if gated else 1)) * strips * STRIP * 2
    room = SHARED_MEMORY if block_m <= ONE_WARPGROUP else MORE_SHARED_MEMORY
    return StreamedPlan(pieces, splits, strips, room // chunk_bytes, block_m)


def streamed_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, plan: StreamedPlan
) -> Tensor:
    """`product` of 16-bit numbers by a given plan, on a GPU with warpgroups (Hopper); partial sums
    if it splits."""
    given = Operands(x, weight, bias, activation)
    if x.itemsize != 2:
        raise ValueError(f"streamed_product: x is {x.dtype}; the plan is for 16-bit numbers.")
    check_copied("streamed_product", x, weight)
    return launch_streamed(x, weight, bias, activation, plan, given)


def launch_streamed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    plan: StreamedPlan,
    given: Operands,
    scales: tuple[Tensor | None, Tensor | None, int | None] = (None, None, None),
    out: Tensor | None = None,
    rounding: tuple[Tensor | None, int | None, Tensor | None, Tensor | None] = (None,) * 4,
    **of_scales: Any,
) -> Tensor:
    """The product of rows and a weight of one dtype, `[rows, k]` and `[n, k]`, of 16 bits or FP8;
    that with scales of rows and weight, and what the kernel is told of them; in `out`, if it is
    there: rounded with `rounding`, which are the kernel's."""
    n, (rows, k) = given.outputs, x.shape
    strip = LINE_BYTES.value // x.itemsize
    if rows > plan.block_m * plan.row_blocks:
        most = plan.block_m * plan.row_blocks
        raise ValueError(f"streamed_product: {rows} rows; the plan is for at most {most}.")
    if k % strip:
        raise ValueError(f"streamed_product: {k} inputs are not whole strips of {strip} each.")
    if plan.splits > 1 and (activation or bias is not None):
        raise ValueError("streamed_product: partial sums can have neither bias nor activation.")
    sizes = sorted(set(plan.pieces), reverse=True)
    if not 1 <= len(sizes) <= MOST_PIECES or plan.ring < 2:
        raise ValueError(
            f"streamed_product: a tile has pieces of 1 to {MOST_PIECES} sizes, and a ring at least "
            f"2 chunks; found {plan.pieces} and {plan.ring}."
        )
    if out is None:
        out = new_sums(given.rows, n, plan.splits, given.dtype)
    chunks = chunks_per_share(k, plan, strip)
    sizes += sizes[-1:] * (MOST_PIECES - len(sizes))
    streamed_kernel[(triton.cdiv(n, sum(plan.pieces)), plan.splits, plan.row_blocks)](
        rows_of(x, plan),
        *(weights_of(weight, size, activation == "swiglu", plan) for size in sizes),
        given.bias,
        out,
        rows,
        n,
        *scales,
        *rounding,
        chunks=chunks,
        pieces=plan.pieces,
        ring=min(plan.ring, chunks),
        rounds=plan.rounds,
        **given.constants,
        **of_scales,
        num_warps=plan.warps or warps_of(plan.block_m),
        **launch_options(x),
    )
    return out


def rows_of(x: Tensor, plan: StreamedPlan) -> TensorDescriptor:
    """x, `[rows, k]`, for the copy engine, which brings a block of rows of all strips of a chunk at
    a time; zeros for what is outside."""
    strip = LINE_BYTES.value // x.itemsize
    strips = x.unflatten(1, (-1, strip)).transpose(0, 1)
    block = [plan.strips, plan.block_m, strip]
    layout = STRIPS_IN_SHARED_MEMORY if x.itemsize == 2 else STRIPS_OF_FP8
    return TensorDescriptor.from_tensor(strips, block, layout)


def weights_of(weight: Tensor, piece: int, gated: bool, plan: StreamedPlan) -> TensorDescriptor:
    """A weight for the copy engine, which brings `piece` outputs, of gate and up if `gated`."""
    halves, strip = 2 if gated else 1, LINE_BYTES.value // weight.itemsize
    strips = weight.view(halves, -1, weight.size(1) // strip, strip).permute(2, 0, 1, 3)
    block = [plan.strips, halves, piece, strip]
    layout = HALVES_OF_STRIPS if weight.itemsize == 2 else HALVES_OF_FP8
    return TensorDescriptor.from_tensor(strips, block, layout)


def chunks_per_share(k: int, plan: StreamedPlan, strip: int = STRIP) -> int:
    """Chunks of each share of `k` inputs; of the last share some may lie beyond, and are zeros."""
    return triton.cdiv(triton.cdiv(k, strip * plan.strips), plan.splits)


@gluon.constexpr_function
def warps_of(block_m: int) -> int:
    """A warp multiplies 16 rows, and a warpgroup has four warps."""
    return max(4, block_m // 16)


@gluon.jit(do_not_specialize=["rows", "scale_stride", "rounded_stride"])
def streamed_kernel(
    x_strips: tma.tensor_descriptor,
    weights_0: tma.tensor_descriptor,
    weights_1: tma.tensor_descriptor,
    weights_2: tma.tensor_descriptor,
    bias: gl.tensor,
    out: gl.tensor,
    rows: gl.tensor,
    n: gl.tensor,
    row_scales: gl.tensor | None,
    weight_scales: gl.tensor | None,
    scale_stride: gl.tensor | None,
    rounded_scales: gl.tensor | None,
    rounded_stride: gl.tensor | None,
    input_scale: gl.tensor | None,
    like: gl.tensor | None,
    chunks: gl.constexpr,
    pieces: gl.constexpr,
    ring: gl.constexpr,
    rounds: gl.constexpr,
    gated: gl.constexpr,
    squared: gl.constexpr,
    has_bias: gl.constexpr,
    overlap: gl.constexpr,
    blocks: gl.constexpr = 0,
    scale_rows: gl.constexpr = 0,
    one_block: gl.constexpr = False,
    swaps: gl.constexpr = False,
) -> None:
    """All rows, at most a block, times `sum(pieces)` weight rows, or twice as many if `gated`, over
    one share of the inputs: `chunks` chunks, of which `ring` are in shared memory, or asked for, at
    a time. An activation takes the rounded product if it `rounds`.

    Numbers are of 16 bits, or FP8 with `row_scales` for each of `blocks` strips, and
    `weight_scales` for each strip and `scale_rows` outputs, or, with 0, one an output. If it
    `swaps`, weights are the matrix units' lines, of which these always multiply 64, and rows their
    columns: so few rows cost no products of lines that nobody stores.

    With `rounded_scales`, the product, rounded as the elements of `like` are, is a block of 128
    outputs that the next product takes in FP8: by a scale for each row, or `input_scale`.
    """
    if overlap:
        gdc_launch_dependents()
    dtype: gl.constexpr = x_strips.dtype
    bits: gl.constexpr = x_strips.layout.element_bitwidth
    in_memory: gl.constexpr = strip_layout(bits)
    strip_inputs: gl.constexpr = x_strips.block_shape[2]
    strips: gl.constexpr = x_strips.block_shape[0]
    block_m: gl.constexpr = x_strips.block_shape[1]
    halves: gl.constexpr = 2 if gated else 1
    height: gl.constexpr = start_of(pieces, len(pieces))
    products: gl.constexpr = len(pieces)
    running_groups: gl.constexpr = min(products * strips, MOST_RUNNING)
    has_scales: gl.constexpr = row_scales is not None
    chunk_bytes: gl.constexpr = (block_m + height * halves) * strips * LINE_BYTES
    descriptors = (weights_0, weights_1, weights_2)
    # A warpgroup reads 64 rows. Rows of the strips behind give sums that nobody stores.
    lines: gl.constexpr = block_m if swaps else max(64, block_m)
    grid: gl.constexpr = grid_of(lines, gl.num_warps(), bits, swaps)
    behind: gl.constexpr = lines // block_m - 1
    x = gl.allocate_shared_memory(dtype, [ring * strips + behind, block_m, strip_inputs], in_memory)
    buffers = ()
    for i in gl.static_range(products):
        buffer = gl.allocate_shared_memory(
            dtype, [ring * strips, halves * pieces[i], strip_inputs], in_memory
        )
        buffers = buffers + (buffer,)
    arrived = gl.allocate_shared_memory(gl.int64, [ring, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(ring):
        mbarrier.init(arrived.index(i), count=1)
    first = gl.program_id(0) * height
    part = gl.program_id(1)
    begin = part * (chunks * strips)
    first_row = 0
    if has_scales:
        first_row = gl.program_id(2) * block_m
    for i in gl.static_range(ring):
        mbarrier.expect(arrived.index(i), chunk_bytes)
        strip = begin + i * strips
        ask_weights(descriptors, buffers, arrived, i, first, strip, True, pieces)
    of_outputs = ()
    if has_scales and scale_rows == 0:
        # Here, as at the end nothing else would run while they come.
        for i in gl.static_range(products):
            of_piece = scales_of_outputs(
                weight_scales, 0, first + start_of(pieces, i), n, pieces[i], halves, 1,
                side_of_sums(grid, pieces[i], halves, "outputs"),
            )  # fmt: skip
            of_outputs = of_outputs + (of_piece,)
    of_blocks = ()
    if has_scales:
        for i in gl.static_range(2):
            of_chunk = scales_of_blocks(
                weight_scales, begin + i * strips, first, n, strips, halves, scale_rows, blocks,
                one_block,
            )  # fmt: skip
            of_blocks = of_blocks + (of_chunk,)
    if overlap:
        gdc_wait()
    for i in gl.static_range(ring):
        ask(x_strips, x, arrived, i, [begin + i * strips, first_row, 0], True)
    sums = zeros_of(pieces, halves, lines, grid)
    if has_scales:
        sums = promoted_sums(
            sums, x_strips, x, descriptors, buffers, arrived, row_scales, weight_scales,
            of_blocks, rows, n, scale_stride, first, first_row, begin, lines, grid, chunks,
            chunk_bytes, pieces, ring, halves, blocks, scale_rows, one_block,
        )  # fmt: skip
    else:
        slot = first * 0
        phase = first * 0
        free = first * 0  # the place of the chunk before
        for number in range(chunks):
            mbarrier.wait(arrived.index(slot), phase)
            for each in gl.static_range(strips):
                place = slot * strips + each
                values = x.index(place)._reinterpret(dtype, [lines, strip_inputs], in_memory)
                running = ()
                for i in gl.static_range(products):
                    weight = buffers[i].index(place).permute((1, 0))
                    running = running + (warpgroup_mma(values, weight, sums[i], is_async=True),)
                sums = running
            # The products of the chunk before are done: its place is free.
            if products == 1:
                sums = (warpgroup_mma_wait(running_groups, deps=sums),)
            else:
                sums = warpgroup_mma_wait(running_groups, deps=sums)
            if ring < chunks:
                strip = begin + (number - 1 + ring) * strips
                wanted = (number > 0) & (number - 1 + ring < chunks)
                mbarrier.expect(arrived.index(free), chunk_bytes, pred=wanted)
                ask_weights(descriptors, buffers, arrived, free, first, strip, wanted, pieces)
                ask(x_strips, x, arrived, free, [strip, 0, 0], wanted)
                free = slot
            slot = gl.where(slot + 1 == ring, 0, slot + 1)
            phase = gl.where(slot == 0, 1 - phase, phase)
        if products == 1:
            sums = (warpgroup_mma_wait(0, deps=sums),)
        else:
            sums = warpgroup_mma_wait(0, deps=sums)
    for piece in gl.static_range(products):
        line = gl.arange(0, lines, layout=side_of_sums(grid, pieces[piece], 1, "rows"))
        line = over_outputs(line, grid)
        row = line + first_row
        place = gl.arange(0, pieces[piece], layout=side_of_sums(grid, pieces[piece], 1, "outputs"))
        place = over_rows(place, grid) + (first + start_of(pieces, piece))
        y = sums[piece]
        if has_scales and scale_rows == 0:
            y = y * over_rows(of_outputs[piece], grid)
        if gated:
            y, up = split_halves(y, lines, pieces[piece], grid)
        if has_bias:
            y = y + gl.load(bias + place, mask=place < n, other=0.0).to(gl.float32)
        if rounds and (gated or squared):
            y = round_to(y, out.dtype.element_ty)
            if gated:
                y = gated_by(y, round_to(up, out.dtype.element_ty))
            else:
                y = squared_relu_of(y)
        elif gated:
            y = y / (1.0 + gl.exp(-y)) * up
        elif squared:
            y = gl.maximum(y, 0.0)
            y = y * y
        if rounded_scales is not None:
            y = round_to(y, like.dtype.element_ty)
            y, scale = round_outputs(y, input_scale, grid, pieces[piece])
            line_of = gl.arange(0, lines, layout=side_of_sums(grid, pieces[piece], 1, "rows"))
            row_of = line_of + first_row
            gl.store(
                rounded_scales + first // 128 * rounded_stride + row_of,
                scale,
                mask=(line_of < block_m) & (row_of < rows),
            )
        exists = (line < block_m) & (row < rows) & (place < n)
        gl.store(out + (part * rows + row) * n + place, y.to(out.dtype.element_ty), mask=exists)


STREAMED = ProductKernel(
    "streamed",
    streamed_plan,
    lambda *_: {"activation"},
    streamed_product,
    IN_ORDER,
)
