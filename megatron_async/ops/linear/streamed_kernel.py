"""Product of few rows, chosen for 9 to 128, whose weights arrive without a pause.

`tile_kernel` gives each program a tile of 16, 32 or 64 outputs. With SwiGLU, 14,336 outputs are 224
tiles: 92 of 132 processors have two of them and 40 have one, so few processors read the last
weights. Its loop begins behind the wait, and in each turn all threads ask for copies.

Here as many programs as run at once take tiles in turn from one list. A tile may be as high as any
sum of powers of two: 112 outputs of 14,336, or 48 of 6,144, are one tile for each of 128 programs.
The copy engine brings chunks of weights and rows to a ring in shared memory. The ring's first
weights are asked for before the wait. As soon as a chunk's products are done, its place is asked
for again; where a tile has no more chunks, for the first ones of the next tile, so memory stays
busy while a result is stored.

Gate and up of a tile's outputs lie behind each other in shared memory and are multiplied as one
weight: the matrix units read the rows once for both. More rows than a block have tiles for each
block, which follow each other in the list and so find the weights in the second cache.

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
from megatron_async.ops.linear.qkv_places import split_pairs
from megatron_async.ops.linear.skinny_plan import may_be_copied
from megatron_async.ops.linear.streamed_plan import STRIP, StreamedPlan
from megatron_async.ops.linear.warpgroup_kernel import IN_SHARED_MEMORY

STRIPS_IN_SHARED_MEMORY = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
"""`IN_SHARED_MEMORY` of several strips, one behind the other."""
HALVES_OF_STRIPS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
"""`IN_SHARED_MEMORY` of several strips, of which each has lines of the gate, then those of up."""
MOST_PIECES = 3
"""Powers of two that a tile's outputs may be the sum of: each has a descriptor of its own."""


@gluon.constexpr_function
def _start(pieces: Any, piece: int) -> int:
    return sum(pieces[:piece])


@gluon.constexpr_function
def _warps(block_m: int) -> int:
    """A warp multiplies 16 rows, and a warpgroup has four warps."""
    return max(4, block_m // 16)


@gluon.constexpr_function
def _layout(warps: int, columns: int) -> Any:
    """Layout of sums, `[rows, columns]`."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.constexpr_function
def _side(warps: int, columns: int, dim: int) -> Any:
    return gl.SliceLayout(dim, _layout(warps, columns))


@gluon.jit
def _ask(
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
def _ask_weights(
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
        source = [strip, 0, first + _start(pieces, i), 0]
        _ask(descriptors[i], buffers[i], arrived, slot, source, wanted)


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
    blocks: gl.tensor,
    programs: gl.tensor,
    chunks: gl.constexpr,
    splits: gl.constexpr,
    pieces: gl.constexpr,
    ring: gl.constexpr,
    gated: gl.constexpr,
    squared: gl.constexpr,
    has_bias: gl.constexpr,
    overlap: gl.constexpr,
) -> None:
    """Tiles `program_id`, `program_id + programs` and so on of `items`: item `(i * splits + s) *
    blocks + b` is block b of the rows by share s, of `chunks` chunks, of the i-th outputs' inputs.
    """
    if overlap:
        gdc_launch_dependents()
    dtype: gl.constexpr = x_strips.dtype
    strips: gl.constexpr = x_strips.block_shape[0]
    block_m: gl.constexpr = x_strips.block_shape[1]
    warps: gl.constexpr = _warps(block_m)
    halves: gl.constexpr = 2 if gated else 1
    height: gl.constexpr = _start(pieces, len(pieces))
    products: gl.constexpr = len(pieces)
    chunk_bytes: gl.constexpr = (block_m + height * halves) * strips * 128
    descriptors = (weights_0, weights_1, weights_2)
    # A warpgroup reads 64 rows. Those of the strips behind give sums that nobody stores.
    lines: gl.constexpr = max(64, block_m)
    behind: gl.constexpr = lines // block_m - 1
    x = gl.allocate_shared_memory(dtype, [ring * strips + behind, block_m, 64], IN_SHARED_MEMORY)
    buffers = ()
    for i in gl.static_range(products):
        buffer = gl.allocate_shared_memory(
            dtype, [ring * strips, halves * pieces[i], 64], IN_SHARED_MEMORY
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
        share = ask_item // blocks
        strip = (share % splits * chunks + ask_part) * strips
        first = share // splits * height
        _ask_weights(descriptors, buffers, arrived, i, first, strip, i < total, pieces)
        ask_item, ask_part = _following(ask_item, ask_part, programs, chunks)
    if overlap:
        gdc_wait()
    ask_item = item
    ask_part = item * 0
    for i in gl.static_range(ring):
        strip = (ask_item // blocks % splits * chunks + ask_part) * strips
        _ask(x_strips, x, arrived, i, [strip, ask_item % blocks * block_m, 0], i < total)
        ask_item, ask_part = _following(ask_item, ask_part, programs, chunks)
    slot = item * 0
    phase = item * 0
    free = item * 0  # the place of the chunk before
    number = item * 0
    for _ in range(turns):
        sums = ()
        for i in gl.static_range(products):
            zeros = gl.full(
                [lines, halves * pieces[i]], 0.0, gl.float32, _layout(warps, halves * pieces[i])
            )
            sums = sums + (zeros,)
        for _part in range(chunks):
            mbarrier.wait(arrived.index(slot), phase)
            for each in gl.static_range(strips):
                place = slot * strips + each
                values = x.index(place)._reinterpret(dtype, [lines, 64], IN_SHARED_MEMORY)
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
            share = ask_item // blocks
            strip = (share % splits * chunks + ask_part) * strips
            first = share // splits * height
            mbarrier.expect(arrived.index(free), chunk_bytes, pred=wanted)
            _ask_weights(descriptors, buffers, arrived, free, first, strip, wanted, pieces)
            _ask(x_strips, x, arrived, free, [strip, ask_item % blocks * block_m, 0], wanted)
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
        share = item // blocks
        outputs = share // splits * height
        first_row = item % blocks * block_m
        line = share % splits * rows
        for piece in gl.static_range(products):
            row = gl.arange(0, lines, layout=_side(warps, pieces[piece], 1))[:, None]
            place = gl.arange(0, pieces[piece], layout=_side(warps, pieces[piece], 0))[None, :]
            place += outputs + _start(pieces, piece)
            y = sums[piece]
            if gated:
                y, up = split_pairs(y, lines, pieces[piece], _layout(warps, pieces[piece]))
            if has_bias:
                y = y + gl.load(bias + place, mask=place < n, other=0.0).to(gl.float32)
            if gated:
                y = y / (1.0 + gl.exp(-y)) * up
            elif squared:
                y = gl.maximum(y, 0.0)
                y = y * y
            exists = (row < block_m) & (first_row + row < rows) & (place < n)
            target = out + (line + first_row + row) * n + place
            # An output of the next tile, if there is one, is that tile's own.
            gl.store(target, y.to(out.dtype.element_ty), mask=exists)
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
        ValueError: shapes, dtypes, strides or alignment do not fit; inputs that are not whole
            strips; a plan that splits what cannot be added up later, or whose pieces or ring do not
            fit.
    """
    n = outputs_of(x, weight, bias, activation)
    rows, k = x.shape
    if x.itemsize != 2:
        raise ValueError(f"streamed_product: x is {x.dtype}; the plan is for 16-bit numbers.")
    if not may_be_copied(x) or not may_be_copied(weight):
        raise ValueError(
            "streamed_product: rows of x and weight must begin at multiples of 16 bytes; found "
            f"strides {x.stride()} and {weight.stride()}."
        )
    if k % STRIP:
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
    blocks = triton.cdiv(rows, plan.block_m)
    items = triton.cdiv(n, sum(plan.pieces)) * plan.splits * blocks
    programs = min(plan.programs, items)
    pieces = plan.pieces + plan.pieces[-1:] * (MOST_PIECES - len(plan.pieces))
    gated = activation == "swiglu"
    streamed_kernel[(programs,)](
        rows_of(x, plan),
        *(weights_of(weight, piece, gated, plan) for piece in pieces),
        weight if bias is None else bias,
        out,
        rows,
        n,
        items,
        blocks,
        programs,
        chunks=chunks_per_share(k, plan),
        splits=plan.splits,
        pieces=plan.pieces,
        ring=plan.ring,
        gated=gated,
        squared=activation == "squared_relu",
        has_bias=bias is not None,
        num_warps=_warps(plan.block_m),
        **launch_options(x),
    )
    return out


def rows_of(x: Tensor, plan: StreamedPlan) -> TensorDescriptor:
    """What the copy engine must know of x, `[rows, k]`, of which it brings a block of rows of all
    strips of a chunk at a time; zeros for what is outside."""
    strips = x.unflatten(1, (-1, STRIP)).transpose(0, 1)
    block = [plan.strips, plan.block_m, STRIP]
    return TensorDescriptor.from_tensor(strips, block, STRIPS_IN_SHARED_MEMORY)


def weights_of(weight: Tensor, piece: int, gated: bool, plan: StreamedPlan) -> TensorDescriptor:
    """What it must know of a weight `[outputs, k]`, or `[2 * outputs, k]` of gate and up, of which
    it brings `piece` outputs."""
    halves = 2 if gated else 1
    strips = weight.view(halves, -1, weight.size(1) // STRIP, STRIP).permute(2, 0, 1, 3)
    block = [plan.strips, halves, piece, STRIP]
    return TensorDescriptor.from_tensor(strips, block, HALVES_OF_STRIPS)


def chunks_per_share(k: int, plan: StreamedPlan) -> int:
    """Chunks of each of a plan's shares of `k` inputs; the last ones of the last share may lie
    beyond the inputs, and are zeros."""
    return triton.cdiv(triton.cdiv(k, STRIP * plan.strips), plan.splits)
