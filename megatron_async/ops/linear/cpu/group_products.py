"""Rows of 8 or 16 bits by weights of 4 or 8 bits, both with scales for few inputs each.

Weights of GGUF files have a scale for each 32 or 16 inputs of an output, and an offset, or a number
that stands for zero, which makes an offset too. Kept so they are exact. llama.cpp multiplies such
weights by rows of 8 bits, in groups of 32. Here rows of 8 bits have groups of 16, and rows of 16
bits are two rows of 8.

A block has as many outputs as a register has lanes. It lies in memory as it is read: for each group
its weights, then scales, then offsets. Of 4 bits, weights of the first 16 inputs are in the low
halves of bytes and the others in the high ones. Imported only where loops are compiled.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import types
from numba.extending import intrinsic

from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.cpu.pointers import address_of
from megatron_async.ops.cpu.row_kernels import LINE
from megatron_async.ops.linear.cpu.group_form import FORMS, GROUP, GroupForm
from megatron_async.ops.linear.cpu.group_tile import GroupTileWriter, TileKind, kind_of_host
from megatron_async.ops.linear.cpu.integer_products import AHEAD
from megatron_async.ops.linear.cpu.integer_products import GROUP as ROWS_OF_BLOCK

KIND = kind_of_host()
LANES = KIND.lanes
MOST_ROWS = 4
"""Rows of the largest tile."""
GROUP_BYTES = tuple(KIND.group_bytes(form) for form in FORMS)
ROW_GROUP_BYTES = tuple(form.row_group_bytes for form in FORMS)
"""Bytes of a group in a block, and in a row, of each form."""


def tile(rows: int, kind: TileKind) -> Any:
    """Products of a tile, as an intrinsic of addresses and sizes, and the number of a form: see
    `GroupTileWriter.write`."""

    @intrinsic(prefer_literal=True)
    def products(
        typingctx: Any, x: Any, stride: Any, k: Any, weight: Any, out: Any, columns: Any,
        ahead: Any, pace: Any, form: Any,
    ) -> Any:  # fmt: skip
        chosen = FORMS[form.literal_value]

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            GroupTileWriter(builder, rows, kind, chosen).write(*args[:-1])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8, form), codegen

    return products


_one, _two, _four = (tile(rows, KIND) for rows in (1, 2, MOST_ROWS))


@njit(nogil=True, cache=True, error_model="numpy")
def multiply_groups(
    x: Any, rows: Any, k: Any, weight: Any, blocks: Any, out: Any, first: Any, last: Any, form: Any
) -> None:  # pragma: no cover - compiled
    """Multiply all rows of x by blocks `first` to `last` - 1 of a weight. Addresses: x, as
    `round_groups` makes it; the weight, `[blocks, k / GROUP, bytes of a group]`; out, float32
    `[rows, LANES blocks]`, written. The form is a literal, its place in `FORMS`."""
    groups, columns = k // GROUP, LANES * blocks
    stride, of_block = groups * ROW_GROUP_BYTES[form], groups * GROUP_BYTES[form]
    for begin in range(0, rows, ROWS_OF_BLOCK):
        end = min(begin + ROWS_OF_BLOCK, rows)
        left = (end - begin) % MOST_ROWS
        tiles = (end - begin) // MOST_ROWS + (left + 1) // 2
        pace = LINE // tiles
        for block in range(first, last):
            place, row = weight + block * of_block, begin
            ahead = place + AHEAD
            while row < end:
                source, target = x + row * stride, out + 4 * (row * columns + block * LANES)
                if end - row >= MOST_ROWS:
                    _four(source, stride, k, place, target, columns, ahead, pace, form)
                    row += MOST_ROWS
                elif end - row >= 2:
                    _two(source, stride, k, place, target, columns, ahead, pace, form)
                    row += 2
                else:
                    _one(source, stride, k, place, target, columns, ahead, pace, form)
                    row += 1
                ahead += of_block // LINE * pace


@cache
def loop_of(form: GroupForm) -> int:
    """The address of `multiply_groups` for a form; it is compiled, or read from where it is kept:
    few models have weights of all forms."""
    return address_of(multiply_groups, *[types.int64] * 8, types.literal(FORMS.index(form)))
