"""Rows of float32 as 8-bit integers, each group of inputs with a scale of its own.

A row is 8 bits for each input, then a float32 scale for each `INPUT_GROUP`, then, for each `GROUP`
of weights, a float32 that the weights' offset is multiplied by: the sum of its inputs as rounded.
Imported only where loops are compiled.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic, register_jitable

from megatron_async.ops.cpu.instructions import BYTE, REAL, WORD, Writer
from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.cpu.row_kernels import floats
from megatron_async.ops.linear.cpu.group_tile import GROUP, INPUT_GROUP
from megatron_async.ops.linear.cpu.integer_products import LARGEST_FINITE, MAGNITUDE

LARGEST = 127.0
"""The largest input as an integer."""
LEAST = 2.0**-100
"""What the largest input of a group of zeros counts as."""


@register_jitable
def row_bytes(k: Any) -> Any:
    """Bytes of a row of k inputs, a multiple of `GROUP`."""
    return k + k // INPUT_GROUP * 4 + k // GROUP * 4


@intrinsic
def _round_group(typingctx: Any, source: Any, target: Any, scale: Any) -> Any:
    """Round an input group, by addresses: float32 to int8, and the group's scale. Gives the sum of
    the inputs as rounded, float32: NaN, as the scale is, if one is not finite."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        reals, words, integers = (ir.VectorType(t, INPUT_GROUP) for t in (REAL, WORD, BYTE))
        writer, (source, target, scale_at) = Writer(builder), args
        given = writer.load(reals, source, align=4)
        # Without their signs numbers are ordered as their bits are as integers, and what is not
        # finite stands above all that is.
        sizes = builder.and_(
            builder.bitcast(given, words), ir.Constant(words, [int(MAGNITUDE)] * INPUT_GROUP)
        )
        suffix = f"v{INPUT_GROUP}"
        largest = writer.call(f"vector.reduce.smax.{suffix}i32", WORD, sizes)
        is_finite = builder.icmp_signed("<=", largest, ir.Constant(WORD, int(LARGEST_FINITE)))
        least = ir.Constant(REAL, LEAST)
        most = builder.bitcast(largest, REAL)
        most = builder.select(builder.fcmp_ordered(">", most, least), most, least)
        factor = builder.fdiv(ir.Constant(REAL, LARGEST), most)
        factor = builder.select(is_finite, factor, ir.Constant(REAL, 0.0))
        scaled = builder.fmul(given, writer.everywhere(factor, reals))
        # Zero times what is not finite is NaN, which is no integer.
        kept = builder.select(is_finite, scaled, ir.Constant(reals, None))
        rounded = writer.call(f"rint.{suffix}f32", reals, kept)
        rounded = builder.fptosi(rounded, words)
        writer.store(builder.trunc(rounded, integers), target, align=1)
        scale = builder.fdiv(most, ir.Constant(REAL, LARGEST))
        scale = builder.select(is_finite, scale, ir.Constant(REAL, float("nan")))
        writer.store(scale, scale_at)
        total = writer.call(f"vector.reduce.add.{suffix}i32", WORD, rounded)
        return builder.fmul(builder.sitofp(total, REAL), scale)

    return types.float32(types.int64, types.int64, types.int64), codegen


@njit(nogil=True, cache=True, error_model="numpy")
def round_groups(x: Any, rows: Any, k: Any, target: Any) -> None:  # pragma: no cover - compiled
    """Round rows for the tiles of `group_tile.py`. Addresses: x, float32 `[rows, k]`, k a multiple
    of `GROUP`; target, `[rows, row_bytes(k)]` bytes, written."""
    for row in range(rows):
        source, place = x + 4 * row * k, target + row * row_bytes(k)
        scales = place + k
        sums = carray(floats(scales + k // INPUT_GROUP * 4), (k // GROUP,))
        for group in range(k // GROUP):
            first, at = GROUP * group, scales + 8 * group
            total = _round_group(source + 4 * first, place + first, at)
            second = first + INPUT_GROUP
            total += _round_group(source + 4 * second, place + second, at + 4)
            sums[group] = total
