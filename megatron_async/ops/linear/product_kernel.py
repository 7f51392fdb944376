"""What a product of few rows is asked for, and what a kernel of such products is.

Each kernel's file has its plan (how the product is laid out, and when the kernel is chosen), its
launch, and its row of the table in `ops/linear/products.py`. The plans depend on the number of
rows, the shape of the weight, the dtype and the device only, so a captured step and an eager one of
as many rows agree. Their constants are measurements on an H200 (docs/records/products.md): sweeps
of SmolLM2's and Llama-3.1-8B's shapes at 1, 16 and 64 rows, and for weights that wait in registers
or in shared memory of shapes of SmolLM2, Granite-4.0-H-350M, Qwen3-0.6B and Llama-3.2-1B at 2 to
64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_async.ops.linear.quantised_weight import Form, QuantisedWeight
from megatron_async.ops.linear.stream import Stream

Activation = Literal["", "swiglu", "squared_relu"]
"""The activation after a product."""

PROCESSORS = 132
"""Processors of an H100 or H200: programs beyond this many, each with a deep pipeline, queue up."""
WIDE = 16384
"""Outputs from which on a product is a vocabulary's: not `warpgroup_kernel`'s, and beyond one row
cuBLAS's if weights are short and not resident."""
WHOLE_ROW = 2048
"""One-row kernel: a weight row of up to this many elements is loaded before the wait."""
NORM_WIDTH = 2048
"""Longest input that every program of the one-row kernel normalises again. At 4096 that costs
2 us a product, and a kernel of its own 1 us."""
MAX_ROWS = 64
"""More rows go to cuBLAS, but for products of narrow models (`warpgroup.py`) and long rows
(`streamed.py`); in one order of sums to cuBLASLt (`cublas_lt.py`)."""


class Wants(NamedTuple):
    """What a caller wants of one product, besides the product.

    Attributes:
        rows: of the input.
        norm: residual add and RMSNorm before it, of whole rows.
        squares: groups of elements whose sums of squares the input comes with, to be divided by; 0:
            none.
        residual: the product is added to the residual stream.
        rotate: elements of a head, of a qkv product whose queries and keys are rotated, and whose
            keys and values are appended to the cache; 0: not.
        activation: after the product.
        split: partial sums may be returned.
        bias: one is added.
        adapter: the name of a small product beside this one, of the same input.
        invariant: the bits of a row may not depend on the number of rows.
        parts: the rows before the norm are partial sums.
        rounded: the activation's rows are rounded to FP8 for the next product.
    """

    rows: int
    norm: bool = False
    squares: int = 0
    residual: bool = False
    rotate: int = 0
    activation: Activation = ""
    split: bool = False
    bias: bool = False
    adapter: str | None = None
    invariant: bool = False
    parts: bool = False
    rounded: bool = False


class Problem(NamedTuple):
    """What rules read of a product: `[rows, k]` by a weight of `outputs`, or twice as many if
    `gated` (SwiGLU follows).

    Attributes:
        split: the caller takes partial sums.
        norm: the kernel computes the norm too, if it can.
        aligned: rows of both begin at multiples of 16 bytes, as the copy engine wants it.
        invariant: the inputs are added up in one order for any number of rows.
        form: of the weight, if it is kept in fewer bits.
    """

    rows: int
    outputs: int
    k: int
    dtype: torch.dtype
    gated: bool
    split: bool
    norm: bool
    aligned: bool
    invariant: bool = False
    form: Form | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


class Rounding(NamedTuple):
    """Where a kernel rounds. Kernels of one rounding give the same bits for the same numbers.

    Attributes:
        order: in which the products along the inputs are added up, in float32.
        factor: what the norm's factor multiplies: "rows" (rounded before the product) or "sums".
    """

    order: str
    factor: Literal["rows", "sums"]


IN_ORDER = Rounding("16 at a time, in order", "rows")
"""Rounding of the matrix units' sums that are not split, of 16-bit numbers: `mma.sync` and `wgmma`
have one, whatever the tile (docs/records/one_order.md)."""


@dataclass(frozen=True)
class ProductKernel:
    """One kernel of the table.

    Attributes:
        name: as programs are printed.
        plan: the layout for a problem; None: another kernel's.
        served: names of the extra `Wants` that it serves, of (problem, wants, plan).
        launch: `product` of (x, weight, bias, activation, plan), and by name what is served of
            `added`, `places` and `rounded`.
    """

    name: str
    plan: Callable[[Problem], Any]
    served: Callable[[Problem, Wants, Any], set[str]]
    launch: Callable[..., Tensor]
    rounding: Rounding


class Operands:
    """A product's rows, bias and sums of squares as kernels take them: another tensor stands in for
    one that is missing.

    Attributes:
        rows: `[rows, k]`.
        dtype: of the product.
        outputs: number of the product's.
        squares, parts: sums of squares, and how many a row has; 0: there are none.
        eps: of the norm, or of what the squares give.
        constants: of kernels: which activation follows the product, and whether a bias.

    Raises:
        ValueError: what would read or write the wrong memory.
    """

    def __init__(
        self,
        x: Tensor | Stream,
        weight: Tensor | QuantisedWeight,
        bias: Tensor | None,
        activation: Activation,
    ) -> None:
        if isinstance(x, Stream):
            self.rows, self.eps = x.value, x.eps
            self.squares, self.parts = _squares_of(x, activation)
        else:
            self.rows = self.squares = x
            self.parts, self.eps = 0, 0.0
        self.outputs, self.dtype = _outputs_of(self.rows, weight, bias, activation), weight.dtype
        codes = weight.codes if isinstance(weight, QuantisedWeight) else weight
        self.bias = codes if bias is None else bias
        self.constants = {
            "gated": activation == "swiglu",
            "squared": activation == "squared_relu",
            "has_bias": bias is not None,
        }


def may_be_copied(rows: Tensor) -> bool:
    """Whether the copy engine takes these rows, `[rows, elements]`: each must begin at a multiple
    of 16 bytes."""
    return rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.itemsize % 16 == 0


def check_copied(name: str, x: Tensor, weight: Tensor) -> None:
    """Refuse operands that the copy engine does not take."""
    if not may_be_copied(x) or not may_be_copied(weight):
        raise ValueError(
            f"{name}: rows of x and weight must begin at multiples of 16 bytes; found "
            f"strides {x.stride()} and {weight.stride()}."
        )


def new_sums(x: Tensor, outputs: int, splits: int, dtype: torch.dtype | None = None) -> Tensor:
    """A place for a product of x: `[rows, outputs]` of a dtype, or x's, or, float32, `[splits,
    rows, outputs]`."""
    if splits > 1:
        return torch.empty((splits, x.size(0), outputs), dtype=torch.float32, device=x.device)
    return torch.empty((x.size(0), outputs), dtype=dtype or x.dtype, device=x.device)


def norm_of(x: Tensor | Stream, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The residual of a `Stream`, its norm's weight, and a place for the new residual, which it is
    given; x and the weight where there is none."""
    if not isinstance(x, Stream):
        return x, weight, x
    rows, residual, norm_weight, _ = x.norm_arguments
    if norm_weight.shape != rows.shape[1:] or not norm_weight.is_contiguous():
        raise ValueError(
            f"product: the norm's weight is {tuple(norm_weight.shape)}, strides "
            f"{norm_weight.stride()}; it must be ({rows.size(1)},), contiguous."
        )
    if residual is None:
        x.total = rows
        return rows, norm_weight, rows
    if residual.shape != rows.shape or residual.stride(1) != 1:
        raise ValueError(
            f"product: residual is {tuple(residual.shape)}; it must be like x, "
            f"{tuple(rows.shape)}, its elements adjacent."
        )
    x.total = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    return residual, norm_weight, x.total


def _squares_of(x: Stream, activation: Activation) -> tuple[Tensor, int]:
    """Sums of squares, and the parts of a row's; the rows and 0 where there are none."""
    squares, rows = x.squares, x.value
    if squares is None:
        return rows, 0
    fits = squares.dim() == 3 and squares.shape[:2] == (rows.size(0), 1) and squares.is_contiguous()
    if not fits or squares.dtype != torch.float32 or x.residual is not None or activation:
        raise ValueError(
            f"product: squares must be float32 [{rows.size(0)}, 1, parts], contiguous, "
            "without a residual or an activation; found "
            f"{squares.dtype} {tuple(squares.shape)}, residual {x.residual is not None}, "
            f"activation {activation!r}."
        )
    return squares, squares.size(2)


def added_to(given: Operands, added: Tensor | None) -> Tensor:
    """What a product of one row is added to, if it fits; the row where there is nothing."""
    row, n = given.rows, given.outputs
    if added is None:
        return row
    if added.shape != (1, n) or added.dtype != row.dtype or added.stride(1) != 1:
        raise ValueError(
            f"product: what is added must be (1, {n}) of {row.dtype}, its elements adjacent; "
            f"found {tuple(added.shape)} of {added.dtype}, strides {added.stride()}."
        )
    return added


def _outputs_of(
    x: Tensor, weight: Tensor | QuantisedWeight, bias: Tensor | None, activation: Activation
) -> int:
    """Number of outputs."""
    gated = activation == "swiglu"
    n = weight.size(0) // 2 if gated else weight.size(0)
    if x.dim() != 2 or weight.dim() != 2 or x.size(1) != weight.size(1):
        raise ValueError(
            f"product: x must be [rows, k] and weight [outputs, k]; found {tuple(x.shape)} "
            f"and {tuple(weight.shape)}."
        )
    is_rounded = isinstance(weight, QuantisedWeight) and x.dtype == weight.codes.dtype
    same = x.dtype == weight.dtype or is_rounded
    if not same or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"product: x ({x.dtype}, strides {x.stride()}) and weight ({weight.dtype}) must have "
            "one dtype, the elements of a row of x be adjacent and weight be contiguous: call "
            ".contiguous()."
        )
    if gated and weight.size(0) % 2:
        raise ValueError(f"product: {weight.size(0)} weight rows are not [gate; up].")
    if bias is not None and (activation or bias.shape != (n,) or not bias.is_contiguous()):
        raise ValueError(
            f"product: bias must be ({n},), without activation; found {tuple(bias.shape)}, "
            f"{activation!r}."
        )
    return n
