"""Product of few rows on the matrix units, in Triton's own loop.

As `one_row_kernel`, it starts to load its first weights before it waits. A larger product with
fewer outputs than fill the device is split along its inputs. The next kernel adds the partial sums
in order (`ops/linear/rms_norm.py`), so that results are the same in every run.

More rows than a block are rows of blocks, for products whose order must not depend on the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import (
    await_previous,
    launch_options,
    let_next_start,
    prefetch_rows,
)
from megatron_async.ops.linear.load_tile import (
    check_kept,
    kept_operands,
    kept_sums,
    may_be_loaded,
    step_of,
)
from megatron_async.ops.linear.one_row import PREFETCH
from megatron_async.ops.linear.product_kernel import (
    IN_ORDER,
    MAX_ROWS,
    PROCESSORS,
    WHOLE_ROW,
    WIDE,
    Activation,
    Operands,
    Problem,
    ProductKernel,
    new_sums,
)
from megatron_async.ops.linear.quantised_weight import Form, QuantisedWeight

MAX_ROWS_FLOAT32 = 16
"""`MAX_ROWS` in float32, which has no matrix units here; not measured."""
A_WAVE_AND_SOME = 144
"""Most programs of a split product."""
LEAST_SHARE = 192
"""Least inputs of a split product's share."""
LEAST_SHARE_OF_MANY = 512
"""`LEAST_SHARE` for more than 16 rows and 1024 inputs or more."""
SHARED_MEMORY = 200_000
"""Bytes of pipeline stages that one program may take."""


@dataclass(frozen=True)
class TilePlan:
    """Layout of `tile_kernel`: each program takes `block_n` outputs of `block_m` rows and one of
    `splits` shares of the inputs."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int
    swap: bool
    """Multiply weights by inputs instead of inputs by weights: 64 outputs fill the matrix units
    where few rows do not."""
    ahead: int
    """Bytes of each weight row's share to prefetch."""
    shares: int = 1
    """Shares of a step of `block_k * shares` inputs: of a weight that is kept in fewer bits."""


MAX_KEPT_ROWS = 128
"""Most rows of a product by a weight that is kept in fewer bits: to widen it first moves 9 times
the bytes of 4-bit numbers. Not measured."""
LEAST_KEPT_SHARE = 512
"""Least inputs of a share of a weight that is kept in fewer bits."""
KEPT_PROGRAMS = 264
"""Most programs of a split product by such a weight."""
KEPT_STAGES = 6
"""Most pipeline stages of a product by such a weight."""
LOW_TILES = TilePlan(64, 64, 64, 1, 4, 4, False, 0)
HIGH_TILES = TilePlan(128, 128, 64, 1, 8, 3, False, 0)
"""Tiles of more than `MAX_ROWS` rows, where cuBLAS may not multiply; not measured."""
HIGH_FROM = PROCESSORS * 128 * 128
"""Fewest outputs of all rows that are a high tile for each processor."""


def tile_plan(problem: Problem) -> TilePlan | None:
    """The layout of a product that no other kernel takes; None: cuBLAS's."""
    if problem.form is not None:
        return _kept_plan(problem, problem.form)
    rows, outputs, k, dtype, gated, may_split, *_ = problem
    itemsize = dtype.itemsize
    if problem.invariant and rows > MAX_ROWS:
        return HIGH_TILES if rows * outputs >= HIGH_FROM else LOW_TILES
    if rows > MAX_ROWS or (outputs >= WIDE and k < WHOLE_ROW and not problem.invariant):
        return None
    if itemsize > 2 and rows > MAX_ROWS_FLOAT32:
        return None
    block_m = max(16, triton.next_power_of_2(rows))
    few = block_m == 16
    # Partial sums of many rows are many bytes: fewer parts, and longer ones where there is room.
    least = LEAST_SHARE if few or k < 1024 else LEAST_SHARE_OF_MANY
    most = min(8 if few else 4, k // least) if may_split else 1
    if most > 1:
        enough = PROCESSORS * 3 // 4 if few else PROCESSORS * 3 // 8
        block_n = next((n for n in (64, 32) if triton.cdiv(outputs, n) * most >= enough), 16)
    else:
        sizes = (32, 64) if gated and few else (16, 32, 64)
        block_n = next((n for n in sizes if triton.cdiv(outputs, n) <= PROCESSORS), 64)
        if not few and outputs > 64 * 1024:
            block_n = 128
    programs = triton.cdiv(outputs, block_n)
    splits = max(1, min(most, A_WAVE_AND_SOME // programs))
    if few and gated and block_n == 32:
        block_k = 256
    else:
        block_k = 128 if k // splits >= 256 else 64
    block_k = block_k * 2 // max(itemsize, 2)
    share = triton.cdiv(k, splits * block_k) * block_k
    splits = triton.cdiv(k, share)
    stage = (block_m + (2 if gated else 1) * block_n) * block_k * itemsize
    deep = programs * splits <= A_WAVE_AND_SOME
    budget = SHARED_MEMORY if deep else SHARED_MEMORY // 2
    stages = max(budget // stage, min(4, SHARED_MEMORY // stage), 2)
    # Deep unsplit products lose 2 % by a prefetch: their pipelines start after the wait anyway.
    wanted = PREFETCH if splits > 1 or k <= WHOLE_ROW else 0
    return TilePlan(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        splits=splits,
        warps=4 if not few or gated or block_n > 32 else block_n // 16,
        stages=min(stages, share // block_k + 1, 12),
        swap=few and block_n >= 64 and itemsize == 2,
        ahead=min(wanted, share * itemsize, k * itemsize) // 16 * 16,
    )


def _kept_plan(problem: Problem, form: Form) -> TilePlan | None:
    """The layout of a product by a weight that is kept in fewer bits.

    Of up to 16 rows each warp takes all outputs of a program and a share of each step's inputs,
    both operands from registers: as many warps wait for memory as it needs, however few programs
    there are. Of more rows four warps are a warpgroup, and more than `MAX_ROWS` are blocks.
    """
    rows, outputs, k, gated = problem.rows, problem.outputs, problem.k, problem.gated
    if rows > MAX_KEPT_ROWS or problem.invariant or form.rounds_rows or not problem.aligned:
        return None
    if not may_be_loaded(form, problem.dtype):
        return None
    block_m, block_k = min(max(8, triton.next_power_of_2(rows)), MAX_ROWS), step_of(form)
    few = block_m <= 16
    block_n = 32 if few else 64
    programs = triton.cdiv(outputs, block_n)
    splits, shares = 1, 1
    if problem.split and rows <= MAX_ROWS:
        splits = max(1, min(4, k // LEAST_KEPT_SHARE, KEPT_PROGRAMS // programs))
    if few:
        shares = min(4, triton.next_power_of_2(triton.cdiv(k, splits * block_k)))
    step = block_k * shares
    part = triton.cdiv(k, splits * step) * step
    row_bytes = part * form.bits // 8
    stage = step * (block_m * 2 + (2 if gated else 1) * block_n * form.bits // 8)
    return TilePlan(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        splits=triton.cdiv(k, part),
        warps=shares if few else 4,
        stages=max(2, min(KEPT_STAGES, SHARED_MEMORY // 2 // stage, part // step + 1)),
        swap=True,
        ahead=min(PREFETCH, row_bytes) if k * form.bits % 128 == 0 and part <= k else 0,
        shares=shares,
    )


def tile_product(
    x: Tensor,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None,
    activation: Activation,
    plan: TilePlan,
) -> Tensor:
    """`product` by a given plan; partial sums if it splits."""
    given = Operands(x, weight, bias, activation)
    numbers, kept = kept_operands(weight)
    if isinstance(weight, QuantisedWeight):
        check_kept("tile_product", x, weight)
    n, rows = given.outputs, x.size(0)
    if plan.splits > 1 and (activation or bias is not None):
        raise ValueError("tile_product: partial sums can have neither bias nor activation.")
    out = new_sums(x, n, plan.splits)
    blocks = triton.cdiv(rows, plan.block_m)
    tile_kernel[(triton.cdiv(n, plan.block_n) * blocks, plan.splits)](
        x,
        numbers,
        given.bias,
        out,
        x.stride(0),
        rows,
        n,
        **kept,
        k=x.size(1),
        splits=plan.splits,
        block_m=plan.block_m,
        block_n=plan.block_n,
        block_k=plan.block_k,
        shares=plan.shares,
        **given.constants,
        swap=plan.swap,
        in_blocks=blocks > 1,
        ahead=plan.ahead,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **launch_options(x),
    )
    return out


@triton.jit
def tile_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    kept: tl.tuple | None,
    form: tl.constexpr,
    k: tl.constexpr,
    splits: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    shares: tl.constexpr,
    gated: tl.constexpr,
    squared: tl.constexpr,
    has_bias: tl.constexpr,
    swap: tl.constexpr,
    in_blocks: tl.constexpr,
    ahead: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """All rows, or a block of them, times `block_n` weight rows, over one share of the inputs, on
    the matrix units. A weight with a `form` is multiplied by `kept_sums`."""
    let_next_start(overlap)
    number = tl.program_id(0)
    if in_blocks:
        # Neighbours are the blocks of rows of one tile of the weight, which is read once.
        blocks = tl.cdiv(rows, block_m)
        block = number % blocks
        number = number // blocks
    first = number * block_n
    part = tl.program_id(1)
    step: tl.constexpr = block_k * shares
    share: tl.constexpr = (k + splits * step - 1) // (splits * step) * step
    # Two 4-bit numbers are an element.
    packed: tl.constexpr = 2 if form is not None and weight.dtype.element_ty == tl.uint8 else 1
    width: tl.constexpr = k // packed
    row_bytes: tl.constexpr = width * (weight.dtype.element_ty.primitive_bitwidth // 8)
    even: tl.constexpr = k % (splits * step) == 0
    start = weight + first.to(tl.int64) * width + part * (share // packed)
    up_start = start + n.to(tl.int64) * width
    here = tl.minimum(n - first, block_n)
    # The last share is shorter: its last row's prefetch must end with the weight.
    fits = here if even else tl.where(part == splits - 1, 0, here)
    prefetch_rows(start, fits, row_bytes, ahead, overlap)
    if gated:
        prefetch_rows(up_start, fits, row_bytes, ahead, overlap)
    line = tl.arange(0, block_n)
    inside = (line < here)[:, None]
    batch = tl.arange(0, block_m)
    if in_blocks:
        batch += block * block_m
    exists = (batch < rows)[:, None]
    column = tl.arange(0, block_k)
    cell = line[:, None] * k + column[None, :]
    source = x + batch[:, None].to(tl.int64) * x_stride + part * share + column[None, :]
    if has_bias:
        shift = tl.load(bias + first + line, mask=line < here, other=0.0).to(tl.float32)
    await_previous(overlap)
    limit = tl.minimum(k - part * share, share)
    if form is not None:
        sums, up_sums = kept_sums(
            x, x_stride, batch, batch < rows, weight, kept, first, here, n, part, splits,
            k, form, block_n, block_k, shares, gated, overlap,
        )  # fmt: skip
    else:
        if swap:
            sums = tl.zeros((block_n, block_m), tl.float32)
            up_sums = tl.zeros((block_n, block_m), tl.float32)
        else:
            sums = tl.zeros((block_m, block_n), tl.float32)
            up_sums = tl.zeros((block_m, block_n), tl.float32)
        for at in range(0, limit, block_k):
            if even:
                row_mask, cell_mask = exists, inside
            else:
                left = (column < limit - at)[None, :]
                row_mask, cell_mask = exists & left, inside & left
            v = tl.load(source + at, mask=row_mask, other=0.0)
            w = tl.load(start + cell + at, mask=cell_mask, other=0.0)
            if swap:
                sums = tl.dot(w, tl.trans(v), sums, input_precision="ieee")
            else:
                sums = tl.dot(v, tl.trans(w), sums, input_precision="ieee")
            if gated:
                u = tl.load(up_start + cell + at, mask=cell_mask, other=0.0)
                if swap:
                    up_sums = tl.dot(u, tl.trans(v), up_sums, input_precision="ieee")
                else:
                    up_sums = tl.dot(v, tl.trans(u), up_sums, input_precision="ieee")
    if swap:
        sums = tl.trans(sums)
        up_sums = tl.trans(up_sums)
    if has_bias:
        sums = sums + shift[None, :]
    if gated:
        sums = sums * tl.sigmoid(sums) * up_sums
    elif squared:
        sums = tl.maximum(sums, 0.0)
        sums = sums * sums
    row = (part * rows + batch[:, None]).to(tl.int64)
    target = out + row * n + first + line[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=exists & (line < here)[None, :])


TILE = ProductKernel("tile", tile_plan, lambda *_: {"activation"}, tile_product, IN_ORDER)
