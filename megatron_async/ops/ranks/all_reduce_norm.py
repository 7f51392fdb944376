"""All-reduce, residual add and RMSNorm in one kernel, over symmetric memory.

One program a row, which is a place of a `Meeting`. It writes this rank's summand, meets the other
ranks, and reads all summands. They are added in the order of ranks, in float32, so every rank gets
the same bits. Then the program does the work of `ops/linear/rms_norm.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.linear.rms_norm import MAX_HIDDEN
from megatron_async.ops.ranks.symmetric_memory import Meeting, meet


def all_reduce_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, meeting: Meeting
) -> tuple[Tensor, Tensor]:
    """Sum over the ranks, added to the residual stream, and the norm of that.

    Args:
        x: this rank's summand, `[tokens, hidden]`, or partial sums of it, float32 `[parts, tokens,
            hidden]`; contiguous, on a GPU. It is rounded to the residual's dtype before it is sent.
        residual: `[tokens, hidden]`, equal on all ranks.
        weight: `[hidden]`, the norm's weight.
        eps: added to the mean square.
        meeting: its data are rows of the residual's dtype, `[2, places, hidden]`.

    Returns:
        normed `[tokens, hidden]`, and the new residual.

    Raises:
        ValueError: shapes or strides do not fit, or there are more tokens than rows.
    """
    parts = x.size(0) if x.dim() == 3 else 1
    tokens, hidden = residual.shape
    if x.shape[-2:] != residual.shape or weight.shape != (hidden,) or hidden > MAX_HIDDEN:
        raise ValueError(
            f"all_reduce_add_rms_norm: x is {tuple(x.shape)} and residual {tuple(residual.shape)}, "
            f"so weight must be ({hidden},), of at most {MAX_HIDDEN}; found {tuple(weight.shape)}."
        )
    if not x.is_contiguous() or residual.stride(1) != 1 or tokens > meeting.places:
        raise ValueError(
            f"all_reduce_add_rms_norm: x (strides {x.stride()}) must be contiguous, elements of a "
            f"row of residual (strides {residual.stride()}) adjacent, and there may be at most "
            f"{meeting.places} tokens; found {tokens}."
        )
    normed = torch.empty((tokens, hidden), dtype=residual.dtype, device=residual.device)
    total = torch.empty_like(normed)
    if tokens:
        block = triton.next_power_of_2(hidden)
        _all_reduce_add_rms_norm_kernel[(tokens,)](
            x,
            residual,
            weight,
            normed,
            total,
            meeting.pointers,
            meeting.turns,
            residual.stride(0),
            eps,
            **meeting.constants,
            hidden=hidden,
            block=block,
            parts=parts,
            num_warps=min(max(block // 512, 1), 16),
            **launch_options(residual),
        )
    return normed, total


@triton.jit
def _all_reduce_add_rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    pointers: tl.tensor,
    turns: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    rank: tl.constexpr,
    ranks: tl.constexpr,
    lanes: tl.constexpr,
    places: tl.constexpr,
    first: tl.constexpr,
    hidden: tl.constexpr,
    block: tl.constexpr,
    parts: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    dtype: tl.constexpr = total.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < hidden
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(overlap)
    summand = tl.load(x + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        place = (part * tl.num_programs(0) + row) * hidden + column
        summand += tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    turn = tl.load(turns + row) + 1
    start = first + ((turn & 1).to(tl.int64) * places + row) * hidden
    mine = tl.multiple_of(tl.load(pointers + rank).to(tl.pointer_type(dtype)), 16)
    tl.store(mine + start + column, summand.to(dtype), mask=inside)
    meet(pointers, turns, row, turn, rank, ranks, lanes)
    value = tl.zeros((block,), tl.float32)
    for peer in tl.static_range(ranks):
        its = tl.multiple_of(tl.load(pointers + peer).to(tl.pointer_type(dtype)), 16)
        found = tl.load(its + start + column, mask=inside, other=0.0, cache_modifier=".cg")
        value += found.to(tl.float32)
    value = value.to(dtype).to(tl.float32)
    before = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
    rounded = (before.to(tl.float32) + value).to(dtype)
    tl.store(total + row * hidden + column, rounded, mask=inside)
    value = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value) / hidden + eps)
    tl.store(normed + row * hidden + column, value * factor * scale, mask=inside)
