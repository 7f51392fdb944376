"""Tiles of weights that are kept in fewer bits (`quantised_weight.py`), for the matrix units.

A weight row is read as units of 16 bits, which hold two or four numbers, and the inputs as words of
as many. Part p of a tile are the units' p-th numbers, and multiplies the words' p-th inputs: so
numbers are widened in the registers in which they arrive, two at a time, and no thread gives any to
another. The weight is the left operand, which alone may come from registers on Hopper.

Numbers become 16-bit ones without a table, by their bits and one exact operation:

- INT4 are the lowest bits of 128 (bfloat16) or 1024 (float16), less that and the zero;
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
    return small * tl.full((1, 1), factor, tl.float32).to(small.dtype)


@triton.jit
def _expanded(small: tl.tensor, times: tl.constexpr) -> tl.tensor:
    """`[n, g]` -> `[n, g * times]`, each number `times` times."""
    n: tl.constexpr = small.shape[0]
    groups: tl.constexpr = small.shape[1]
    if times == 1:
        return small
    wide = tl.broadcast_to(small[:, :, None], (n, groups, times))
    return tl.reshape(wide, (n, groups * times))


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
    """A part of loaded units, `[n, u]`, in `dtype`; if `scaled`, times the scale of its group.

    Args:
        units: int16 `[n, u]`.
        scale: `[n, u]`, dtype; read if `scaled`.
        zero: `[n, 1]` or `[n, u]`, dtype, as many less 128 or 1024; read if the form has zeros.
    """
    if form.numbers == "INT4":
        base: tl.constexpr = 128 if dtype == tl.bfloat16 else 1024
        numbers = _integers(units, part, dtype, in_pairs)
        if form.has_zeros:
            numbers = numbers - zero.to(numbers.dtype)
        else:
            numbers = numbers - tl.full((1, 1), base + 8, tl.float32).to(numbers.dtype)
    else:
        bits: tl.constexpr = 8 if form.numbers == "FP8" else 4
        numbers = _floats(units, part, bits, dtype, in_pairs)
    if scaled:
        numbers = numbers * scale.to(numbers.dtype)
    return numbers.to(dtype)


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
    gated: tl.constexpr,
    in_pairs: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Rows of x times `block_n` weight rows over a share of the inputs, on the matrix units.

    Args:
        x, x_stride: rows of 16-bit inputs; a multiple of a word's.
        batch: numbers of the rows, `[m]`, where they `exists`.
        codes, kept: of a weight, from `kept_operands`; scales begin where `codes` do.
        first, here: the first weight row, and how many there are, at most `block_n`.
        up: the up rows of `gated` are so many rows behind.
        nth, splits: the share's number, and how many there are, each of whole `block_k`.
        block_k: inputs at a time: a power of two, of one scale or of whole ones.
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
    share: tl.constexpr = (k + splits * block_k - 1) // (splits * block_k) * block_k
    even: tl.constexpr = k % (splits * block_k) == 0
    m: tl.constexpr = batch.shape[0]
    begin = nth * share
    length = tl.minimum(k - begin, share)
    line = tl.arange(0, block_n)
    inside = line < here
    unit = tl.arange(0, block_k // per)
    row = first + tl.where(inside, line, 0)
    units = codes.to(tl.pointer_type(tl.int16)) + nth * (share // per)
    cells = units + row.to(tl.int64)[:, None] * (k // per) + unit[None, :]
    up_cells = cells + up.to(tl.int64) * (k // per)
    if per == 4:
        words = x.to(tl.pointer_type(tl.int64)) + nth * (share // per)
    else:
        words = x.to(tl.pointer_type(tl.int32)) + nth * (share // per)
    source = words + batch.to(tl.int64)[:, None] * (x_stride // per) + unit[None, :]
    own = (row // form.rows) * groups
    up_own = ((up + row) // form.rows) * groups
    sums = tl.zeros((block_n, m), tl.float32)
    up_sums = tl.zeros((block_n, m), tl.float32)
    by_step: tl.constexpr = form.inputs > 0 and not scaled
    if by_step:  # a step ahead: the matrix units' products do not wait for them
        next_scale = tl.load(scales + own + begin // inputs)
        if gated:
            next_up = tl.load(scales + up_own + begin // inputs)
    for at in range(0, length, block_k):
        cell_mask, row_mask = inside[:, None], exists[:, None]
        if not even:
            left = (unit * per < length - at)[None, :]
            cell_mask, row_mask = cell_mask & left, row_mask & left
        w = tl.load(cells + at // per, mask=cell_mask, other=0)
        if gated:
            u = tl.load(up_cells + at // per, mask=cell_mask, other=0)
        v = tl.load(source + at // per, mask=row_mask, other=0)
        if by_step:
            scale = next_scale
            after = tl.minimum(begin + at + block_k, k - 1) // inputs
            next_scale = tl.load(scales + own + after)
            if gated:
                up_scale = next_up
                next_up = tl.load(scales + up_own + after)
        group = (begin + at) // inputs
        factor, zero = _of_step(scales, zeros, own, group, groups, block_k, form, scaled, dtype)
        if gated:
            ups, up_zero = _of_step(
                scales, zeros, up_own, group, groups, block_k, form, scaled, dtype
            )
        product = tl.zeros((block_n, m), tl.float32)
        up_product = tl.zeros((block_n, m), tl.float32)
        for part in tl.static_range(per):
            some = tl.trans((v >> (16 * part)).to(tl.int16).to(dtype, bitcast=True))
            numbers = load_tile(w, factor, zero, part, form, scaled, dtype, in_pairs)
            product = tl.dot(numbers, some, product)
            if gated:
                numbers = load_tile(u, ups, up_zero, part, form, scaled, dtype, in_pairs)
                up_product = tl.dot(numbers, some, up_product)
        if by_step:
            sums += product * stored_scale(scale)[:, None]
            if gated:
                up_sums += up_product * stored_scale(up_scale)[:, None]
        else:
            sums += product
            up_sums += up_product
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
    group: tl.tensor,
    groups: tl.constexpr,
    block_k: tl.constexpr,
    form: tl.constexpr,
    scaled: tl.constexpr,
    dtype: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Scales and zeros of a step's units, where `load_tile` reads them."""
    base: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
    factor, zero = own, own
    if scaled:
        per: tl.constexpr = 2 if form.numbers == "FP8" else 4
        nth = group + tl.arange(0, block_k // form.inputs)
        place = own[:, None] + tl.minimum(nth, groups - 1)[None, :]
        factor = _expanded(stored_scale(tl.load(scales + place)).to(dtype), form.inputs // per)
        if form.has_zeros:
            zero = (tl.load(zeros + place).to(tl.float32) + base).to(dtype)
            zero = _expanded(zero, form.inputs // per)
    elif form.has_zeros:
        nearest = tl.load(zeros + own + group)[:, None]
        zero = (nearest.to(tl.float32) + base).to(dtype)
    return factor, zero
