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


BYTE, SHORT, WORD, LONG, REAL = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType())


def _constant(value: int) -> Any:
    return ir.Constant(LONG, value)


class GroupTileWriter:
    """Writes a tile's instructions, where llvmlite's builder is."""

    def __init__(self, builder: Any, rows: int, kind: TileKind) -> None:
        self._builder, self._rows, self._kind = builder, rows, kind
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
        builder, rows, before = self._builder, range(self._rows), self._builder.block
        sources = [builder.add(x, builder.mul(stride, _constant(row))) for row in rows]
        groups = builder.udiv(k, _constant(GROUP))
        loop, end = (builder.append_basic_block(name) for name in ("groups", "end"))
        builder.branch(loop)

        builder.position_at_end(loop)
        group = builder.phi(LONG)
        group.add_incoming(_constant(0), before)
        sums = [builder.phi(self._reals) for _ in rows]
        for total in sums:
            total.add_incoming(ir.Constant(self._reals, None), before)
        lines = self._kind.group_bytes // LINE
        for number in range(lines):
            place = builder.add(builder.mul(group, _constant(lines)), _constant(number))
            write_fetch(builder, builder.add(ahead, builder.mul(place, pace)))
        added = self._group(group, k, sources, weight, sums)
        following = builder.add(group, _constant(1))
        group.add_incoming(following, loop)
        for total, now in zip(sums, added):
            total.add_incoming(now, loop)
        builder.cbranch(builder.icmp_signed("<", following, groups), loop, end)

        builder.position_at_end(end)
        for row, total in enumerate(added):
            place = builder.add(out, builder.mul(columns, _constant(4 * row)))
            builder.store(total, builder.inttoptr(place, self._reals.as_pointer()), align=4)

    def _group(
        self, group: Any, k: Any, sources: list[Any], weight: Any, sums: list[Any]
    ) -> list[Any]:
        """The sums with a group's products: see `round_groups` about a row's memory."""
        builder, lanes, kind = self._builder, self._kind.lanes, self._kind
        place = builder.add(weight, builder.mul(group, _constant(kind.group_bytes)))
        scales = self._load(self._reals, place, kind.integer_bytes)
        offsets = self._load(self._reals, place, kind.integer_bytes + 4 * lanes)
        inputs = builder.mul(group, _constant(GROUP))
        row_scales = builder.add(k, builder.mul(group, _constant(2 * 4)))
        row_sums = builder.add(k, builder.udiv(k, _constant(INPUT_GROUP // 4)))
        row_sums = builder.add(row_sums, builder.mul(group, _constant(4)))
        scaled: list[Any] = [None] * self._rows
        for half in range(2):
            quartets = [self._quartet(place, number, half) for number in range(QUARTETS)]
            for row, source in enumerate(sources):
                at = builder.add(builder.add(source, inputs), _constant(INPUT_GROUP * half))
                products = builder.sitofp(self._products(at, quartets), self._reals)
                at = builder.add(source, row_scales)
                scale = self._everywhere(self._load(REAL, at, 4 * half), self._reals)
                before = scaled[row]
                if before is None:
                    scaled[row] = builder.fmul(products, scale)
                else:
                    scaled[row] = self._fma(products, scale, before)
        added = []
        for source, total, products in zip(sources, sums, scaled):
            of_row = self._load(REAL, builder.add(source, row_sums), 0)
            total = self._fma(products, scales, total)
            added.append(self._fma(offsets, self._everywhere(of_row, self._reals), total))
        return added

    def _quartet(self, place: Any, number: int, half: int) -> Any:
        """Weights of four inputs: the low or the high halves of a register's bytes."""
        builder, lanes = self._builder, self._kind.lanes
        both = self._load(self._bytes, place, 4 * lanes * number)
        if half:
            four = ir.Constant(self._shorts, [4] * (2 * lanes))
            shifted = builder.lshr(builder.bitcast(both, self._shorts), four)
            both = builder.bitcast(shifted, self._bytes)
        return builder.and_(both, ir.Constant(self._bytes, [15] * (4 * lanes)))

    def _products(self, at: Any, quartets: list[Any]) -> Any:
        """int32 sums of an input group's products, at the address of a row's integers."""
        builder, lanes, words = self._builder, self._kind.lanes, self._words
        fours = [
            builder.bitcast(self._everywhere(self._load(WORD, at, QUARTET * n), words), self._bytes)
            for n in range(QUARTETS)
        ]
        total: Any = None
        if self._kind.has_vnni:
            name = f"avx512.vpdpbusd.{32 * lanes}"
            add = self._instruction(name, words, words, self._bytes, self._bytes)
            total = ir.Constant(words, None)
            for weights, inputs in zip(quartets, fours):
                total = builder.call(add, [total, weights, inputs])
            return total
        multiply = self._instruction("avx2.pmadd.ub.sw", self._shorts, self._bytes, self._bytes)
        for weights, inputs in zip(quartets, fours):
            products = builder.call(multiply, [weights, inputs])
            total = products if total is None else builder.add(total, products)
        widen = self._instruction("avx2.pmadd.wd", words, self._shorts, self._shorts)
        return builder.call(widen, [total, ir.Constant(self._shorts, [1] * (2 * lanes))])

    def _instruction(self, name: str, result: Any, *arguments: Any) -> Any:
        return self._function(f"llvm.x86.{name}", result, *arguments)

    def _fma(self, left: Any, right: Any, total: Any) -> Any:
        name = f"llvm.fma.v{self._kind.lanes}f32"
        function = self._function(name, *[self._reals] * 4)
        return self._builder.call(function, [left, right, total])

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        module = self._builder.module
        kind = ir.FunctionType(result, arguments)
        return module.globals.get(name) or ir.Function(module, kind, name)

    def _load(self, kind: Any, address: Any, offset: int) -> Any:
        place = self._builder.add(address, _constant(offset))
        return self._builder.load(self._builder.inttoptr(place, kind.as_pointer()), align=1)

    def _everywhere(self, value: Any, kind: Any) -> Any:
        builder, zeros = self._builder, ir.Constant(ir.VectorType(WORD, kind.count), None)
        undefined = ir.Constant(kind, ir.Undefined)
        vector = builder.insert_element(undefined, value, ir.Constant(WORD, 0))
        return builder.shuffle_vector(vector, vector, zeros)
