"""Tiles of weights that are kept in fewer bits (`quantised_weight.py`), for the matrix units.

A weight row is read as units of 16 bits, which hold two or four numbers, and the inputs as words of
as many. Part p of a tile are the units' p-th numbers, and multiplies the words' p-th inputs: so
numbers are widened in the registers in which they arrive, two at a time, and no thread gives any to
another. The weight is the left operand, which alone may come from registers on Hopper.

Numbers become 16-bit ones without a table, by their bits and one exact operation:

- INT4 are the lowest bits of 128 (bfloat16) or 1024 (float16, less that). What is still too much,
  the zero and 128, is taken from the sums, as often as the inputs' sum says: 1024 would cost them
  10 of their 24 bits;
- FP8 and FP4 are sign, exponent and mantissa of a number 2^120 or 2^126 times as small (2^8 or 2^14
  in float16), also of subnormal ones, times that.

A scale of as many inputs as a step of the loop has multiplies the step's float32 sum. A scale of
fewer multiplies the numbers: exact for FP4 in bfloat16, else rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.linear.quantised_weight import Form, QuantisedWeight

STEP = 128
"""Inputs of a step of the loop."""
LEAST_STEP = 64
"""Fewest inputs of a step: 16 units of four numbers, which matrix units multiply by."""


def step_of(form: Form) -> int:
    """Inputs of a step of the loop: of one scale, if there are enough."""
    return form.inputs if LEAST_STEP <= form.inputs < STEP else STEP


def may_be_loaded(form: Form, dtype: torch.dtype) -> bool:
    """Whether the kernels know the form, and products in the dtype."""
    known = form.inputs == 0 or (form.inputs >= 16 and form.inputs & (form.inputs - 1) == 0)
    return known and dtype in (torch.bfloat16, torch.float16)


def numbers_of_unit(form: Form) -> int:
    """Numbers in 16 bits."""
    return 16 // form.bits


def kept_operands(weight: Tensor | QuantisedWeight) -> tuple[Tensor, dict[str, Any]]:
    """A weight's numbers, and by name what else kernels take of it: scales, zeros and outer scales
    (another tensor stands in for one that is missing), and the form, a compile-time constant."""
    if not isinstance(weight, QuantisedWeight):
        return weight, {"kept": None, "form": None}
    scales = weight.scales
    zeros = scales if weight.zeros is None else weight.zeros
    outer = scales if weight.outer is None else weight.outer
    return weight.codes, {"kept": (scales, zeros, outer), "form": weight.form}


def check_kept(name: str, x: Tensor, weight: QuantisedWeight) -> None:
    """ValueError where the kernels cannot read a weight, or rows, in whole words."""
    word = numbers_of_unit(weight.form) * x.itemsize
    strided = x.data_ptr() % word or x.stride(0) * x.itemsize % word
    if strided or x.size(1) * weight.form.bits % 16 or weight.codes.data_ptr() % 2:
        raise ValueError(
            f"{name}: of a weight with {weight.form.words}, rows must begin at multiples of {word} "
            f"bytes and hold whole words; found {tuple(x.shape)}, strides {x.stride()}."
        )
    if not may_be_loaded(weight.form, x.dtype):
        raise ValueError(
            f"{name}: weights with {weight.form.words} do not multiply rows of {x.dtype}."
        )


@triton.jit
def stored_scale(stored: tl.tensor) -> tl.tensor:
    """Float32 of stored scales; bytes are exponents: 2^(byte - 127)."""
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.int32)
        bits = tl.where(bits == 0, 1 << 22, bits << 23)
        return bits.to(tl.float32, bitcast=True)
    return stored.to(tl.float32)


@triton.constexpr_function
def _nibbles_code(part: int, base: int) -> str:
    double = base << 16 | base
    return (
        f"{{ .reg .b32 t; shr.u32 t, $1, {4 * part}; "
        f"lop3.b32 $0, t, 0x000f000f, {double:#x}, 0xea; }}"
    )


@triton.constexpr_function
def _float_code(up: int, down: int, bits: int) -> str:
    double = bits << 16 | bits
    if up:
        moved = f"shl.b32 s, $1, {up}; shr.u32 t, s, {down};"
    else:
        moved = f"mov.b32 s, $1; shr.u32 t, s, {down};"
    return (
        f"{{ .reg .b32 s, t; {moved} and.b32 t, t, {double:#x}; "
        "lop3.b32 $0, s, 0x80008000, t, 0xea; }"
    )


@triton.jit
def _in_pairs(units: tl.tensor, code: tl.constexpr) -> tl.tensor:
    return tl.inline_asm_elementwise(code, "=r,r", [units], dtype=tl.int16, is_pure=True, pack=2)


@triton.jit
def _as_numbers(bits: tl.tensor, dtype: tl.constexpr, in_pairs: tl.constexpr) -> tl.tensor:
    """Numbers of these bits; in float32, which the interpreter computes with, if not `in_pairs`."""
    if not in_pairs and dtype == tl.bfloat16:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    numbers = bits.to(tl.int16).to(dtype, bitcast=True)
    return numbers if in_pairs else numbers.to(tl.float32)


@triton.jit
def _integers(
    units: tl.tensor, part: tl.constexpr, dtype: tl.constexpr, in_pairs: tl.constexpr
) -> tl.tensor:
    """INT4 numbers of a part, more by 128 (bfloat16) or 1024 (float16)."""
    base: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
    if in_pairs:
        code: tl.constexpr = _nibbles_code(part, base)
        found = _in_pairs(units, code)
    else:
        found = ((units >> (4 * part)) & 15) | base
    return _as_numbers(found, dtype, in_pairs)


@triton.jit
def _floats(
    units: tl.tensor,
    part: tl.constexpr,
    bits: tl.constexpr,
    dtype: tl.constexpr,
    in_pairs: tl.constexpr,
) -> tl.tensor:
    """FP8 or FP4 numbers of a part."""
    mantissa: tl.constexpr = 7 if dtype == tl.bfloat16 else 10
    own: tl.constexpr = 3 if bits == 8 else 1
    # Sign to the top, then all but the sign to the mantissa's end.
    up: tl.constexpr = 16 - bits * (part + 1)
    down: tl.constexpr = 16 - bits - (mantissa - own)
    kept: tl.constexpr = ((1 << (bits - 1)) - 1) << (mantissa - own)
    if in_pairs:
        code: tl.constexpr = _float_code(up, down, kept)
        found = _in_pairs(units, code)
    else:
        wide = (units.to(tl.int32) & 0xFFFF) << up
        found = (wide & 0x8000) | ((wide >> down) & kept)
    small = _as_numbers(found, dtype, in_pairs)
    bias: tl.constexpr = 127 if dtype == tl.bfloat16 else 15
    factor: tl.constexpr = 2.0 ** (bias - (7 if bits == 8 else 1))
    return small * tl.full((), factor, tl.float32).to(small.dtype)


@triton.jit
def _expanded(small: tl.tensor, times: tl.constexpr) -> tl.tensor:
    """`[.., n, g]` -> `[.., n, g * times]`, each number `times` times."""
    n: tl.constexpr = small.shape[-2]
    groups: tl.constexpr = small.shape[-1]
    if len(small.shape) == 2:
        wide = tl.broadcast_to(small[:, :, None], (n, groups, times))
        expanded = tl.reshape(wide, (n, groups * times))
    else:
        shares: tl.constexpr = small.shape[0]
        wide = tl.broadcast_to(small[:, :, :, None], (shares, n, groups, times))
        expanded = tl.reshape(wide, (shares, n, groups * times))
    return expanded


@triton.jit
def load_tile(
    units: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    part: tl.constexpr,
    form: tl.constexpr,
    scaled: tl.constexpr,
    dtype: tl.constexpr,
    in_pairs: tl.constexpr,
) -> tl.tensor:
    """A part of loaded units, `[.., n, u]`, in `dtype`; if `scaled`, times the scale of its group.

    Args:
        units: int16 `[.., n, u]`.
        scale, zero: `[.., n, u]` of dtype, the zero of INT4 alone, more by 128 or 1024; read if
            `scaled`. Else INT4 numbers are more by the zero, and by 128 in bfloat16.
    """
    if form.numbers == "INT4":
        numbers = _integers(units, part, dtype, in_pairs)
        if scaled:
            numbers = numbers - zero.to(numbers.dtype)
        elif dtype == tl.float16:
            numbers = numbers - tl.full((), 1024, tl.float32).to(numbers.dtype)
    else:
        bits: tl.constexpr = 8 if form.numbers == "FP8" else 4
        numbers = _floats(units, part, bits, dtype, in_pairs)
    if scaled:
        numbers = numbers * scale.to(numbers.dtype)
    return numbers.to(dtype)


@triton.jit
def _places(
    row: tl.tensor, stride: tl.tensor, wide: tl.constexpr, shares: tl.constexpr
) -> tl.tensor:
    """Offsets of `wide` elements of each row, `[r, wide]`; of several shares, which follow each
    other, `[shares, r, wide]`."""
    column = tl.arange(0, wide)
    if shares == 1:
        places = row[:, None] * stride + column[None, :]
    else:
        share = tl.arange(0, shares) * wide
        places = row[None, :, None] * stride + share[:, None, None] + column[None, None, :]
    return places


@triton.jit
def _loaded(
    source: tl.tensor,
    is_row: tl.tensor,
    left: tl.tensor,
    wide: tl.constexpr,
    shares: tl.constexpr,
    even: tl.constexpr,
) -> tl.tensor:
    """What is at `_places`: zeros where no row is, and, if not `even`, where nothing is left."""
    mask = is_row[:, None] if shares == 1 else is_row[None, :, None]
    if not even:
        mask = mask & (_places(tl.zeros((1,), tl.int32), 0, wide, shares) < left)
    return tl.load(source, mask=mask, other=0)


@triton.jit
def _numbers_of_groups(
    start: tl.tensor,
    own: tl.tensor,
    begin: tl.tensor,
    k: tl.constexpr,
    inputs: tl.constexpr,
    block_k: tl.constexpr,
    shares: tl.constexpr,
) -> tl.tensor:
    """Scales or zeros of a step that begins with input `begin`: `[n]` or `[shares, n]`; where there
    are several for a share, `[n, g]` or `[shares, n, g]`."""
    groups: tl.constexpr = block_k // inputs if block_k > inputs else 1
    each: tl.constexpr = block_k // groups
    column = tl.arange(0, groups) * each
    if shares == 1:
        first = tl.minimum(begin + column, k - 1)
        place = own[:, None] + (first // inputs)[None, :]
    else:
        first = begin + tl.arange(0, shares)[:, None] * block_k + column[None, :]
        place = own[None, :, None] + (tl.minimum(first, k - 1) // inputs)[:, None, :]
    return tl.load(start + place)


@triton.jit
def kept_sums(
    x: tl.tensor,
    x_stride: tl.tensor,
    batch: tl.tensor,
    exists: tl.tensor,
    codes: tl.tensor,
    kept: tl.tuple,
    first: tl.tensor,
    here: tl.tensor,
    up: tl.tensor,
    nth: tl.tensor,
    splits: tl.constexpr,
    k: tl.constexpr,
    form: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    shares: tl.constexpr,
    gated: tl.constexpr,
    in_pairs: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Rows of x times `block_n` weight rows over a part of the inputs, on the matrix units.

    Args:
        x, x_stride: rows of 16-bit inputs; a multiple of a word's.
        batch: numbers of the rows, `[m]`, where they `exists`.
        codes, kept: of a weight, from `kept_operands`; scales begin where `codes` do.
        first, here: the first weight row, and how many there are, at most `block_n`.
        up: the up rows of `gated` are so many rows behind.
        nth, splits: the part's number, and how many there are, each of whole steps.
        block_k: inputs of a share of a step: a power of two, of one scale or of whole ones.
        shares: of a step. Each is added up by itself, by a warp or more: so few outputs have many
            warps, which wait less.
        in_pairs: two numbers are widened at a time, by PTX; else by the same steps in Triton.

    Returns:
        `[block_n, m]`, float32, and those of the up rows, or zeros.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    scales, zeros, outer = kept
    per: tl.constexpr = 2 if form.numbers == "FP8" else 4
    inputs: tl.constexpr = form.inputs if form.inputs > 0 else k
    groups: tl.constexpr = (k + inputs - 1) // inputs
    scaled: tl.constexpr = inputs < block_k
    by_step: tl.constexpr = form.inputs > 0 and not scaled
    step: tl.constexpr = block_k * shares
    wide: tl.constexpr = block_k // per
    length: tl.constexpr = (k + splits * step - 1) // (splits * step) * step
    even: tl.constexpr = k % (splits * step) == 0
    m: tl.constexpr = batch.shape[0]
    shape: tl.constexpr = (block_n, m) if shares == 1 else (shares, block_n, m)
    begin = nth * length
    end = tl.minimum(k - begin, length)
    inside = tl.arange(0, block_n) < here
    row = first + tl.where(inside, tl.arange(0, block_n), 0)
    units = codes.to(tl.pointer_type(tl.int16)) + nth * (length // per)
    cells = units + _places(row.to(tl.int64), k // per, wide, shares)
    up_cells = units + _places((row + up).to(tl.int64), k // per, wide, shares)
    words = x.to(tl.pointer_type(tl.int64 if per == 4 else tl.int32)) + nth * (length // per)
    source = words + _places(batch.to(tl.int64), x_stride // per, wide, shares)
    own = (row // form.rows) * groups
    up_own = ((row + up) // form.rows) * groups
    sums = tl.zeros(shape, tl.float32)
    up_sums = tl.zeros(shape, tl.float32)
    if by_step:  # a step ahead: the matrix units' products do not wait for them
        coming = _numbers_of_groups(scales, own, begin, k, inputs, block_k, shares)
        if gated:
            up_coming = _numbers_of_groups(scales, up_own, begin, k, inputs, block_k, shares)
    for at in range(0, end, step):
        left = (end - at + per - 1) // per
        w = _loaded(cells + at // per, inside, left, wide, shares, even)
        if gated:
            u = _loaded(up_cells + at // per, inside, left, wide, shares, even)
        v = _loaded(source + at // per, exists, left, wide, shares, even)
        if by_step:
            scale = coming
            after = begin + at + step
            coming = _numbers_of_groups(scales, own, after, k, inputs, block_k, shares)
            if gated:
                up_scale = up_coming
                up_coming = _numbers_of_groups(scales, up_own, after, k, inputs, block_k, shares)
        factor, zero = _of_step(
            scales, zeros, own, begin + at, k, inputs, block_k, shares, form, scaled, dtype
        )
        ups, up_zero = factor, zero
        if gated:
            ups, up_zero = _of_step(
                scales, zeros, up_own, begin + at, k, inputs, block_k, shares, form, scaled, dtype
            )
        # A scale of all inputs comes last: then there is one sum.
        product = tl.zeros(shape, tl.float32) if by_step else sums
        up_product = tl.zeros(shape, tl.float32) if by_step else up_sums
        added = tl.zeros(shape, tl.float32)
        for part in tl.static_range(per):
            some = (v >> (16 * part)).to(tl.int16).to(dtype, bitcast=True)
            some = tl.trans(some) if shares == 1 else tl.trans(some, 0, 2, 1)
            numbers = load_tile(w, factor, zero, part, form, scaled, dtype, in_pairs)
            product = tl.dot(numbers, some, product)
            if form.numbers == "INT4" and not scaled:
                added = tl.dot(tl.full(numbers.shape, 1.0, tl.float32).to(dtype), some, added)
            if gated:
                numbers = load_tile(u, ups, up_zero, part, form, scaled, dtype, in_pairs)
                up_product = tl.dot(numbers, some, up_product)
        if form.numbers == "INT4" and not scaled:
            product -= added * zero
            up_product -= added * up_zero
        if by_step:
            sums += product * stored_scale(scale)
            if gated:
                up_sums += up_product * stored_scale(up_scale)
        else:
            sums = product
            up_sums = up_product
    if shares > 1:
        sums, up_sums = tl.sum(sums, 0), tl.sum(up_sums, 0)
    if form.inputs == 0:
        sums = sums * stored_scale(tl.load(scales + own))[:, None]
        if gated:
            up_sums = up_sums * stored_scale(tl.load(scales + up_own))[:, None]
    if form.has_outer:
        sums = sums * tl.load(outer + row)[:, None]
        if gated:
            up_sums = up_sums * tl.load(outer + up + row)[:, None]
    return sums, up_sums


@triton.jit
def _of_step(
    scales: tl.tensor,
    zeros: tl.tensor,
    own: tl.tensor,
    begin: tl.tensor,
    k: tl.constexpr,
    inputs: tl.constexpr,
    block_k: tl.constexpr,
    shares: tl.constexpr,
    form: tl.constexpr,
    scaled: tl.constexpr,
    dtype: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Scales and zeros of a step: as `load_tile` reads them if `scaled`; else zeros as they are
    subtracted from sums."""
    per: tl.constexpr = 2 if form.numbers == "FP8" else 4
    base: tl.constexpr = 128.0 if dtype == tl.bfloat16 else (1024.0 if scaled else 0.0)
    factor, zero = own, base + 8
    if scaled:
        found = _numbers_of_groups(scales, own, begin, k, inputs, block_k, shares)
        factor = _expanded(stored_scale(found).to(dtype), inputs // per)
        zero = tl.full((), base + 8, tl.float32)
    if form.has_zeros:
        zero = _numbers_of_groups(zeros, own, begin, k, inputs, block_k, shares).to(tl.float32)
        zero = zero + base
        if scaled:
            zero = _expanded(zero.to(dtype), inputs // per)
    return factor, zero


@triton.jit
def kept_of_matrix(
    kept: tl.tuple, matrix: tl.tensor, n: tl.constexpr, k: tl.constexpr, form: tl.constexpr
) -> tl.tuple:
    """Scales, zeros and outer scales of one matrix `[n, k]` of several, a 64-bit number."""
    scales, zeros, outer = kept
    groups: tl.constexpr = (k + form.inputs - 1) // form.inputs if form.inputs > 0 else 1
    past = matrix * ((n + form.rows - 1) // form.rows * groups)
    return scales + past, zeros + past, outer + matrix * n
