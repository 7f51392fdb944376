"""Keys and values in 8 bits: how a cache stores them, by a scale for each KV head.

A key is stored as e4m3 (4 bits of exponent, 3 of mantissa, no infinity) of the key over the scale
of its head, and read back times the scale; so are values. Attention widens the stored numbers,
which is exact, and multiplies as it does with a cache of the model's dtype. The scale of the keys
goes to the scores, the scale of the values to the output. Scales are those of checkpoints: the
largest number that was met over 448, or 1.

On a GPU rows of bfloat16 and float16 multiply in float16: Hopper has an instruction for two e4m3 to
float16, and none to bfloat16 but four times as slow a one for each number. So queries of bfloat16
are multiplied by a power of two of their row (`as_halves`), and weights are at most 2^15
(`WEIGHT_BITS`). In all kernels even elements of a head are added up before odd ones: decode
attention has them in two registers, and one order is what one result needs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.errors import ConfigurationError

NARROW = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest number of e4m3. A larger one is stored as this one; torch's cast alone gives NaN."""
KEYS, VALUES, INVERSE = 0, 1, 2
"""Rows of `scales_of`: the scales, and from `INVERSE` on one over each."""


def scales_of(keys: Tensor, values: Tensor) -> Tensor:
    """Scales of keys and of values, float32 `[kv_heads]` each, as kernels take them: float32 `[4,
    kv_heads]`. To store is to multiply by one over the scale, which gives the same bits on every
    device; kernels divide otherwise than torch."""
    both = torch.stack((keys, values))
    return torch.cat((both, 1 / both))


def narrowed(x: Tensor, scales: Tensor, of: int) -> Tensor:
    """`x`, `[..., kv_heads, dim]`, as it is stored. `of`: KEYS or VALUES."""
    scaled = x.to(torch.float32) * scales[INVERSE + of, :, None]
    return scaled.clamp(-LARGEST, LARGEST).to(NARROW)


def widened(x: Tensor, scales: Tensor | None, of: int, dtype: torch.dtype) -> Tensor:
    """What `narrowed` has stored, in a wider dtype; without scales `x` itself."""
    if scales is None:
        return x
    return (x.to(torch.float32) * scales[of, :, None]).to(dtype)


def as_bytes(cache: Tensor) -> Tensor:
    """A cache whose rows torch can copy: it gathers and scatters no e4m3 on a CPU."""
    return cache.view(torch.uint8) if cache.dtype == NARROW else cache


def check_narrow_cache(device: torch.device) -> None:
    """Refuse, with a ConfigurationError, a GPU without conversions of e4m3."""
    if device.type == "cuda" and (has := torch.cuda.get_device_capability(device)) < (8, 9):
        raise ConfigurationError(
            f"kv_cache_dtype='fp8' needs a GPU of compute capability 8.9 or more, {device} has "
            f"{has[0]}.{has[1]}: use 'model'."
        )


def check_dtypes(
    name: str, dtype: torch.dtype, key_cache: Tensor, value_cache: Tensor, scales: Tensor | None
) -> None:
    """Refuse, with a ValueError, caches for rows of `dtype` in another one than that, or in e4m3
    without their scales, or with heads that are not read two elements at a time."""
    dtypes, heads = {key_cache.dtype, value_cache.dtype}, key_cache.size(-2)
    if scales is None:
        fits = dtypes == {dtype}
    else:
        fits = dtypes == {NARROW} and scales.shape == (4, heads) and scales.is_contiguous()
        fits &= key_cache.size(-1) % 2 == 0
    if not fits:
        found = "none" if scales is None else str(tuple(scales.shape))
        raise ValueError(
            f"{name}: rows of {dtype} and caches of {', '.join(sorted(map(str, dtypes)))} with "
            f"scales {found} and heads of {key_cache.size(-1)} elements: caches must have one "
            f"dtype with the rows, or be {NARROW} with scales [4, {heads}] and heads of an even "
            "number of elements."
        )


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
