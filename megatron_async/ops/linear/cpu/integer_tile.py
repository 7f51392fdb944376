"""The instructions of one tile of `integer_products.py`: some rows by some outputs.

`pmaddwd` multiplies 16 pairs of 16-bit integers, or 32 with AVX-512, and adds neighbours in 32
bits: eight lanes or sixteen, whose sums are added in float64. All these sums are exact, in whatever
order. With VNNI, LLVM makes one instruction of this and of the addition behind it.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from megatron_async.ops.cpu.instructions import BYTE, LONG, REAL, SHORT, WORD, Writer, constant
from megatron_async.ops.cpu.row_kernels import LINE, write_fetch

IS_WIDE = bool(llvm.get_host_cpu_features().get("avx512bw", False))
"""Whether registers have 512 bits."""
STEP = 32 if IS_WIDE else 16
"""Inputs that an instruction takes."""
OUTPUTS = 4
"""Outputs whose weights are side by side, and sums that are added up together."""
FETCHES = OUTPUTS * STEP // LINE
"""Cache lines of a step's weights."""
STEPS_OF_PIECE = 256
"""Most steps whose sums have room in 32 bits: in each, a lane adds two products of at most 32,767 x
127."""

BYTES, SHORTS = ir.VectorType(BYTE, STEP), ir.VectorType(SHORT, STEP)
LANES = ir.VectorType(WORD, STEP // 2)
MULTIPLY = "x86.avx512.pmaddw.d.512" if IS_WIDE else "x86.avx2.pmadd.wd"
WIDE, NARROW = ir.VectorType(ir.DoubleType(), 4), ir.VectorType(REAL, 4)


class TileWriter(Writer):
    """Writes a tile's instructions, where llvmlite's builder is. A tile of fewer outputs than
    `OUTPUTS` has a multiple of four rows."""

    def __init__(self, builder: Any, rows: int, outputs: int) -> None:
        super().__init__(builder)
        self._rows, self._outputs = rows, outputs

    def totals(
        self, x: Any, stride: Any, weight: Any, steps: Any, ahead: Any, pace: Any
    ) -> list[Any]:
        """The sums, float64 in four parts, for each row those of its outputs. With each step the
        cache is told to fetch `FETCHES` addresses from `ahead` on, `pace` bytes after each
        other."""
        builder, count = self.builder, self._rows * self._outputs
        sources = [builder.add(x, builder.mul(stride, constant(r))) for r in range(self._rows)]
        before = builder.block
        names = ("piece", "products", "piece_end", "end")
        piece, loop, piece_end, end = (builder.append_basic_block(name) for name in names)
        builder.branch(piece)

        builder.position_at_end(piece)
        begin = builder.phi(LONG)
        begin.add_incoming(constant(0), before)
        totals = [builder.phi(WIDE) for _ in range(count)]
        for total in totals:
            total.add_incoming(ir.Constant(WIDE, None), before)
        stop = builder.add(begin, constant(STEPS_OF_PIECE))
        stop = builder.select(builder.icmp_signed("<", stop, steps), stop, steps)
        builder.branch(loop)

        builder.position_at_end(loop)
        step = builder.phi(LONG)
        step.add_incoming(begin, piece)
        sums = [builder.phi(LANES) for _ in range(count)]
        for lanes in sums:
            lanes.add_incoming(ir.Constant(LANES, None), piece)
        for number in range(FETCHES):
            place = builder.add(builder.mul(step, constant(FETCHES)), constant(number))
            write_fetch(builder, builder.add(ahead, builder.mul(place, pace)))
        added = self._products(step, sources, weight, sums)
        following = builder.add(step, constant(1))
        step.add_incoming(following, loop)
        for lanes, now in zip(sums, added):
            lanes.add_incoming(now, loop)
        builder.cbranch(builder.icmp_signed("<", following, stop), loop, piece_end)

        builder.position_at_end(piece_end)
        raised = [builder.fadd(t, self._fours(now)) for t, now in zip(totals, added)]
        begin.add_incoming(stop, piece_end)
        for total, now in zip(totals, raised):
            total.add_incoming(now, piece_end)
        builder.cbranch(builder.icmp_signed("<", stop, steps), piece, end)
        builder.position_at_end(end)
        return raised

    def write(self, totals: list[Any], factors: Any, scales: Any, out: Any, columns: Any) -> None:
        """Write the sums, each times its row's factor and its output's scale."""
        builder, rows, outputs = self.builder, self._rows, self._outputs
        stride = builder.mul(columns, constant(4))
        for four in range(0, rows * outputs, OUTPUTS):
            if outputs == OUTPUTS:
                row = four // outputs
                sums = self._together(totals[four : four + OUTPUTS])
                factor = self.load(REAL, factors, 4 * row, 4)
                sums = builder.fmul(sums, self.everywhere(factor, NARROW))
                sums = builder.fmul(sums, self.load(NARROW, scales, 0, 4))
                place = builder.add(out, builder.mul(stride, constant(row)))
                self.store(sums, place)
                continue
            output, first = four // rows, four % rows
            mine = [totals[(first + i) * outputs + output] for i in range(OUTPUTS)]
            sums = builder.fmul(self._together(mine), self.load(NARROW, factors, 4 * first, 4))
            scale = self.load(REAL, scales, 4 * output, 4)
            sums = builder.fmul(sums, self.everywhere(scale, NARROW))
            for i in range(OUTPUTS):
                place = builder.add(out, builder.mul(stride, constant(first + i)))
                place = builder.add(place, constant(4 * output))
                value = builder.extract_element(sums, ir.Constant(WORD, i))
                self.store(value, place)

    def _products(self, step: Any, sources: list[Any], weight: Any, sums: list[Any]) -> list[Any]:
        """The sums with a step's products."""
        builder = self.builder
        place = builder.add(weight, builder.mul(step, constant(OUTPUTS * STEP)))
        weights = [
            builder.sext(self.load(BYTES, place, STEP * output, 1), SHORTS)
            for output in range(self._outputs)
        ]
        at, added = builder.mul(step, constant(2 * STEP)), []
        for row, source in enumerate(sources):
            inputs = self.load(SHORTS, builder.add(source, at), 0, 2)
            for output, wide in enumerate(weights):
                products = self.call(MULTIPLY, LANES, inputs, wide)
                added.append(builder.add(sums[row * self._outputs + output], products))
        return added

    def _fours(self, lanes: Any) -> Any:
        """Sums of 32 bits as four of float64."""
        fours = [self._pick(lanes, lanes, *range(i, i + 4)) for i in range(0, LANES.count, 4)]
        first, *others = (self.builder.sitofp(four, WIDE) for four in fours)
        return reduce(self.builder.fadd, others, first)

    def _together(self, four: list[Any]) -> Any:
        """Four sums in four parts each as one vector of float32."""
        add, pick = self.builder.fadd, self._pick
        left, right = (
            add(pick(a, b, 0, 4, 2, 6), pick(a, b, 1, 5, 3, 7)) for a, b in (four[:2], four[2:])
        )
        sums = add(pick(left, right, 0, 1, 4, 5), pick(left, right, 2, 3, 6, 7))
        return self.builder.fptrunc(sums, NARROW)

    def _pick(self, left: Any, right: Any, *elements: int) -> Any:
        kind = ir.VectorType(WORD, len(elements))
        return self.builder.shuffle_vector(left, right, ir.Constant(kind, list(elements)))
