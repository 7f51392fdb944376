"""Keys and values in 8 bits: how a cache stores them, by a scale for each KV head.

A key is stored as e4m3 (4 bits of exponent, 3 of mantissa, no infinity) of the key over the scale
of its head, and read back times the scale; so are values. Attention widens the stored numbers,
which is exact, and multiplies as it does with a cache of the model's dtype. The scale of the keys
goes to the scores, the scale of the values to the output. Scales are those of checkpoints: the
largest number that was met over 448, or 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.errors import ConfigurationError

NARROW = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest number of e4m3. A larger one is stored as this one; torch's cast alone gives NaN."""
KEYS, VALUES, INVERSE = 0, 1, 2
"""Rows of `scales_of`: the scales, and from `INVERSE` on one over each."""


_NUMBERS = torch.arange(256, dtype=torch.uint8, device="cpu").view(NARROW).to(torch.float32)
"""Numbers of all bytes."""


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
    if x.is_cpu:
        # 0.7 ns a number, where torch's cast takes 3.
        codes = x.view(torch.uint8).flatten().to(torch.int32)
        wide = _NUMBERS.index_select(0, codes).view(x.shape)
    else:
        wide = x.to(torch.float32)
    return wide.mul_(scales[of, :, None]).to(dtype)


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
