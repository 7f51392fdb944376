"""Tiles of keys and values in e4m3 (`narrow_cache.py`), and of their queries, as kernels multiply
them.

Rows of bfloat16 and float16 multiply in float16: Hopper has an instruction for two e4m3 to float16,
and none to bfloat16 but four times as slow a one for each number. So queries of bfloat16 are
multiplied by a power of two of their row (`as_halves`), and weights are at most 2^15
(`WEIGHT_BITS`). In all kernels even elements of a head are added up before odd ones: decode
attention has them in two registers, and one order is what one result needs.
"""

from __future__ import annotations

import triton
import triton.language as tl


def padded_dim(dim: int, is_narrow: bool) -> int:
    """Elements of a head in a kernel's tile: the next power of two; of a narrow cache two halves
    that the matrix units take."""
    return max(triton.next_power_of_2(dim), 32 if is_narrow else 0)


WEIGHT_BITS = tl.constexpr(15)
"""Weights of a narrow cache's values are so many powers of two larger in float16: those below 2^-24
would be zeros, of which a long sequence may have many."""


@triton.jit
def as_halves(q: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Queries of bfloat16, `[rows, dim]`, in float16 times a power of two of their row, and one
    over that: exact but for elements 2^29 times as small as the row's largest."""
    wide = q.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    exponent = tl.maximum(tl.cast(largest, tl.int32, bitcast=True) >> 23, 15)
    # The largest is below 2^15 then, and both factors are normal numbers.
    factor = tl.cast((268 - exponent) << 23, tl.float32, bitcast=True)
    back = tl.cast((exponent - 14) << 23, tl.float32, bitcast=True)
    return (wide * factor[:, None]).to(tl.float16), back


@triton.jit
def even_and_odd(whole: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """`[n, dim]` as two of `[n, dim / 2]`, of its even and odd columns."""
    return tl.split(tl.reshape(whole, (whole.shape[0], whole.shape[1] // 2, 2)))


PAIRS = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 even, odd; prmt.b32 t, $2, 0, 0x3120; mov.b32 {even, odd}, t; "
    "cvt.rn.f16x2.e4m3x2 $0, even; cvt.rn.f16x2.e4m3x2 $1, odd; }"
)
"""Two units in one register: their even elements, and their odd ones."""


@triton.jit
def evens_first(whole: tl.tensor) -> tl.tensor:
    """`[n, dim]` with its even columns before its odd ones."""
    rows: tl.constexpr = whole.shape[0]
    columns: tl.constexpr = whole.shape[1]
    pairs = whole.reshape((rows, columns // 2, 2))
    return pairs.permute((0, 2, 1)).reshape((rows, columns))


@triton.jit
def of_units(
    units: tl.tensor, dtype: tl.constexpr, in_pairs: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Even and odd elements of keys or values that were loaded two at a time, as int16. If
    `in_pairs`, and in float16, by PTX of Hopper; else by the same steps in Triton."""
    if in_pairs and dtype == tl.float16:
        even, odd = tl.inline_asm_elementwise(
            PAIRS, "=r,=r,r", [units], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        even = (units & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
        odd = ((units >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    return even, odd
