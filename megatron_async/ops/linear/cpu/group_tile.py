"""The instructions of one tile of `group_products.py`: some rows by a block's outputs.

A lane is an output. An instruction multiplies four inputs of a row, which all lanes get, by each
output's four weights. Where weights are 0 to 15 and inputs -128 to 127, `pmaddubsw`, which adds two
products in 16 bits, leaves room for the sixteen of a group in a lane: 16 x 15 x 128 is less than
32,768. One `pmaddwd` then makes 32 bits of neighbours. VNNI's `vpdpbusd` does both, for weights of
8 bits too; without VNNI these are two weights of 4 bits, of which one counts sixteen times. A row
of 16 bits is two rows of 8 bits, of which one counts 256 times: such sums are 32 x 255 x 32,639 at
most, which 32 bits hold.

The order of a sum is its groups' order, whatever the lanes are: all kinds of tiles give the same
bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

from megatron_async.ops.cpu.instructions import BYTE, LONG, REAL, SHORT, WORD, Writer, constant
from megatron_async.ops.cpu.row_kernels import LINE, write_fetch
from megatron_async.ops.linear.cpu.group_form import GROUP, ROW_FLOATS, GroupForm

INPUT_GROUP = 16
"""Inputs that share a scale of a row of 8 bits. With 32 as many tokens equal float32's as with 16
bits a row, with 16 more do (docs/records/cpu_throughput.md, 2026-11-27)."""
QUARTET = 4
"""Inputs of an instruction."""
QUARTETS = GROUP // QUARTET
FINE = 256
"""How much more the first byte of a row of 16 bits counts than the second."""
HALF = ir.HalfType()


class TileKind(NamedTuple):
    """What a CPU's instructions make of a tile.

    Attributes:
        lanes: of a register: outputs of a block.
        has_vnni: whether four products and their sum are one instruction.
    """

    lanes: int
    has_vnni: bool

    def integer_bytes(self, form: GroupForm) -> int:
        """Bytes of a group's weights in a block."""
        return self.lanes * GROUP * form.bits // 8

    def scale_bytes(self, form: GroupForm) -> int:
        """Bytes of one scale of each output of a block."""
        return self.lanes * (2 if form.is_half else 4)

    def group_bytes(self, form: GroupForm) -> int:
        """Bytes of a group in a block: weights, scales, offsets."""
        return self.lanes * form.bytes_of_group


def kind_of_host() -> TileKind:
    """The fastest kind that this CPU has."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512vnni", False) and features.get("avx512bw", False):
        return TileKind(16, has_vnni=True)
    return TileKind(8, has_vnni=bool(features.get("avxvnni", False)))


class GroupTileWriter(Writer):
    """Writes a tile's instructions, where llvmlite's builder is."""

    def __init__(self, builder: Any, rows: int, kind: TileKind, form: GroupForm) -> None:
        super().__init__(builder)
        self._rows, self._kind, self._form = rows, kind, form
        lanes = kind.lanes
        self._bytes, self._shorts = ir.VectorType(BYTE, 4 * lanes), ir.VectorType(SHORT, 2 * lanes)
        self._words, self._reals = ir.VectorType(WORD, lanes), ir.VectorType(REAL, lanes)

    def write(
        self, x: Any, stride: Any, k: Any, weight: Any, out: Any, columns: Any, ahead: Any,
        pace: Any,
    ) -> None:  # fmt: skip
        """Write the tile: into out, float32 `[rows, lanes]`, its rows by the block's outputs.

        Args:
            x: address of the first row, as `round_groups` makes it; `stride` bytes to the next.
            k: inputs, a multiple of `GROUP`.
            weight, out: addresses; out's rows are `columns` numbers apart.
            ahead: with each group the cache is told to fetch as many addresses as the group has
                lines, from here on, `pace` bytes apart.
        """
        builder, rows, before = self.builder, range(self._rows), self.builder.block
        sources = [builder.add(x, builder.mul(stride, constant(row))) for row in rows]
        groups = builder.udiv(k, constant(GROUP))
        loop, end = (builder.append_basic_block(name) for name in ("groups", "end"))
        builder.branch(loop)

        builder.position_at_end(loop)
        group = builder.phi(LONG)
        group.add_incoming(constant(0), before)
        sums = [builder.phi(self._reals) for _ in rows]
        for total in sums:
            total.add_incoming(ir.Constant(self._reals, None), before)
        lines = -(-self._kind.group_bytes(self._form) // LINE)
        for number in range(lines):
            place = builder.add(builder.mul(group, constant(lines)), constant(number))
            write_fetch(builder, builder.add(ahead, builder.mul(place, pace)))
        added = self._group(group, sources, weight, sums)
        following = builder.add(group, constant(1))
        group.add_incoming(following, loop)
        for total, now in zip(sums, added):
            total.add_incoming(now, loop)
        builder.cbranch(builder.icmp_signed("<", following, groups), loop, end)

        builder.position_at_end(end)
        for row, total in enumerate(added):
            place = builder.add(out, builder.mul(columns, constant(4 * row)))
            self.store(total, place)

    def _group(self, group: Any, sources: list[Any], weight: Any, sums: list[Any]) -> list[Any]:
        """The sums with a group's products."""
        builder, kind, form = self.builder, self._kind, self._form
        place = builder.add(weight, builder.mul(group, constant(kind.group_bytes(form))))
        at = kind.integer_bytes(form)
        numbers = [
            self._scale(place, at + number * kind.scale_bytes(form))
            for number in range(2 * form.scales)
        ]
        scales, offsets = numbers[: form.scales], numbers[form.scales :]
        planes = self._planes(place)
        inputs = builder.mul(group, constant(form.row_group_bytes))
        added = []
        for source, total in zip(sources, sums):
            row = builder.add(source, inputs)
            # Of 8 bits, halves of a group have scales of their own.
            of_halves = form.scales == 2 or not form.is_fine
            count = 2 if of_halves else 1
            parts = [
                self._reals_of(self._products(row, planes, part, count)) for part in range(count)
            ]
            scaled = [
                builder.fmul(part, self._of_row(row, number)) for number, part in enumerate(parts)
            ]
            if form.scales == 1 and count == 2:
                scaled = [self._fma(parts[1], self._of_row(row, 1), scaled[0])]
            for number, part in enumerate(scaled):
                total = self._fma(part, scales[number], total)
                of_sum = self._of_row(row, 2 if form.scales == 1 else 3 + number)
                total = self._fma(offsets[number], of_sum, total)
            added.append(total)
        return added

    def _reals_of(self, words: Any) -> Any:
        return self.builder.sitofp(words, self._reals)

    def _scale(self, place: Any, offset: int) -> Any:
        """A scale of each output, or an offset, as float32."""
        if not self._form.is_half:
            return self.load(self._reals, place, offset)
        halves = self.load(ir.VectorType(HALF, self._kind.lanes), place, offset)
        return self.builder.fpext(halves, self._reals)

    def _of_row(self, row: Any, number: int) -> Any:
        """One of the `ROW_FLOATS` of a row's group, in all lanes."""
        at = self._form.row_group_bytes - 4 * ROW_FLOATS
        return self.everywhere(self.load(REAL, row, at + 4 * number, 4), self._reals)

    def _planes(self, place: Any) -> list[tuple[int, list[Any]]]:
        """A group's weights: how often they count, and a register for each four inputs."""
        size = 4 * self._kind.lanes
        if self._form.bits == 4:
            both = [self.load(self._bytes, place, size * n) for n in range(QUARTETS // 2)]
            return [(1, [self._low(each) for each in both] + [self._high(each) for each in both])]
        whole = [self.load(self._bytes, place, size * number) for number in range(QUARTETS)]
        if self._kind.has_vnni:
            return [(1, whole)]
        return [(1, list(map(self._low, whole))), (16, list(map(self._high, whole)))]

    def _low(self, both: Any) -> Any:
        return self.builder.and_(both, ir.Constant(self._bytes, [15] * self._bytes.count))

    def _high(self, both: Any) -> Any:
        four = ir.Constant(self._shorts, [4] * self._shorts.count)
        shifted = self.builder.lshr(self.builder.bitcast(both, self._shorts), four)
        return self._low(self.builder.bitcast(shifted, self._bytes))

    def _products(
        self, row: Any, planes: list[tuple[int, list[Any]]], part: int, parts: int
    ) -> Any:
        """int32 sums of the products of a part of a group, at the address of a row's group."""
        builder, words, total = self.builder, self._words, None
        quartets = range(QUARTETS * part // parts, QUARTETS * (part + 1) // parts)
        for byte in range(1 + self._form.is_fine):
            counts = FINE if self._form.is_fine and byte == 0 else 1
            fours = []
            for number in quartets:
                given = self.load(WORD, row, GROUP * byte + QUARTET * number, 4)
                fours.append(builder.bitcast(self.everywhere(given, words), self._bytes))
            for times, weights in planes:
                chosen = [weights[number] for number in quartets]
                products = self._dot(chosen, fours, counts * times)
                total = products if total is None else builder.add(total, products)
        return total

    def _dot(self, weights: list[Any], fours: list[Any], times: int) -> Any:
        """int32 sums of products of bytes, so many times."""
        builder, lanes, words, total = self.builder, self._kind.lanes, self._words, None
        if self._kind.has_vnni:
            name = f"x86.avx512.vpdpbusd.{32 * lanes}"
            total = ir.Constant(words, None)
            for theirs, inputs in zip(weights, fours):
                total = self.call(name, words, total, theirs, inputs)
            if times == 1:
                return total
            return builder.mul(total, ir.Constant(words, [times] * lanes))
        for theirs, inputs in zip(weights, fours):
            products = self.call("x86.avx2.pmadd.ub.sw", self._shorts, theirs, inputs)
            total = products if total is None else builder.add(total, products)
        factor = ir.Constant(self._shorts, [times] * (2 * lanes))
        return self.call("x86.avx2.pmadd.wd", words, total, factor)

    def _fma(self, left: Any, right: Any, total: Any) -> Any:
        name = f"fma.v{self._kind.lanes}f32"
        return self.call(name, self._reals, left, right, total)
