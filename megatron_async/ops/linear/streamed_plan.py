"""Which products are `streamed_kernel`'s, and its layout for each."""

from __future__ import annotations

from dataclasses import dataclass

import triton

STREAMED_ROWS = 128
"""Most rows of such a product: what two warpgroups multiply at once."""
ONE_WARPGROUP = 64
"""Rows up to which nearly all products gain; beyond, SwiGLU and long rows alone."""
FEW_ROWS = 16
"""Fewest rows that are brought."""
STREAMED_FROM = 9
"""Fewest rows of such a product: fewer were not measured."""
STREAMED_INPUTS = 4096
"""Fewest inputs: shorter products were not measured."""
STRIP = 64
"""Inputs of a line in shared memory: 128 bytes, what the matrix units' pattern of lines repeats."""
STRIPS = 2
"""Strips of a chunk. Chunks of one strip need more copies, and lost at 64 rows. Beyond, two strips
leave too few chunks of ring."""
LEAST_PROGRAMS, PROCESSORS = 120, 132
"""An H100 or H200 has 132 processors, which run a program each: nearly all must have one."""
SHARED_MEMORY, MORE_SHARED_MEMORY = 216 << 10, 226 << 10
"""Bytes for the ring, of 227 KiB that a program may have: three chunks of 64 rows and 112 gated
outputs; beyond 64 rows five smaller ones. A longer ring for 64 rows made their step 0.6 % longer.
"""
SPLIT_OUTPUTS = 64
"""Outputs of a tile whose inputs are split in two."""
LONG_INPUTS, LONG_OUTPUTS, LONG_SPLITS = 8192, 128, 4
"""Fewest inputs of a long row, and outputs and shares of its tiles, beyond 64 rows."""
LEAST_OUTPUTS, MOST_OUTPUTS, MOST_GATED_OUTPUTS = 40, 64, 112
"""Outputs of a tile that is not split. Higher ones would leave less than three chunks of ring, and
lower ones read the rows too often."""


@dataclass(frozen=True)
class StreamedPlan:
    """Layout of `streamed_kernel`: a tile is `sum(pieces)` outputs of a block of rows over one of
    `splits` shares of the inputs, and `programs` programs take tiles in turn."""

    pieces: tuple[int, ...]
    """Outputs of each part of a tile that is multiplied at once: powers of two from 8 on, at most
    three of them."""
    splits: int
    strips: int
    """Strips of 64 inputs that a chunk has: what is brought, and waited for, at a time."""
    ring: int
    """Chunks that are in shared memory, or asked for, at a time; at least 2."""
    programs: int
    block_m: int
    """Rows that are brought: 16, 32, 64 or 128; of more rows each block has tiles of its own."""


def streamed_plan(
    rows: int, outputs: int, k: int, itemsize: int, gated: bool, may_split: bool
) -> StreamedPlan | None:
    """The layout of a product whose tiles all run at once; None: another kernel's.

    Measured: steps of Llama-3.1-8B's shape at 16, 32 and 64 rows and of Nemotron-H-8B's at 16 and
    64, 0.6 to 4 % shorter (docs/records/products.md, 2026-11-25); layers of the former at 96 and
    128 rows, 5 to 7 % (2026-11-27). Other lengths were not measured.
    """
    if not STREAMED_FROM <= rows <= STREAMED_ROWS or itemsize != 2:
        return None
    if k < STREAMED_INPUTS or k % (STRIPS * STRIP):
        return None
    block_m = max(FEW_ROWS, triton.next_power_of_2(rows))
    is_wide = rows > ONE_WARPGROUP
    if may_split:
        if not is_wide:
            return _layout((SPLIT_OUTPUTS,), 2, outputs, gated, block_m)
        if k >= LONG_INPUTS:
            return _layout((LONG_OUTPUTS,), LONG_SPLITS, outputs, gated, block_m)
        return None
    height = -(-outputs // (8 * PROCESSORS)) * 8
    if not LEAST_OUTPUTS <= height <= (MOST_GATED_OUTPUTS if gated else MOST_OUTPUTS):
        return None
    if is_wide and not gated:
        return None
    pieces = tuple(1 << bit for bit in range(7, 2, -1) if height >> bit & 1)
    return _layout(pieces, 1, outputs, gated, block_m)


def _layout(
    pieces: tuple[int, ...], splits: int, outputs: int, gated: bool, block_m: int
) -> StreamedPlan | None:
    """None: its programs would not be about as many as run at once."""
    height = sum(pieces)
    programs = -(-outputs // height) * splits
    if not LEAST_PROGRAMS <= programs <= PROCESSORS:
        return None
    strips = STRIPS if block_m <= ONE_WARPGROUP else 1
    chunk_bytes = (block_m + height * (2 if gated else 1)) * strips * STRIP * 2
    room = SHARED_MEMORY if block_m <= ONE_WARPGROUP else MORE_SHARED_MEMORY
    return StreamedPlan(pieces, splits, strips, room // chunk_bytes, programs, block_m)
