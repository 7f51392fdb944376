"""Product of up to 64 rows whose weights arrive without a pause.

`tile_kernel` gives each program a tile of 16, 32 or 64 outputs. With SwiGLU, 14,336 outputs are 224
tiles: 92 of 132 processors have two of them and 40 have one, so few processors read the last
weights. Its loop begins behind the wait, and in each turn all threads ask for copies.

Here as many programs as run at once take tiles in turn from one list. A tile may be as high as any
sum of powers of two: 112 outputs of 14,336, or 48 of 6,144, are one tile for each of 128 programs.
The copy engine brings chunks of weights and rows to a ring in shared memory. The ring's first
weights are asked for before the wait. As soon as a chunk's products are done, its place is asked
for again; where a tile has no more chunks, for the first ones of the next tile, so memory stays
busy while a result is stored.

Products that are split along their inputs give partial sums, as `tile_kernel` does. Each is one
tile's. Nothing is added up across programs, so results are the same in every run.

Written in Gluon, the form of Triton in which a program states the place of each element.
"""
# Gluon knows tuples and constants, but not `*` in a tuple; mypy does not know that a loop over
# constants is unrolled.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated, unreachable"

from __future__ import annotations

from typing import Any

import torch
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
from megatron_async.ops.linear.planned_products import Activation, outputs_of
from megatron_async.ops.linear.skinny_plan import may_be_copied
from megatron_async.ops.linear.streamed_plan import STRIP, StreamedPlan
from megatron_async.ops.linear.warpgroup_kernel import IN_SHARED_MEMORY, chunks_of

STRIPS_IN_SHARED_MEMORY = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
"""`IN_SHARED_MEMORY` of several strips, one behind the other."""
MOST_PIECES = 3
"""Powers of two that a tile's outputs may be the sum of: each has a descriptor of its own."""


@gluon.constexpr_function
def _start(pieces: Any, piece: int) -> int:
    return sum(pieces[:piece])


@gluon.constexpr_function
def _layout(pieces: Any, piece: int) -> Any:
    """Layout of a piece's sums, `[rows, outputs]`."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pieces[piece], 16])


@gluon.constexpr_function
def _side(pieces: Any, piece: int, dim: int) -> Any:
    return gl.SliceLayout(dim, _layout(pieces, piece))


@gluon.jit
def _ask_strips(
    descriptor: tma.tensor_descriptor,
    buffer: gl.tensor,
    arrived: gl.tensor,
    slot: gl.tensor,
    line: gl.tensor,
    column: gl.tensor,
    wanted: gl.tensor,
    strips: gl.constexpr,
) -> None:
    """Ask for one chunk of a matrix's lines, from `line` and input `column` on."""
    if len(descriptor.block_shape) == 3:
        shape: gl.constexpr = descriptor.block_shape
        place = buffer.index(slot * strips)._reinterpret(descriptor.dtype, shape, descriptor.layout)
        tma.async_copy_global_to_shared(
            descriptor, [column // 64, line, 0], arrived.index(slot), place, pred=wanted
        )
    else:
        for strip in gl.static_range(strips):
            tma.async_copy_global_to_shared(
                descriptor,
                [line, column + strip * 64],
                arrived.index(slot),
                buffer.index(slot * strips + strip),
                pred=wanted,
            )


@gluon.jit
def _ask(
    descriptors: gl.tuple,
    buffers: gl.tuple,
    arrived: gl.tensor,
    slot: gl.tensor,
    first: gl.tensor,
    column: gl.tensor,
    n: gl.tensor,
    wanted: gl.tensor,
    pieces: gl.constexpr,
    strips: gl.constexpr,
    gated: gl.constexpr,
) -> None:
    """Ask for one chunk of a tile's weights, from input `column` and output `first` on."""
    for piece in gl.static_range(len(pieces)):
        for half in gl.static_range(2 if gated else 1):
            buffer = buffers[piece * (2 if gated else 1) + half]
            line = first + _start(pieces, piece) + half * n
            _ask_strips(descriptors[piece], buffer, arrived, slot, line, column, wanted, strips)


@gluon.jit
def _following(
    item: gl.tensor, part: gl.tensor, programs: gl.tensor, chunks: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """The chunk behind chunk `part` of tile `item` in a program's list."""
    is_last = part + 1 == chunks
    return gl.where(is_last, item + programs, item), gl.where(is_last, 0, part + 1)


@gluon.jit
def streamed_kernel(
    x_strips: tma.tensor_descriptor,
    weights_0: tma.tensor_descriptor,
    weights_1: tma.tensor_descriptor,
    weights_2: tma.tensor_descriptor,
    bias: gl.tensor,
    out: gl.tensor,
    rows: gl.tensor,
    n: gl.tensor,
    items: gl.tensor,
    programs: gl.tensor,
    chunks: gl.constexpr,
    splits: gl.constexpr,
    pieces: gl.constexpr,
    strips: gl.constexpr,
    ring: gl.constexpr,
    gated: gl.constexpr,
    squared: gl.constexpr,
    has_bias: gl.constexpr,
    overlap: gl.constexpr,
) -> None:
    """All rows times tiles `program_id`, `program_id + programs` and so on of `items`: item
    `i * splits + s` is share s, of `chunks` chunks, of the i-th outputs' inputs."""
    if overlap:
        gdc_launch_dependents()
    dtype: gl.constexpr = x_strips.dtype
    block_m: gl.constexpr = x_strips.block_shape[-2]
    chunk: gl.constexpr = 64 * strips
    halves: gl.constexpr = 2 if gated else 1
    height: gl.constexpr = _start(pieces, len(pieces))
    products: gl.constexpr = len(pieces) * halves
    chunk_bytes: gl.constexpr = (block_m + height * halves) * chunk * 2
    descriptors = (weights_0, weights_1, weights_2)
    # A warpgroup reads 64 rows. Those of the strips behind give sums that nobody stores.
    behind: gl.constexpr = 64 // block_m - 1
    x = gl.allocate_shared_memory(dtype, [ring * strips + behind, block_m, 64], IN_SHARED_MEMORY)
    buffers = ()
    for i in gl.static_range(products):
        buffer = gl.allocate_shared_memory(
            dtype, [ring * strips, pieces[i // halves], 64], IN_SHARED_MEMORY
        )
        buffers = buffers + (buffer,)
    arrived = gl.allocate_shared_memory(gl.int64, [ring, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(ring):
        mbarrier.init(arrived.index(i), count=1)
    item = gl.program_id(0)
    turns = (items - item + programs - 1) // programs
    total = turns * chunks
    # The chunk that is asked for next: `ask_part` of tile `ask_item`.
    ask_item = item
    ask_part = item * 0
    for i in gl.static_range(ring):
        mbarrier.expect(arrived.index(i), chunk_bytes, pred=i < total)
        first = ask_item // splits * height
        column = (ask_item % splits * chunks + ask_part) * chunk
        _ask(descriptors, buffers, arrived, i, first, column, n, i < total, pieces, strips, gated)
        ask_item, ask_part = _following(ask_item, ask_part, programs, chunks)
    if overlap:
        gdc_wait()
    ask_item = item
    ask_part = item * 0
    for i in gl.static_range(ring):
        column = (ask_item % splits * chunks + ask_part) * chunk
        _ask_strips(x_strips, x, arrived, i, 0, column, i < total, strips)
        ask_item, ask_part = _following(ask_item, ask_part, programs, chunks)
    slot = item * 0
    phase = item * 0
    free = item * 0  # the place of the chunk before
    number = item * 0
    for _ in range(turns):
        sums = ()
        for i in gl.static_range(products):
            zeros = gl.full(
                [64, pieces[i // halves]], 0.0, gl.float32, _layout(pieces, i // halves)
            )
            sums = sums + (zeros,)
        for _part in range(chunks):
            mbarrier.wait(arrived.index(slot), phase)
            for strip in gl.static_range(strips):
                place = slot * strips + strip
                values = x.index(place)._reinterpret(dtype, [64, 64], IN_SHARED_MEMORY)
                running = ()
                for i in gl.static_range(products):
                    weight = buffers[i].index(place).permute((1, 0))
                    running = running + (warpgroup_mma(values, weight, sums[i], is_async=True),)
                sums = running
            # The products of the chunk before are done: its place is free.
            if products == 1:
                sums = (warpgroup_mma_wait(products * strips, deps=sums),)
            else:
                sums = warpgroup_mma_wait(products * strips, deps=sums)
            wanted = (number > 0) & (number - 1 + ring < total)
            first = ask_item // splits * height
            column = (ask_item % splits * chunks + ask_part) * chunk
            mbarrier.expect(arrived.index(free), chunk_bytes, pred=wanted)
            _ask(
                descriptors, buffers, arrived, free, first, column, n, wanted, pieces, strips, gated
            )
            _ask_strips(x_strips, x, arrived, free, 0, column, wanted, strips)
            after_item, after_part = _following(ask_item, ask_part, programs, chunks)
            ask_item = gl.where(number > 0, after_item, ask_item)
            ask_part = gl.where(number > 0, after_part, ask_part)
            number += 1
            free = slot
            slot = gl.where(slot + 1 == ring, 0, slot + 1)
            phase = gl.where(slot == 0, 1 - phase, phase)
        if products == 1:
            sums = (warpgroup_mma_wait(0, deps=sums),)
        else:
            sums = warpgroup_mma_wait(0, deps=sums)
        outputs = item // splits * height
        line = item % splits * rows
        for piece in gl.static_range(len(pieces)):
            row = gl.arange(0, 64, layout=_side(pieces, piece, 1))[:, None]
            place = gl.arange(0, pieces[piece], layout=_side(pieces, piece, 0))[None, :]
            place += outputs + _start(pieces, piece)
            y = sums[piece * halves]
            if has_bias:
                y = y + gl.load(bias + place, mask=place < n, other=0.0).to(gl.float32)
            if gated:
                y = y / (1.0 + gl.exp(-y)) * sums[piece * halves + 1]
            elif squared:
                y = gl.maximum(y, 0.0)
                y = y * y
            target = out + (line + row) * n + place
            # An output of the next tile, if there is one, is that tile's own.
            gl.store(target, y.to(out.dtype.element_ty), mask=(row < rows) & (place < n))
        item += programs


def streamed_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, plan: StreamedPlan
) -> Tensor:
    """`linear`, or with the activation after it, by a given plan; bfloat16 or float16, on a GPU
    with warpgroups (Hopper).

    Args:
        x: `[rows, k]`, rows that begin at multiples of 16 bytes.
        weight: `[outputs, k]`, or [gate; up] `[2 * outputs, k]` of SwiGLU, same dtype.
        bias: `[outputs]` or None.

    Returns:
        `[rows, outputs]`; of a plan that splits partial sums `[splits, rows, outputs]`, float32, to
        be added in order.

    Raises:
        ValueError: shapes, dtypes, strides or alignment do not fit; more rows than the plan's; a
            plan that splits what cannot be added up later, or whose pieces or ring do not fit.
    """
    n = outputs_of(x, weight, bias, activation)
    rows, k = x.shape
    if rows > plan.block_m or x.itemsize != 2:
        raise ValueError(
            f"streamed_product: x is {rows} rows of {x.dtype}; the plan is for at most "
            f"{plan.block_m} of 16-bit numbers."
        )
    if not may_be_copied(x) or not may_be_copied(weight):
        raise ValueError(
            "streamed_product: rows of x and weight must begin at multiples of 16 bytes; found "
            f"strides {x.stride()} and {weight.stride()}."
        )
    if plan.joined and k % STRIP:
        raise ValueError(f"streamed_product: {k} inputs are not whole strips of {STRIP} each.")
    if plan.splits > 1 and (activation or bias is not None):
        raise ValueError("streamed_product: partial sums can have neither bias nor activation.")
    if not 1 <= len(plan.pieces) <= MOST_PIECES or plan.ring < 2:
        raise ValueError(
            f"streamed_product: a tile has 1 to {MOST_PIECES} pieces, and a ring at least 2 "
            f"chunks; found {plan.pieces} and {plan.ring}."
        )
    if plan.splits > 1:
        out = torch.empty((plan.splits, rows, n), dtype=torch.float32, device=x.device)
    else:
        out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    items = triton.cdiv(n, sum(plan.pieces)) * plan.splits
    programs = min(plan.programs, items)
    pieces = plan.pieces + plan.pieces[-1:] * (MOST_PIECES - len(plan.pieces))
    streamed_kernel[(programs,)](
        strips_of(x, plan.block_m, plan),
        *(strips_of(weight, piece, plan) for piece in pieces),
        weight if bias is None else bias,
        out,
        rows,
        n,
        items,
        programs,
        chunks=chunks_per_share(k, plan),
        splits=plan.splits,
        pieces=plan.pieces,
        strips=plan.strips,
        ring=plan.ring,
        gated=activation == "swiglu",
        squared=activation == "squared_relu",
        has_bias=bias is not None,
        num_warps=4,
        **launch_options(x),
    )
    return out


def strips_of(lines: Tensor, block: int, plan: StreamedPlan) -> TensorDescriptor:
    """What the copy engine must know of `[lines, elements]`, of which it brings `block` lines of a
    strip, or of all strips of a chunk; zeros for what is outside."""
    if not plan.joined:
        return chunks_of(lines, block, STRIP)
    strips = lines.unflatten(1, (-1, STRIP)).transpose(0, 1)
    return TensorDescriptor.from_tensor(
        strips, [plan.strips, block, STRIP], STRIPS_IN_SHARED_MEMORY
    )


def chunks_per_share(k: int, plan: StreamedPlan) -> int:
    """Chunks of each of a plan's shares of `k` inputs; the last ones of the last share may lie
    beyond the inputs, and are zeros."""
    return triton.cdiv(triton.cdiv(k, STRIP * plan.strips), plan.splits)
