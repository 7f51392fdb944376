"""Rows of float32 as integers of 8 or 16 bits, each group of inputs with scales of its own.

A row is, for each `GROUP` of inputs, its integers, of 16 bits all first bytes before all second
ones, and five float32: the scales of its halves, which are equal where integers have 16 bits, and
what weights' offsets are multiplied by: the sum of its inputs as rounded, and those of its halves.
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
from megatron_async.ops.linear.cpu.group_form import GROUP, ROW_FLOATS
from megatron_async.ops.linear.cpu.group_tile import FINE, INPUT_GROUP
from megatron_async.ops.linear.cpu.integer_products import LARGEST_FINITE, MAGNITUDE

LARGEST = 127.0
"""The largest input as an integer of 8 bits."""
LARGEST_FINE = 127.0 * FINE + 127
"""And of 16 bits, which are two bytes from -128 to 127, both with a sign."""
LEAST = 2.0**-100
"""What the largest input of a group of zeros counts as."""


@register_jitable
def row_bytes(k: Any, is_fine: Any) -> Any:
    """Bytes of a row of k inputs, a multiple of `GROUP`."""
    return k // GROUP * (GROUP * (2 if is_fine else 1) + 4 * ROW_FLOATS)


class _Rounding(Writer):
    """Writes the rounding of some inputs."""

    def __init__(self, builder: Any, inputs: int, largest: float) -> None:
        super().__init__(builder)
        self._inputs, self._largest = inputs, largest
        self._reals, self._words = ir.VectorType(REAL, inputs), ir.VectorType(WORD, inputs)

    def write(self, source: Any) -> tuple[Any, Any]:
        """Integers of 32 bits of the inputs at an address, and their scale: NaN if one is not
        finite."""
        builder, count = self.builder, self._inputs
        given = self.load(self._reals, source, align=4)
        # Without their signs numbers are ordered as their bits are as integers, and what is not
        # finite stands above all that is.
        magnitudes = ir.Constant(self._words, [int(MAGNITUDE)] * count)
        sizes = builder.and_(builder.bitcast(given, self._words), magnitudes)
        most = self.call(f"vector.reduce.smax.v{count}i32", WORD, sizes)
        is_finite = builder.icmp_signed("<=", most, ir.Constant(WORD, int(LARGEST_FINITE)))
        least = ir.Constant(REAL, LEAST)
        most = builder.bitcast(most, REAL)
        most = builder.select(builder.fcmp_ordered(">", most, least), most, least)
        largest = ir.Constant(REAL, self._largest)
        factor = builder.fdiv(largest, most)
        factor = builder.select(is_finite, factor, ir.Constant(REAL, 0.0))
        scaled = builder.fmul(given, self.everywhere(factor, self._reals))
        # Zero times what is not finite is NaN, which is no integer.
        kept = builder.select(is_finite, scaled, ir.Constant(self._reals, None))
        rounded = self.call(f"rint.v{count}f32", self._reals, kept)
        scale = builder.select(
            is_finite, builder.fdiv(most, largest), ir.Constant(REAL, float("nan"))
        )
        return builder.fptosi(rounded, self._words), scale

    def total(self, integers: Any, scale: Any, first: int, count: int) -> Any:
        """The sum of some of the inputs as rounded, float32."""
        places = ir.Constant(ir.VectorType(WORD, count), list(range(first, first + count)))
        some = self.builder.shuffle_vector(integers, integers, places)
        added = self.call(f"vector.reduce.add.v{count}i32", WORD, some)
        return self.builder.fmul(self.builder.sitofp(added, REAL), scale)

    def put(self, integers: Any, address: Any, offset: int = 0) -> None:
        """Integers as bytes to an address."""
        short = self.builder.trunc(integers, ir.VectorType(BYTE, self._inputs))
        place = self.builder.add(address, ir.Constant(address.type, offset))
        self.store(short, place, align=1)


@intrinsic
def _round_half(typingctx: Any, source: Any, target: Any, scale: Any) -> Any:
    """Round half a group to 8 bits, by addresses; gives the sum of its inputs as rounded."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        writer, (source, target, scale_at) = _Rounding(builder, INPUT_GROUP, LARGEST), args
        integers, scale = writer.write(source)
        writer.put(integers, target)
        writer.store(scale, scale_at)
        return writer.total(integers, scale, 0, INPUT_GROUP)

    return types.float32(types.int64, types.int64, types.int64), codegen


@intrinsic
def _round_fine(typingctx: Any, source: Any, target: Any) -> Any:
    """Round a group to 16 bits, by addresses, with the numbers behind it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        writer, (source, target) = _Rounding(builder, GROUP, LARGEST_FINE), args
        integers, scale = writer.write(source)

        def all_of(number: int) -> Any:
            return ir.Constant(integers.type, [number] * GROUP)

        first = builder.ashr(builder.add(integers, all_of(FINE // 2)), all_of(8))
        writer.put(first, target)
        writer.put(builder.sub(integers, builder.shl(first, all_of(8))), target, GROUP)
        numbers = [
            scale, scale, writer.total(integers, scale, 0, GROUP),
            *(writer.total(integers, scale, at, INPUT_GROUP) for at in (0, INPUT_GROUP)),
        ]  # fmt: skip
        for number, value in enumerate(numbers):
            place = builder.add(target, ir.Constant(target.type, 2 * GROUP + 4 * number))
            writer.store(value, place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@njit(nogil=True, cache=True, error_model="numpy")
def round_groups(
    x: Any, rows: Any, k: Any, is_fine: Any, target: Any
) -> None:  # pragma: no cover - compiled
    """Round rows for the tiles of `group_tile.py`. Addresses: x, float32 `[rows, k]`, k a multiple
    of `GROUP`; target, `[rows, row_bytes(k, is_fine)]` bytes, written."""
    source, place = x, target
    for _ in range(rows * (k // GROUP)):
        if is_fine:
            _round_fine(source, place)
            place += 2 * GROUP + 4 * ROW_FLOATS
        else:
            numbers = place + GROUP
            first = _round_half(source, place, numbers)
            second = _round_half(source + 4 * INPUT_GROUP, place + INPUT_GROUP, numbers + 4)
            sums = carray(floats(numbers + 8), (3,))
            sums[0], sums[1], sums[2] = first + second, first, second
            place = numbers + 4 * ROW_FLOATS
        source += 4 * GROUP
