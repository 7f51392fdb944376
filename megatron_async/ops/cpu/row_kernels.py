"""Loops over rows of float32: norms, activations, rounding to 8 bits.

Imported only where they run, because Numba takes a second to import. Compiled at the first call and
kept on disk; they release Python's lock. A sum over a row may be reordered into lanes of a vector,
always in the same way, so that a row's result depends on no other one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from megatron_async.ops.cpu.float_math import exp
from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.cpu.pointers import address_of

REORDERS = {"reassoc", "contract", "arcp", "nsz"}
"""What sums may do. NaN and infinity stay what they are: they tell a broken row."""

LINE = 64
"""Bytes that a cache fetches at a time."""


@intrinsic
def fetch(typingctx: Any, address: Any) -> Any:
    """Tell the cache to fetch what is at an address, which need not be valid."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        write_fetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def write_fetch(builder: Any, address: Any) -> None:
    """Write the instruction of `fetch`."""
    word = ir.IntType(32)
    place = builder.inttoptr(address, ir.IntType(8).as_pointer())
    read, keep, data = (ir.Constant(word, number) for number in (0, 3, 1))
    kind = ir.FunctionType(ir.VoidType(), [place.type, word, word, word])
    function = builder.module.declare_intrinsic("llvm.prefetch", (place.type,), kind)
    builder.call(function, [place, read, keep, data])


def _numbers(kind: Any, element: Any) -> Any:
    @intrinsic
    def numbers(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], element.as_pointer())

        return types.CPointer(kind)(types.int64), codegen

    return numbers


floats = _numbers(types.float32, ir.FloatType())
"""An address of float32 numbers. Tensors are given to small loops by their addresses:
`numpy()` and the array it makes take one to two microseconds each time, `data_ptr()` 0.2."""
integers = _numbers(types.int16, ir.IntType(16))
words = _numbers(types.int32, ir.IntType(32))
longs = _numbers(types.int64, ir.IntType(64))
"""An address of int16, int32 and int64 numbers."""


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REORDERS)
def add_norm(
    x_at: Any,
    residual_at: Any,
    weight_at: Any,
    rows: Any,
    hidden: Any,
    eps: Any,
    normed_at: Any,
    total_at: Any,
) -> None:  # pragma: no cover - compiled
    """Into total: x + residual; into normed: RMSNorm of it. All by their addresses, `[rows,
    hidden]`, weight `[hidden]`."""  # fmt: skip
    sizes, weight = (rows, hidden), carray(floats(weight_at), (hidden,))
    x, residual = carray(floats(x_at), sizes), carray(floats(residual_at), sizes)
    normed, total = carray(floats(normed_at), sizes), carray(floats(total_at), sizes)
    for row in range(rows):
        square = np.float32(0.0)
        for i in range(hidden):
            value = x[row, i] + residual[row, i]
            total[row, i] = value
            square += value * value
        factor = np.float32(1.0) / np.sqrt(square / np.float32(hidden) + eps)
        for i in range(hidden):
            normed[row, i] = total[row, i] * factor * weight[i]


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REORDERS)
def norm(
    x_at: Any, weight_at: Any, rows: Any, hidden: Any, eps: Any, normed_at: Any
) -> None:  # pragma: no cover - compiled
    """Into normed: RMSNorm of x. By their addresses, `[rows, hidden]`, weight `[hidden]`."""
    weight = carray(floats(weight_at), (hidden,))
    x, normed = carray(floats(x_at), (rows, hidden)), carray(floats(normed_at), (rows, hidden))
    for row in range(rows):
        square = np.float32(0.0)
        for i in range(hidden):
            square += x[row, i] * x[row, i]
        factor = np.float32(1.0) / np.sqrt(square / np.float32(hidden) + eps)
        for i in range(hidden):
            normed[row, i] = x[row, i] * factor * weight[i]


def norm_addresses() -> tuple[int, int]:
    """`pointers.address_of` of `norm` and of `add_norm`."""
    number, real = types.int64, types.float32
    sizes = (number, number, real)
    return (
        address_of(norm, number, number, *sizes, number),
        address_of(add_norm, number, number, number, *sizes, number, number),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def swiglu(x_at: Any, rows: Any, width: Any, out_at: Any) -> None:  # pragma: no cover - compiled
    """Into out: silu(gate) * up; by their addresses, x `[rows, 2, width]`, out `[rows, width]`."""
    x, out = carray(floats(x_at), (rows, 2, width)), carray(floats(out_at), (rows, width))
    for row in range(rows):
        # Whole rows: Numba takes a part of one for strided, and an index that is a sum for one that
        # may be negative. Neither becomes vectors.
        gates, ups, target = x[row, 0], x[row, 1], out[row]
        for i in range(width):
            target[i] = gates[i] / (np.float32(1.0) + exp(-gates[i])) * ups[i]


@njit(nogil=True, cache=True, error_model="numpy")
def squared_relu(x_at: Any, count: Any, out_at: Any) -> None:  # pragma: no cover - compiled
    """Into out: squares of what is positive in x; by their addresses, float32 `[count]`."""
    x, out = carray(floats(x_at), (count,)), carray(floats(out_at), (count,))
    for i in range(count):
        # Not `max`, which would hide NaN.
        value = np.float32(0.0) if x[i] < 0 else x[i]
        out[i] = value * value


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REORDERS)
def gated_norm(
    y_at: Any, y_row: Any, z_at: Any, z_row: Any, weight_at: Any, rows: Any, groups: Any, size: Any,
    eps: Any, out_at: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Into out, `[rows, groups, size]`: RMSNorm of `y * silu(z)` in each group, times weight,
    `[groups, size]`; all by their addresses, and y's and z's rows by their bytes."""
    weight = carray(floats(weight_at), (groups, size))
    out = carray(floats(out_at), (rows, groups, size))
    for row in range(rows):
        ys = carray(floats(y_at + row * y_row), (groups, size))
        gates = carray(floats(z_at + row * z_row), (groups, size))
        for group in range(groups):
            y, gate, scale, target = ys[group], gates[group], weight[group], out[row, group]
            square = np.float32(0.0)
            for i in range(size):
                value = y[i] * gate[i] / (np.float32(1.0) + exp(-gate[i]))
                target[i] = value
                square += value * value
            factor = np.float32(1.0) / np.sqrt(square / np.float32(size) + eps)
            for i in range(size):
                target[i] *= factor * scale[i]


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REORDERS)
def head_norm(
    o_at: Any, o_row: Any, z_at: Any, z_row: Any, weight_at: Any, rows: Any, heads: Any, size: Any,
    eps: Any, out_at: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Into out, `[rows, heads, size]`: RMSNorm of each head of o, times weight, `[size]`, times
    silu(z); all by their addresses, and o's and z's rows by their bytes."""
    weight = carray(floats(weight_at), (size,))
    out = carray(floats(out_at), (rows, heads, size))
    for row in range(rows):
        outputs = carray(floats(o_at + row * o_row), (heads, size))
        gates = carray(floats(z_at + row * z_row), (heads, size))
        for head in range(heads):
            o, gate, target = outputs[head], gates[head], out[row, head]
            square = np.float32(0.0)
            for i in range(size):
                square += o[i] * o[i]
            factor = np.float32(1.0) / np.sqrt(square / np.float32(size) + eps)
            for i in range(size):
                silu = gate[i] / (np.float32(1.0) + exp(-gate[i]))
                target[i] = o[i] * factor * weight[i] * silu


@njit(nogil=True, cache=True, error_model="numpy")
def halves(
    x: Any, both: Any, factors: Any, largest: Any, finer: Any, least: Any
) -> None:  # pragma: no cover - compiled
    """Rows as two rows of 8 bits; see `ops/linear/cpu/eight_bit.py`.

    both: `[2 * rows, k]`: each row times its factor, then what rounding leaves of it, times finer.
    factors: `[rows]`.
    """
    rows = x.shape[0]
    for row in range(rows):
        most, is_nan = np.float32(0.0), 0
        for i in range(x.shape[1]):
            most = max(most, abs(x[row, i]))
            is_nan |= x[row, i] != x[row, i]
        factor = np.float32(np.nan) if is_nan else largest / max(most, least)
        factors[row] = factor
        for i in range(x.shape[1]):
            scaled = x[row, i] * factor
            both[row, i] = scaled
            both[rows + row, i] = (scaled - np.rint(scaled)) * finer


@njit(nogil=True, cache=True, error_model="numpy")
def whole(sums: Any, factors: Any, finer: Any) -> None:  # pragma: no cover - compiled
    """Products of the two halves, `[2 * rows, outputs]`, to products of the rows, in the first."""
    rows = len(factors)
    share = np.float32(1.0) / finer
    for row in range(rows):
        first, second = sums[row], sums[rows + row]
        factor = np.float32(1.0) / factors[row]
        for i in range(sums.shape[1]):
            first[i] = (first[i] + second[i] * share) * factor
