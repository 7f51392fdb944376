"""Which products are `warpgroup_kernel`'s, and its layout for each.

Up to 64 rows every program takes all of them (docs/records/products.md, 2026-11-24). More rows are
divided into blocks, so that each program brings about as many rows as weights. cuBLAS takes
as long at 16 rows of a narrow model as at 128: what is paid is the start of its kernels.
Measured: layers of SmolLM2 at 96 to 768 rows, of Granite-4.0-H-350M's width at 128 to 512 and of
Qwen3-0.6B at 96 to 256 (docs/records/products.md, 2026-11-26).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

from megatron_async.ops.linear.streamed_plan import PROCESSORS

WARPGROUP_ROWS = 64
"""Rows that a warpgroup multiplies at once."""
WARPGROUP_INPUTS = 1024
"""Most inputs of a program: its weights, and most of its rows, are in shared memory."""
WARPGROUP_LONGEST = 3072
"""Most inputs of a product that is split."""
WARPGROUP_OUTPUTS = 32
"""Outputs of a program, where all programs can run at once."""
WIDE = 16384
"""Outputs from which on a product is a vocabulary's: not this kernel's, and beyond one row cuBLAS's
if weights are short and not resident (`skinny_plan.py`)."""
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


def warpgroup_plan(
    rows: int, outputs: int, k: int, itemsize: int, gated: bool, may_split: bool
) -> WarpgroupPlan | None:
    """The layout of a product of rows that a thread cannot load, whose weights fit the processors;
    None: another kernel's.

    Args:
        rows: from 17 on; fewer, and up to 32 where resident weights fit, are `resident_kernel`'s:
            products after those can include a norm, which partial sums forbid (Granite's step at
            32 rows 1.010 -> 1.088 ms with this kernel).
        outputs: of the product; of each half of the weight if `gated`.
        k: inputs.
        itemsize: bytes of an element.
        gated: SwiGLU follows.
        may_split: the caller can take partial sums.
    """
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
