"""Exponential and logarithm in float32 as plain arithmetic.

LLVM turns these into vectors; a call of the C library it does not. They are written as
instructions, so that no caller's `fastmath` reorders them: equal numbers have equal results
in all loops. Imported only where loops are compiled. The polynomials are those of Cephes' `expf`
and `logf` (S. Moshier).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LOG2_E = 1.44269504088896341
LN2 = 0.693359375, -2.12194440e-4
"""The natural logarithm of 2: a part without low bits, and the rest (Cody and Waite 1980)."""
OF_EXP = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1,
)  # fmt: skip
OF_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
"""Coefficients, from the highest power."""
MOST, LEAST = 88.3762626647949, -87.3365447504
"""Beyond, float32 overflows and underflows."""
REAL, WHOLE = ir.FloatType(), ir.IntType(32)
ROOT_HALF = 0x3F3504F3
"""Bits of the square root of one half."""


def _constant(value: float) -> Any:
    return ir.Constant(REAL, float(np.float32(value)))


def _polynomial(builder: Any, x: Any, coefficients: tuple[float, ...]) -> Any:
    y = _constant(coefficients[0])
    for factor in coefficients[1:]:
        y = builder.fadd(builder.fmul(y, x), _constant(factor))
    return y


def _exp_of_the_library(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    real = ir.DoubleType()
    kind = ir.FunctionType(real, [real])
    return builder.call(builder.module.declare_intrinsic("llvm.exp", (real,), kind), args)


@intrinsic
def exp(typingctx: Any, x: Any = None) -> Any:
    """The exponential in float32, to 2 units in the last place; NaN for NaN. In float64 the C
    library's, for tests."""
    if x == types.float64:
        return types.float64(types.float64), _exp_of_the_library

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (given,) = args

        def call(name: str, *values: Any) -> Any:
            kind = ir.FunctionType(REAL, [REAL] * len(values))
            function = builder.module.declare_intrinsic(f"llvm.{name}", (REAL,), kind)
            return builder.call(function, values)

        clipped = call("minnum", call("maxnum", given, _constant(LEAST)), _constant(MOST))
        order = call("rint", builder.fmul(clipped, _constant(LOG2_E)))
        rest = clipped
        for part in LN2:
            rest = builder.fsub(rest, builder.fmul(order, _constant(part)))
        y = _polynomial(builder, rest, OF_EXP)
        y = builder.fmul(builder.fmul(y, rest), rest)
        y = builder.fadd(builder.fadd(y, rest), _constant(1.0))
        exponent = builder.add(builder.fptosi(order, WHOLE), ir.Constant(WHOLE, 127))
        power = builder.bitcast(builder.shl(exponent, ir.Constant(WHOLE, 23)), REAL)
        is_nan = builder.fcmp_unordered("uno", given, given)
        return builder.select(is_nan, given, builder.fmul(y, power))

    return types.float32(types.float32), codegen


@intrinsic
def log(typingctx: Any, x: Any = None) -> Any:
    """The natural logarithm of a positive number that is neither subnormal nor infinite, to 2 units
    in the last place."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        root = ir.Constant(WHOLE, ROOT_HALF)
        moved = builder.sub(builder.bitcast(args[0], WHOLE), root)
        order = builder.sitofp(builder.ashr(moved, ir.Constant(WHOLE, 23)), REAL)
        low = builder.and_(moved, ir.Constant(WHOLE, 0x7FFFFF))
        # From the root of one half to the root of two.
        mantissa = builder.bitcast(builder.add(low, root), REAL)
        rest = builder.fsub(mantissa, _constant(1.0))
        square = builder.fmul(rest, rest)
        y = builder.fmul(_polynomial(builder, rest, OF_LOG), builder.fmul(rest, square))
        y = builder.fadd(y, builder.fmul(order, _constant(LN2[1])))
        y = builder.fsub(y, builder.fmul(square, _constant(0.5)))
        return builder.fadd(builder.fadd(rest, y), builder.fmul(order, _constant(LN2[0])))

    return types.float32(types.float32), codegen
