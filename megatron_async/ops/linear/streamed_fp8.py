"""Product of 1 to 128 rows in FP8 by a weight in FP8: `streamed_kernel` with scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
from torch import Tensor

from megatron_async.ops.linear.product_kernel import (
    PROCESSORS,
    Activation,
    Operands,
    Problem,
    ProductKernel,
    Rounding,
    Wants,
    check_copied,
)
from megatron_async.ops.linear.quantised_weight import BLOCK, QuantisedWeight
from megatron_async.ops.linear.rms_norm import add_rms_norm_rounded
from megatron_async.ops.linear.rounded_rows import RoundedRows, round_rows, rounding_of
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.linear.streamed import (
    LEAST_ROWS,
    MORE_SHARED_MEMORY,
    ONE_WARPGROUP,
    STREAMED_ROWS,
    StreamedPlan,
    launch_streamed,
)
from megatron_async.ops.linear.strips import LINE_BYTES

LEAST_HEIGHT, MOST_HEIGHT = 16, 128
"""Outputs of a tile. Higher ones need more registers than a thread has."""
SPLIT_HEIGHT = 64
"""Outputs of a tile of a product whose inputs are split, of more than `ONE_WARPGROUP` rows: their
partial sums are many bytes. Up to 64 rows higher ones make a layer of Llama-3.1-8B's shape 84
instead of 89 us (docs/records/products.md, 2026-11-29)."""
SPLIT_ROWS = 2 * STREAMED_ROWS
"""Most rows of such a product, in two blocks. cuBLASLt splits none: 256 rows by 4,096 outputs of
14,336 inputs take it 50 us, as 512 do."""
ENOUGH_PROGRAMS = 90
"""Fewest programs of tiles that lie in one block of scales, or are whole blocks: 96 programs of 64
outputs of 4,096 took 10.0 us for 64 rows, 128 of 48 outputs 12.9."""
LEAST_STRIPS = 8
"""Fewest strips of a share."""
LEAST_CHUNKS = 3
"""Fewest chunks of two strips in a ring of at most 64 rows: SwiGLU's of 1 and 16 rows then takes 2
and 3 us less than with 6 of one strip."""
COLUMNS = 64
"""Sums of a row that a warpgroup multiplies at once: a thread holds the products of two pieces, and
all sums."""
SWAPPED_ROWS = 32
"""Most rows of a product whose weights are the matrix units' lines; more were not measured."""
MOST_COLUMNS = 128
"""Sums of a row that one warpgroup has; two share more, of up to 64 rows."""
BY_BLOCKS = Rounding("128 at a time, in order, of FP8", "rows")


def is_of_fp8(problem: Problem) -> bool:
    """Whether rows and weight of a product are in FP8, with scales that its kernels know."""
    form = problem.form
    if form is None or form.numbers != "FP8" or not form.rounds_rows:
        return False
    knows = form.inputs in (0, BLOCK) and form.rows in (1, BLOCK if form.inputs else 1)
    knows &= not form.has_outer and not form.has_zeros
    fits = problem.aligned and problem.k % BLOCK == 0 and problem.itemsize == 2
    return knows and fits and not problem.invariant


def streamed_fp8_plan(problem: Problem) -> StreamedPlan | None:
    """The layout of a product of few rows; None: another kernel's."""
    rows, outputs, k, _, gated, may_split, *_ = problem
    if not is_of_fp8(problem) or rows > (SPLIT_ROWS if may_split else STREAMED_ROWS):
        return None
    if gated and rows > ONE_WARPGROUP:
        return None  # 128 rows by Llama-3.1-8B's: 67 us, and cuBLASLt and the activation 41
    block_m = min(max(LEAST_ROWS, triton.next_power_of_2(rows)), STREAMED_ROWS)
    if may_split:
        row_blocks = triton.cdiv(rows, block_m)
        height = SPLIT_HEIGHT if ONE_WARPGROUP < rows <= STREAMED_ROWS else MOST_HEIGHT
        programs = triton.cdiv(outputs, height) * row_blocks
        splits = min(PROCESSORS // programs, k // BLOCK // LEAST_STRIPS)
        if splits > 1:
            return replace(layout(height, splits, block_m, gated, k), row_blocks=row_blocks)
        if row_blocks > 1:
            return None
    least = triton.cdiv(outputs, PROCESSORS)
    height = min(max(LEAST_HEIGHT, triton.next_power_of_2(least)), MOST_HEIGHT)
    if triton.cdiv(outputs, height) < ENOUGH_PROGRAMS:
        height = triton.cdiv(least, LEAST_HEIGHT) * LEAST_HEIGHT
    return layout(height, 1, block_m, gated, k)


def layout(height: int, splits: int, block_m: int, gated: bool, k: int) -> StreamedPlan:
    """The plan of tiles of so many outputs."""
    halves = 2 if gated else 1
    warps, columns = 0, COLUMNS
    swaps = block_m <= SWAPPED_ROWS and height % ONE_WARPGROUP == 0
    if swaps:
        warps, columns = height // 16, height * halves
    elif height * halves > MOST_COLUMNS and block_m <= ONE_WARPGROUP:
        warps, columns = 8, height * halves
    piece, pieces = triton.next_power_of_2(columns // halves), list[int]()
    while (rest := height - sum(pieces)) > 0:
        while piece > rest:
            piece //= 2
        pieces.append(piece)
    strip_bytes = (block_m + height * halves) * LINE_BYTES.value
    behind = 0 if swaps else max(ONE_WARPGROUP - block_m, 0)
    room = MORE_SHARED_MEMORY - behind * LINE_BYTES.value
    least = LEAST_CHUNKS if block_m <= ONE_WARPGROUP else LEAST_CHUNKS + 1
    strips = 2 if room // (2 * strip_bytes) >= least else 1
    chunks = triton.cdiv(triton.cdiv(k, BLOCK * strips), splits)
    ring = max(2, min(room // (strips * strip_bytes), chunks))
    return StreamedPlan(tuple(pieces), splits, strips, ring, block_m, warps=warps, swaps=swaps)


def streamed_fp8_product(
    x: Tensor | Stream,
    weight: QuantisedWeight,
    bias: Tensor | None,
    activation: Activation,
    plan: StreamedPlan,
    rounded: RoundedRows | None = None,
) -> Tensor:
    """`product` of rows that are rounded to FP8 by a weight in FP8, by a given plan, on a GPU with
    warpgroups (Hopper); partial sums if it splits. The norm of a `Stream` is done first."""
    rows, given = rounded_of(x, weight, bias, activation)
    return multiply(rows, weight, bias, activation, plan, given, rounded)


def rounded_of(
    x: Tensor | Stream,
    weight: QuantisedWeight,
    bias: Tensor | None,
    activation: Activation,
    multiple: int = 1,
) -> tuple[RoundedRows, Operands]:
    """Rows as products take them, a multiple of so many unless they are there; the norm of a
    `Stream` is done first, and its total set."""
    if not isinstance(x, Stream):
        given = Operands(x, weight, bias, activation)
        return round_rows(x, weight.input_scale, multiple), given
    if x.rounded is not None:
        return x.rounded, Operands(x, weight, bias, activation)
    rows, x.total = add_rms_norm_rounded(*x.norm_arguments, weight.input_scale, multiple)
    return rows, Operands(x.total, weight, bias, activation)


def multiply(
    x: RoundedRows,
    weight: QuantisedWeight,
    bias: Tensor | None,
    activation: Activation,
    plan: StreamedPlan,
    given: Operands,
    rounded: RoundedRows | None = None,
) -> Tensor:
    """The product of rounded rows; its own are rounded too, if there is a place for them."""
    check_copied("streamed_fp8_product", x.codes, weight.codes)
    height = sum(plan.pieces)
    lines = 16 * (plan.warps or 4)
    fits = not plan.swaps or (len(plan.pieces) == 1 and height % lines == 0)
    if height > MOST_HEIGHT or not fits:
        raise ValueError(
            f"streamed_fp8_product: tiles have at most {MOST_HEIGHT} outputs, and are one piece of "
            f"whole {lines} lines where they are swapped; found {plan.pieces}."
        )
    out: Tensor | None = None
    rounding: Any = (None,) * 4
    if rounded is not None:
        if not rounds_outputs(plan, given.outputs) or plan.splits > 1:
            raise ValueError(
                f"streamed_fp8_product: {given.outputs} outputs by tiles of {plan.pieces} and "
                f"{plan.splits} shares are not rounded; tiles must be blocks of {BLOCK}."
            )
        out = rounded.codes[: len(given.rows)]
        rounding = *rounding_of(rounded), given.rows
    return launch_streamed(
        x.codes[: len(given.rows)],
        weight.codes,
        bias,
        activation,
        plan,
        given,
        (x.scales, weight.scales, x.scales.size(1)),
        out,
        rounding,
        blocks=weight.size(1) // BLOCK,
        scale_rows=weight.form.rows if weight.form.inputs else 0,
        one_block=weight.form.rows > 1
        and BLOCK % height == 0
        and (activation != "swiglu" or given.outputs % BLOCK == 0),
        swaps=plan.swaps,
    )


def rounds_outputs(plan: StreamedPlan, outputs: int) -> bool:
    """Whether each program has a whole block of outputs."""
    return plan.pieces == (BLOCK,) and outputs % BLOCK == 0


def _served(problem: Problem, _wants: Wants, plan: StreamedPlan) -> set[str]:
    rounds = rounds_outputs(plan, problem.outputs)
    return {"activation", "norm", "norm of parts", *(["rounded"] if rounds else [])}


STREAMED_FP8 = ProductKernel(
    "streamed, FP8",
    streamed_fp8_plan,
    _served,
    streamed_fp8_product,
    BY_BLOCKS,
)
