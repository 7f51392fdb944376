"""Weights that a device keeps in fewer bits than the model's dtype: FP8 and 4-bit numbers, with
scales.

Numbers are in the order that kernels read, whatever the files' order was (`stored_weight.py`): rows
of outputs, inputs adjacent, of two numbers in a byte the even input in the low half. A kernel reads
them by the `Form`, which is a compile-time constant there.

    weight[n, k] = (code[n, k] - zero) * scale[n // rows, k // inputs] * outer[n]

With FP8 weights, input rows may be rounded to FP8 too: for each 128 inputs of a row a scale of its
own (DeepSeek-V3, arXiv 2412.19437), or one scale of the file for all rows. So no row depends on
another one. Products are then exact up to float32's sums, which begin anew every 128 inputs: the
matrix units' own sums of FP8 products keep 14 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_async.ops.linear.stored_formats import E2M1

Numbers = Literal["FP8", "FP4", "INT4"]
BLOCK = 128
"""Inputs of a row that are rounded by one scale, and outputs and inputs of a block of a weight."""
E4M3_MAX = 448.0
LEAST_MAXIMUM = 1e-10
"""The least that the largest input of 128 is taken for, so that zeros can be divided."""


class Form(NamedTuple):
    """How a weight is kept.

    Attributes:
        numbers: FP8 (E4M3), FP4 (E2M1) or INT4 (0 to 15).
        rows: outputs that a scale covers: 1 or `BLOCK`.
        inputs: that a scale covers; 0: all.
        has_zeros: each scale has a zero; else it is 8 for INT4, 0 for others.
        has_outer: each output has a further factor.
        rounds_rows: input rows are rounded to FP8.
    """

    numbers: Numbers
    rows: int = 1
    inputs: int = 0
    has_zeros: bool = False
    has_outer: bool = False
    rounds_rows: bool = False

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return 8 if self.numbers == "FP8" else 4

    @property
    def words(self) -> str:
        """The form, in words."""
        if self.rows > 1:
            scales = f"blocks of {self.rows} x {self.inputs}"
        else:
            scales = f"groups of {self.inputs}" if self.inputs else "one an output"
        return f"{self.numbers}, scales: {scales}"


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight `[n, k]`, or `[experts, n, k]`, all tensors contiguous and on one device.

    Attributes:
        codes: float8_e4m3fn `[.., n, k]`, or uint8 `[.., n, k / 2]`.
        scales: `[.., ceil(n / rows), ceil(k / inputs)]`, float32, bfloat16, float16, float8_e4m3fn,
            or uint8: exponents (E8M0).
        form: how they make the weight.
        dtype: of the model, which products give.
        zeros: uint8, like `scales`; None: see `Form`.
        outer: float32 `[.., n]`, or None.
        input_scale: float32 `[]`, by which all rows are divided; None: rows have scales of their
            own, or are not rounded.
    """

    codes: Tensor
    scales: Tensor
    form: Form
    dtype: torch.dtype
    zeros: Tensor | None = None
    outer: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """`[n, k]` or `[experts, n, k]`."""
        *lead, k = self.codes.shape
        return torch.Size((*lead, k * 8 // self.form.bits))

    def size(self, dim: int) -> int:
        """An axis of the weight, not of its codes."""
        return self.shape[dim]

    def dim(self) -> int:
        """Axes of the weight."""
        return self.codes.dim()

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.codes.device

    @property
    def is_cuda(self) -> bool:
        """Whether they are on a GPU."""
        return self.codes.is_cuda

    def is_contiguous(self) -> bool:
        """Whether all tensors are, which is so."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(each.nbytes for _, each in self.tensors())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors by name."""
        for each in fields(self):
            if isinstance(found := getattr(self, each.name), Tensor):
                yield each.name, found

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight, `[.., n, k]`, computed in float32: what kernels multiply by."""
        numbers = self._numbers()
        if self.zeros is not None:
            numbers = numbers - self._over(self.zeros.float())
        elif self.form.numbers == "INT4":
            numbers = numbers - 8
        numbers = numbers * self._over(scale_numbers(self.scales))
        if self.outer is not None:
            numbers = numbers * self.outer[..., None]
        return numbers.to(dtype)

    def rounded(self, rows: Tensor) -> Tensor:
        """Rows `[.., k]` as products take them: rounded to FP8 and back, float32, if the form says
        so; else as they are."""
        if not self.form.rounds_rows:
            return rows
        codes, scales = quantise_rows(rows, self.input_scale)
        return codes.float() * scales.repeat_interleave(BLOCK, -1)[..., : rows.size(-1)]

    def _numbers(self) -> Tensor:
        if self.form.numbers == "FP8":
            return self.codes.float()
        pairs = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(-2)
        if self.form.numbers == "INT4":
            return pairs.float()
        table = torch.tensor(E2M1, device=self.device)  # sync-ok: of a reference
        return table[pairs.int()]

    def _over(self, numbers: Tensor) -> Tensor:
        """Numbers of scales' shape, one for each number of the weight."""
        n, k = self.shape[-2:]
        if self.form.rows > 1:
            numbers = numbers.repeat_interleave(self.form.rows, -2)[..., :n, :]
        if self.form.inputs:
            numbers = numbers.repeat_interleave(self.form.inputs, -1)[..., :k]
        return numbers


def widened(weight: Tensor | QuantisedWeight) -> Tensor:
    """The weight in its dtype, of which a quantised one has no copy."""
    return weight.values(weight.dtype) if isinstance(weight, QuantisedWeight) else weight


def scale_numbers(scales: Tensor) -> Tensor:
    """Float32 of scales; bytes are exponents: 2^(byte - 127)."""
    if scales.dtype != torch.uint8:
        return scales.float()
    bits = scales.int()
    return torch.where(bits == 0, 1 << 22, bits << 23).view(torch.float32)


def quantise_rows(rows: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows in FP8: each 128 inputs divided by their largest / 448, or all by `input_scale`; beyond
    448 they are 448.

    Args:
        rows: `[.., k]`.
        input_scale: float32 `[]`, or None.

    Returns:
        float8_e4m3fn `[.., k]`, and the divisors, float32 `[.., ceil(k / 128)]`.
    """
    k = rows.size(-1)
    padded = torch.nn.functional.pad(rows.float(), (0, -k % BLOCK)).unflatten(-1, (-1, BLOCK))
    if input_scale is None:
        scales = padded.abs().amax(-1).clamp(min=LEAST_MAXIMUM) / E4M3_MAX
    else:
        scales = input_scale.float().expand(padded.shape[:-1])
    codes = (padded / scales[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2)[..., :k].contiguous(), scales.contiguous()
