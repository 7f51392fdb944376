"""Which kernel multiplies a few rows by a weight, and how it is laid out.

The rule depends on the number of rows, the shape of the weight, the dtype and the device only, so a
captured step and an eager one of as many rows agree. Its constants are measurements on an H200
(docs/records/products.md): sweeps of SmolLM2's and Llama-3.1-8B's shapes at 1, 16 and 64 rows, and
for weights that wait in registers or in shared memory of those of SmolLM2, Granite-4.0-H-350M,
Qwen3-0.6B and Llama-3.2-1B at 2 to 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from megatron_async.ops.linear.row_tiles import TILE_BYTES
from megatron_async.ops.linear.streamed_plan import PROCESSORS, StreamedPlan, streamed_plan
from megatron_async.ops.linear.warpgroup_plan import MOST_ROWS, WIDE, WarpgroupPlan, warpgroup_plan

MAX_ROWS = 64
"""More rows go to cuBLAS, but for products of narrow models (`warpgroup_plan`)."""
MAX_ROWS_FLOAT32 = 16
"""`MAX_ROWS` in float32, which has no matrix units here; not measured."""
MEASURED_MAJOR = 9
"""Compute capability of the devices that the rule was measured on (Hopper); others keep cuBLAS."""
ONE_WAVE = PROCESSORS
"""Processors of an H200: programs beyond this many, each with a deep pipeline, queue up."""
WHOLE_ROW = 2048
"""One-row kernel: a weight row of up to this many elements is loaded before the wait."""
NORM_WIDTH = 2048
"""Longest input that every program of the one-row kernel normalises again. At 4096 that costs
2 us a product, and a kernel of its own 1 us."""
A_WAVE_AND_SOME = 144
"""Most programs of a split product."""
LEAST_SHARE = 192
"""Least inputs of a split product's share."""
LEAST_SHARE_OF_MANY = 512
"""`LEAST_SHARE` for more than 16 rows and 1024 inputs or more."""
LONG_ROW, LONG_ROW_GATED = 16384, 8192
"""Most inputs of `long_row_kernel`, and of two weights. 4,096 inputs, two whole tiles of
`WHOLE_ROW`, are `one_row_kernel`'s: Llama-3.1-8B's step takes 20 us longer with this kernel's qkv
and proj, and another 70 with its fc1. Two weights of other lengths were not measured."""
LONG_ROW_TILES = 12
"""Most tiles of a weight row that `long_row_kernel` has asked for at any time."""
LONG_ROW_TILES_OF_MORE = 8
"""`LONG_ROW_TILES` of rows that have more than that."""
LONG_ROW_PROGRAMS = 4
"""Programs of that kernel that a processor holds: all are there at once, so that they end
together."""
LONG_ROW_REGISTERS = 128
"""Registers of a thread of that kernel."""
PREFETCH = 2048
"""Bytes of each weight row that are asked for before the wait, where the row is not loaded then."""
SHARED_MEMORY = 200_000
"""Bytes of pipeline stages that one program may take."""
RESIDENT_ROWS = 32
"""Most rows of products whose weights are resident: each program loads rows anew, and beyond this
many that takes longer than the weights do."""
RESIDENT_INPUTS = 3072
"""Most inputs of such a product: a thread holds its share of a weight row in registers."""
RESIDENT_GATED_INPUTS = 1024
"""`RESIDENT_INPUTS` for two weights, for products as wide as `WIDE`, and for products that include
a norm of several rows."""
RESIDENT_ELEMENTS = 7_000_000
"""Most weights of such a product: more programs than fit the device begin after the wait."""
RESIDENT_ELEMENTS_OF_MANY = 3_200_000
"""`RESIDENT_ELEMENTS` for more than 16 rows."""
RESIDENT_ELEMENTS_OF_LONG = 2_100_000
"""`RESIDENT_ELEMENTS` for more than 8 rows of `WHOLE_ROW` inputs or more: a split product takes as
long alone, and less beside others (Llama-3.2-1B's step at 16 rows: 0.96 and 1.00 ms)."""

ROTATED_ROWS = 16
"""Most rows of a product with resident weights that also rotates and appends: SmolLM2's step takes
0.579 instead of 0.570 ms at 32 rows with it, and 0.431 instead of 0.463 at 16."""


@dataclass(frozen=True)
class OneRowPlan:
    """Layout of `one_row_kernel`: each program takes `block_n` outputs, `block_k` elements of their
    weight rows at a time."""

    block_n: int
    block_k: int
    warps: int
    ahead: int
    """Bytes of each weight row to prefetch."""


@dataclass(frozen=True)
class LongRowPlan:
    """Layout of `long_row_kernel`: each program takes `block_n` outputs at a time."""

    block_n: int
    warps: int
    depth: int
    """Tiles of a weight row that each warp has asked for at any time."""
    turns: int
    """Number of times that a program takes `block_n` outputs."""


@dataclass(frozen=True)
class TilePlan:
    """Layout of `tile_kernel`: each program takes `block_n` outputs of all rows and one of `splits`
    shares of the inputs."""

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


@dataclass(frozen=True)
class ResidentPlan:
    """Layout of `resident_kernel`: each program takes `block_n` outputs of `block_m` rows."""

    block_m: int
    block_n: int
    warps: int
    """Each takes a share of the inputs."""


Plan = OneRowPlan | LongRowPlan | TilePlan | ResidentPlan | WarpgroupPlan | StreamedPlan


def plan_product(
    x: Tensor,
    weight: Tensor,
    gated: bool = False,
    may_split: bool = False,
    normed: bool = False,
) -> Plan | None:
    """The layout for `x @ weight.T`; None where cuBLAS is the better choice.

    Args:
        x: `[rows, k]`.
        weight: `[outputs, k]`, or `[2 * outputs, k]` if `gated`.
        gated: SwiGLU follows.
        may_split: the caller can take partial sums.
        normed: the product takes the norm before it along, if it can.
    """
    if not x.is_cuda or x.size(0) > MOST_ROWS or not weight.is_contiguous():
        return None
    if not _is_measured(x.device.index):
        return None
    rows, (outputs, k) = x.size(0), weight.shape
    if gated:
        outputs //= 2
    plan = choose_plan(rows, outputs, k, weight.dtype, gated, may_split, normed)
    is_copied = isinstance(plan, WarpgroupPlan | StreamedPlan)
    if is_copied and not (may_be_copied(x) and may_be_copied(weight)):
        if rows > MAX_ROWS:
            return None
        return _tile(rows, outputs, k, weight.itemsize, gated, may_split)
    return plan


def may_be_copied(rows: Tensor) -> bool:
    """Whether the copy engine takes these rows, `[rows, elements]`: each must begin at a multiple
    of 16 bytes."""
    return rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.itemsize % 16 == 0


def takes_unnormed(x: Tensor) -> bool:
    """Whether products of `x` should be given an `Unnormed`: their norm is cheaper inside.

    Args:
        x: `[rows, k]`; or partial sums of that, `[parts, rows, k]`, whose norm is not.
    """
    if x.dim() > 2:
        return False
    rows, k = x.shape
    if rows == 1:
        return k <= NORM_WIDTH
    resident = rows <= RESIDENT_ROWS and k <= RESIDENT_GATED_INPUTS and x.dtype == torch.bfloat16
    return resident and x.is_cuda and _is_measured(x.device.index)


def adds_residual(rows: Tensor, weight: Tensor) -> bool:
    """Whether a product by `weight` should be added to `rows`: where every program of the product
    after it normalises them again, and reads half as much if nothing is to be added.

    Args:
        rows: `[rows, outputs]`.
        weight: `[outputs, k]`.
    """
    if not rows.is_cuda or not (rows.size(0) == 1 and rows.size(1) <= NORM_WIDTH):
        return False
    if not _is_measured(rows.device.index):
        return False
    plan = choose_plan(1, *weight.shape, weight.dtype, False, True)
    return weight.is_contiguous() and isinstance(plan, OneRowPlan | LongRowPlan)


def takes_squares(x: Tensor, weight: Tensor, groups: int, may_split: bool) -> bool:
    """Whether the product of such an `x` by `weight` takes an `Unnormed` with squares.

    Args:
        x: `[rows, k]`.
        weight: `[outputs, k]`.
        groups: of elements that are normalised together, in each row.
        may_split: the caller can take partial sums.
    """
    if groups > 1 or x.dtype == torch.float16:  # it would overflow before it is divided
        return False
    plan = plan_product(x, weight, may_split=may_split)
    return isinstance(plan, OneRowPlan | ResidentPlan | WarpgroupPlan)


def rotates_heads(x: Tensor, weight: Tensor, dim: int, normed: bool) -> bool:
    """Whether a product by a qkv weight should rotate and append its outputs itself
    (`linear_rope_append`): where each program has pairs of one head, and no partial sums.

    Args:
        x: `[rows, k]`.
        weight: `[outputs, k]`.
        dim: of a head.
        normed: the product takes the norm before it along, if it can.
    """
    plan = plan_product(x, weight, normed=normed)
    if isinstance(plan, OneRowPlan):
        return x.size(1) <= plan.block_k and dim % plan.block_n == 0
    if isinstance(plan, ResidentPlan) and x.size(0) > ROTATED_ROWS:
        return False
    return isinstance(plan, ResidentPlan | WarpgroupPlan) and dim % plan.block_n == 0


@lru_cache
def _is_measured(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index)[0] == MEASURED_MAJOR


@lru_cache(maxsize=4096)
def choose_plan(
    rows: int,
    outputs: int,
    k: int,
    dtype: torch.dtype,
    gated: bool,
    may_split: bool,
    normed: bool = False,
) -> Plan | None:
    """`plan_product` for a device that the rule was measured on."""
    itemsize = dtype.itemsize
    if not rows or k * itemsize % 16:
        return None
    # float16 would overflow where a row meets its norm's factors before it is normalised.
    if dtype == torch.bfloat16:
        resident = _resident(rows, outputs, k, gated)
        plan = resident or warpgroup_plan(rows, outputs, k, itemsize, gated, may_split)
        if plan is not None:
            return plan
    streamed = streamed_plan(rows, outputs, k, itemsize, gated, may_split)
    if streamed is not None:
        return streamed
    if rows > MAX_ROWS:
        return None
    if rows == 1:
        return _long_row(outputs, k, itemsize, gated) or _one_row(
            outputs, k, itemsize, gated, normed
        )
    if outputs >= WIDE and k < WHOLE_ROW:
        return None
    if itemsize > 2 and rows > MAX_ROWS_FLOAT32:
        return None
    return _tile(rows, outputs, k, itemsize, gated, may_split)


def _resident(rows: int, outputs: int, k: int, gated: bool) -> ResidentPlan | None:
    """For products whose weights the processors can hold, which is known to pay from two rows on;
    of one row where `one_row_kernel` would load its weights behind the wait, or loads two."""
    if rows == 1 and not gated and k <= WHOLE_ROW:
        return None
    is_wide = outputs >= WIDE
    if rows > (16 if is_wide else RESIDENT_ROWS):
        return None
    if k > (RESIDENT_GATED_INPUTS if gated or is_wide else RESIDENT_INPUTS):
        return None
    if is_wide:
        return None if gated else ResidentPlan(8 if rows <= 8 else 16, 32, 4)
    most = RESIDENT_ELEMENTS if rows <= 16 else RESIDENT_ELEMENTS_OF_MANY
    if rows > 8 and k >= WHOLE_ROW:
        most = RESIDENT_ELEMENTS_OF_LONG
    if outputs * k * (2 if gated else 1) > most:
        return None
    many = gated or outputs > 16 * ONE_WAVE
    block_n = 32 if many and k <= WHOLE_ROW else 16
    warps = 8 if gated or k >= 768 else 4
    # Rows in eights load fewer at once; sixteens load the weights once where programs are many.
    in_eights = triton.cdiv(outputs, block_n) * triton.cdiv(rows, 8)
    in_eights_fit = k <= 1536 and in_eights <= ONE_WAVE
    return ResidentPlan(8 if rows <= 8 or in_eights_fit else 16, block_n, warps)


def _long_row(outputs: int, k: int, itemsize: int, gated: bool) -> LongRowPlan | None:
    if not WHOLE_ROW < k <= (LONG_ROW_GATED if gated else LONG_ROW) or k == 2 * WHOLE_ROW:
        return None
    tiles = triton.cdiv(k * itemsize, TILE_BYTES)
    most = LONG_ROW_TILES if tiles <= LONG_ROW_TILES else LONG_ROW_TILES_OF_MORE
    rounds = triton.cdiv(tiles, most)
    warps = 4
    turns = triton.cdiv(outputs, warps * LONG_ROW_PROGRAMS * ONE_WAVE)
    return LongRowPlan(warps, warps, triton.cdiv(tiles, rounds), turns)


def _one_row(outputs: int, k: int, itemsize: int, gated: bool, normed: bool) -> OneRowPlan:
    if k > WHOLE_ROW:
        block_k = 2048 if k <= 4096 else 1024
        # A thread holds a product's partial sums: 16 of them, however wide an element is.
        return OneRowPlan(2, block_k, 8, min(PREFETCH, k * itemsize))
    block_k = triton.next_power_of_2(max(k, 64))
    if outputs >= WIDE:
        return OneRowPlan(4 if gated else 8, block_k, 4, 0)
    warps = 2
    if normed:
        # One warp adds its squares up without the others; SwiGLU's two weights fill four.
        warps = 4 if gated else max(block_k // 1024, 1)
    return OneRowPlan(2 if gated else 4, block_k, warps, 0)


def _tile(rows: int, outputs: int, k: int, itemsize: int, gated: bool, may_split: bool) -> TilePlan:
    block_m = max(16, triton.next_power_of_2(rows))
    few = block_m == 16
    # Partial sums of many rows are many bytes: fewer parts, and longer ones where there is room.
    least = LEAST_SHARE if few or k < 1024 else LEAST_SHARE_OF_MANY
    most = min(8 if few else 4, k // least) if may_split else 1
    if most > 1:
        enough = ONE_WAVE * 3 // 4 if few else ONE_WAVE * 3 // 8
        block_n = next((n for n in (64, 32) if triton.cdiv(outputs, n) * most >= enough), 16)
    else:
        sizes = (32, 64) if gated and few else (16, 32, 64)
        block_n = next((n for n in sizes if triton.cdiv(outputs, n) <= ONE_WAVE), 64)
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
