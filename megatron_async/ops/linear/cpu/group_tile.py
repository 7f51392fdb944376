"""The instructions of one tile of `group_products.py`: some rows by a block's outputs.

A lane is an output. An instruction multiplies four inputs of a row, which all lanes get, by each
output's four weights. Weights are 0 to 15 and inputs -127 to 127, so `pmaddubsw`, which adds two
products in 16 bits, leaves room for the sixteen of an input group: 16 x 15 x 127 is less than
32,768. One `pmaddwd` then makes 32 bits of neighbours. VNNI's `vpdpbusd` does both.

The order of a sum is its groups' order, whatever the lanes are: all kinds of tiles give the same
bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

from megatron_async.ops.cpu.instructions import BYTE, LONG, REAL, SHORT, WORD, Writer, constant
from megatron_async.ops.cpu.row_kernels import LINE, write_fetch

GROUP = 32
"""Inputs of a weight group, whose weights share a scale and an offset."""
INPUT_GROUP = 16
"""Inputs that share a scale of their row: half a group, the weights of one half of each byte. With
32 as many tokens equal float32's as with 16 bits a row, with 16 more do
(docs/records/cpu_throughput.md, 2026-11-27)."""
QUARTET = 4
"""Inputs of an instruction."""
QUARTETS = INPUT_GROUP // QUARTET


class TileKind(NamedTuple):
    """What a CPU's instructions make of a tile.

    Attributes:
        lanes: of a register: outputs of a block.
        has_vnni: whether four products and their sum are one instruction.
    """

    lanes: int
    has_vnni: bool

    @property
    def integer_bytes(self) -> int:
        """Bytes of a group's weights in a block."""
        return self.lanes * GROUP // 2

    @property
    def group_bytes(self) -> int:
        """Bytes of a group in a block: weights, float32 scales, float32 offsets."""
        return self.integer_bytes + 2 * 4 * self.lanes


def kind_of_host() -> TileKind:
    """The fastest kind that this CPU has."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512vnni", False) and features.get("avx512bw", False):
        return TileKind(16, has_vnni=True)
    return TileKind(8, has_vnni=bool(features.get("avxvnni", False)))


class GroupTileWriter(Writer):
    """Writes a tile's instructions, where llvmlite's builder is."""

    def __init__(self, builder: Any, rows: int, kind: TileKind) -> None:
        super().__init__(builder)
        self._rows, self._kind = rows, kind
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
        lines = self._kind.group_bytes // LINE
        for number in range(lines):
            place = builder.add(builder.mul(group, constant(lines)), constant(number))
            write_fetch(builder, builder.add(ahead, builder.mul(place, pace)))
        added = self._group(group, k, sources, weight, sums)
        following = builder.add(group, constant(1))
        group.add_incoming(following, loop)
        for total, now in zip(sums, added):
            total.add_incoming(now, loop)
        builder.cbranch(builder.icmp_signed("<", following, groups), loop, end)

        builder.position_at_end(end)
        for row, total in enumerate(added):
            place = builder.add(out, builder.mul(columns, constant(4 * row)))
            self.store(total, place)

    def _group(
        self, group: Any, k: Any, sources: list[Any], weight: Any, sums: list[Any]
    ) -> list[Any]:
        """The sums with a group's products: see `round_groups` about a row's memory."""
        builder, lanes, kind = self.builder, self._kind.lanes, self._kind
        place = builder.add(weight, builder.mul(group, constant(kind.group_bytes)))
        scales = self.load(self._reals, place, kind.integer_bytes)
        offsets = self.load(self._reals, place, kind.integer_bytes + 4 * lanes)
        inputs = builder.mul(group, constant(GROUP))
        row_scales = builder.add(k, builder.mul(group, constant(2 * 4)))
        row_sums = builder.add(k, builder.udiv(k, constant(INPUT_GROUP // 4)))
        row_sums = builder.add(row_sums, builder.mul(group, constant(4)))
        scaled: list[Any] = [None] * self._rows
        for half in range(2):
            quartets = [self._quartet(place, number, half) for number in range(QUARTETS)]
            for row, source in enumerate(sources):
                at = builder.add(builder.add(source, inputs), constant(INPUT_GROUP * half))
                products = builder.sitofp(self._products(at, quartets), self._reals)
                at = builder.add(source, row_scales)
                scale = self.everywhere(self.load(REAL, at, 4 * half), self._reals)
                before = scaled[row]
                if before is None:
                    scaled[row] = builder.fmul(products, scale)
                else:
                    scaled[row] = self._fma(products, scale, before)
        added = []
        for source, total, products in zip(sources, sums, scaled):
            of_row = self.load(REAL, builder.add(source, row_sums), 0)
            total = self._fma(products, scales, total)
            added.append(self._fma(offsets, self.everywhere(of_row, self._reals), total))
        return added

    def _quartet(self, place: Any, number: int, half: int) -> Any:
        """Weights of four inputs: the low or the high halves of a register's bytes."""
        builder, lanes = self.builder, self._kind.lanes
        both = self.load(self._bytes, place, 4 * lanes * number)
        if half:
            four = ir.Constant(self._shorts, [4] * (2 * lanes))
            shifted = builder.lshr(builder.bitcast(both, self._shorts), four)
            both = builder.bitcast(shifted, self._bytes)
        return builder.and_(both, ir.Constant(self._bytes, [15] * (4 * lanes)))

    def _products(self, at: Any, quartets: list[Any]) -> Any:
        """int32 sums of an input group's products, at the address of a row's integers."""
        builder, lanes, words = self.builder, self._kind.lanes, self._words
        fours = [
            builder.bitcast(self.everywhere(self.load(WORD, at, QUARTET * n), words), self._bytes)
            for n in range(QUARTETS)
        ]
        total: Any = None
        if self._kind.has_vnni:
            name = f"x86.avx512.vpdpbusd.{32 * lanes}"
            total = ir.Constant(words, None)
            for weights, inputs in zip(quartets, fours):
                total = self.call(name, words, total, weights, inputs)
            return total
        for weights, inputs in zip(quartets, fours):
            products = self.call("x86.avx2.pmadd.ub.sw", self._shorts, weights, inputs)
            total = products if total is None else builder.add(total, products)
        ones = ir.Constant(self._shorts, [1] * (2 * lanes))
        return self.call("x86.avx2.pmadd.wd", words, total, ones)

    def _fma(self, left: Any, right: Any, total: Any) -> Any:
        name = f"fma.v{self._kind.lanes}f32"
        return self.call(name, self._reals, left, right, total)
