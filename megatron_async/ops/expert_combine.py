"""Sums over the ranks that share experts, each rank's of its own tokens, in one kernel.

One program for the t-th token of every rank: it adds up what its rank's experts say of each of them
(`ops/expert_sums.py`), puts these partial sums into its rank's symmetric memory, meets the other
ranks (`ops/symmetric_meeting.py`), and reads those of its own t-th token. They are added in the
order of ranks, in float32. Residual add and RMSNorm may follow, as in `ops/all_reduce_norm.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.expert_sums import ExpertOutputs, experts_here
from megatron_async.ops.symmetric_meeting import meet, meeting_warps

ROWS_AHEAD = 8
"""Of experts, asked for before the first are added up; about as many as the compiler would."""


def combine_sums(
    outputs: ExpertOutputs,
    own_tokens: int,
    pointers: Tensor,
    turns: Tensor,
    rank: int,
    first_row: int,
) -> Tensor:
    """Sums over the ranks of this rank's tokens.

    Args:
        outputs: of this rank's experts for `ranks * tokens` tokens, rank by rank, on a GPU.
        own_tokens: how many of this rank's are no padding.
        pointers: int64 `[ranks]`: addresses of the ranks' symmetric memory: int32 flags `[places,
            ranks]`, zero at first, then, at `first_row` elements, sums `[2, places, ranks,
            hidden]`.
        turns: int32 `[places]`, this rank's own memory, zero at first.
        rank: of this process.
        first_row: elements of the sums' dtype before the sums.

    Returns:
        `[own tokens, hidden]`.

    Raises:
        ValueError: shapes or strides do not fit, or there are more tokens than places.
    """
    tokens = _check_combine(outputs, own_tokens, len(pointers), len(turns))
    rows = outputs.rows
    out = torch.empty((own_tokens, rows.size(1)), dtype=rows.dtype, device=rows.device)
    state = pointers, turns, rank, first_row
    _launch_combine(outputs, tokens, own_tokens, None, out, 0.0, state)
    return out


def combine_add_rms_norm(
    outputs: ExpertOutputs,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    pointers: Tensor,
    turns: Tensor,
    rank: int,
    first_row: int,
) -> tuple[Tensor, Tensor]:
    """`combine_sums` of as many tokens as the residual has, added to it, and the norm of that.

    Args:
        outputs: see `combine_sums`.
        residual: `[own tokens, hidden]`; rows may be strided.
        weight: `[hidden]`, the norm's weight.
        eps: added to the mean square.
        pointers, turns, rank, first_row: see `combine_sums`.

    Returns:
        normed `[own tokens, hidden]`, and the new residual.

    Raises:
        ValueError: shapes or strides do not fit, or there are more tokens than places.
    """
    own, hidden = residual.shape
    tokens = _check_combine(outputs, own, len(pointers), len(turns))
    if outputs.shape[1] != hidden or weight.shape != (hidden,):
        raise ValueError(
            f"combine_add_rms_norm: sums are {outputs.shape}, so weight and residual must be "
            f"{outputs.shape[1]} wide; found {tuple(weight.shape)} and {tuple(residual.shape)}."
        )
    if residual.dtype != outputs.dtype or residual.stride(1) != 1:
        raise ValueError(
            f"combine_add_rms_norm: residual must be {outputs.dtype} with adjacent elements in its "
            f"rows; found {residual.dtype}, strides {residual.stride()}."
        )
    normed = torch.empty((own, hidden), dtype=residual.dtype, device=residual.device)
    total = torch.empty_like(normed)
    state = pointers, turns, rank, first_row
    _launch_combine(outputs, tokens, own, (residual, weight, normed), total, eps, state)
    return normed, total


def _launch_combine(
    outputs: ExpertOutputs,
    tokens: int,
    own: int,
    norm: tuple[Tensor, Tensor, Tensor] | None,
    total: Tensor,
    eps: float,
    state: tuple[Tensor, Tensor, int, int],
) -> None:
    """Launch it; `norm` are residual, weight and where to put the norm."""
    residual, weight, normed = norm or (total, total, total)
    pointers, turns, rank, first_row = state
    ranks, hidden, topk = len(pointers), outputs.shape[1], outputs.experts.size(1)
    block = triton.next_power_of_2(hidden)
    if tokens:
        _combine_kernel[(tokens,)](
            outputs.rows,
            outputs.experts,
            outputs.experts.stride(0),
            residual,
            weight,
            normed,
            total,
            pointers,
            turns,
            own,
            tokens,
            residual.stride(0),
            eps,
            outputs.first_expert,
            local=outputs.local,
            topk=topk,
            block_topk=triton.next_power_of_2(topk),
            ahead=max(ROWS_AHEAD // ranks, 1),
            rank=rank,
            ranks=ranks,
            lanes=triton.next_power_of_2(ranks),
            places=len(turns),
            first_row=first_row,
            hidden=hidden,
            block=block,
            has_norm=norm is not None,
            num_warps=meeting_warps(ranks, block * total.element_size()),
            **launch_options(total),
        )


def _check_combine(outputs: ExpertOutputs, own: int, ranks: int, places: int) -> int:
    """Tokens of each rank."""
    outputs.check()
    tokens, rest = divmod(outputs.shape[0], ranks)
    if rest or not own <= tokens <= places:
        raise ValueError(
            f"combine_sums: outputs must be of {ranks} times at least {own} and at most {places} "
            f"tokens; found {outputs.shape[0]}."
        )
    return tokens


@triton.jit
def lowest_bit(here: tl.tensor) -> tl.tensor:
    """Number of the lowest bit of a positive int32: the exponent of that power of two."""
    power = (here & -here).to(tl.float32)
    return (power.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit(do_not_specialize=["own", "tokens", "first_expert"])
def _combine_kernel(
    outputs: tl.tensor,
    experts: tl.tensor,
    experts_stride: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    pointers: tl.tensor,
    turns: tl.tensor,
    own: tl.tensor,
    tokens: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    first_expert: tl.tensor,
    local: tl.constexpr,
    topk: tl.constexpr,
    block_topk: tl.constexpr,
    ahead: tl.constexpr,
    rank: tl.constexpr,
    ranks: tl.constexpr,
    lanes: tl.constexpr,
    places: tl.constexpr,
    first_row: tl.constexpr,
    hidden: tl.constexpr,
    block: tl.constexpr,
    has_norm: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    dtype: tl.constexpr = total.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < hidden
    bases = ()
    for peer in tl.static_range(ranks):
        base = tl.load(pointers + peer).to(tl.pointer_type(dtype))
        bases += (tl.multiple_of(base, 16),)  # type: ignore[assignment]
    if has_norm:
        scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(overlap)
    turn = tl.load(turns + place) + 1
    start = first_row + ((turn & 1).to(tl.int64) * places + place) * ranks * hidden
    mine = bases[rank] + start
    heres = ()
    sums = ()
    left = 0
    for peer in tl.static_range(ranks):
        token = peer * tokens + place
        here = experts_here(experts, experts_stride, token, first_expert, local, topk, block_topk)
        heres += (here,)  # type: ignore[assignment]
        sums += (tl.zeros((block,), tl.float32),)  # type: ignore[assignment]
        left |= here
    # Few of a token's experts are here, so it is these that are asked for, of all tokens together.
    while left != 0:
        found = ()
        rest = ()
        left = 0
        for peer in tl.static_range(ranks):
            here = heres[peer]
            for _ in tl.static_range(ahead):
                pair = (peer * tokens + place) * topk + lowest_bit(here)
                row = outputs + pair * hidden + column
                found += (tl.load(row, mask=inside & (here != 0), other=0.0),)  # type: ignore[assignment]
                here = here & (here - 1)
            rest += (here,)  # type: ignore[assignment]
            left |= here
        heres = rest
        more = ()
        for peer in tl.static_range(ranks):
            its = sums[peer]  # type: ignore[var-annotated]
            for nth in tl.static_range(ahead):
                its += found[peer * ahead + nth].to(tl.float32)
            more += (its,)  # type: ignore[assignment]
        sums = more
    for peer in tl.static_range(ranks):
        tl.store(mine + peer * hidden + column, sums[peer].to(dtype), mask=inside)
    meet(pointers, turns, place, turn, rank, ranks, lanes)
    real = inside & (place < own)
    value = tl.zeros((block,), tl.float32)
    for peer in tl.static_range(ranks):
        theirs = bases[peer] + start + rank * hidden
        value += tl.load(theirs + column, mask=real, other=0.0, cache_modifier=".cg").to(tl.float32)
    if has_norm:
        value = value.to(dtype).to(tl.float32)
        before = tl.load(residual + place * residual_stride + column, mask=real, other=0.0)
        rounded = (before.to(tl.float32) + value).to(dtype)
        tl.store(total + place * hidden + column, rounded, mask=real)
        value = rounded.to(tl.float32)
        factor = tl.rsqrt(tl.sum(value * value) / hidden + eps)
        tl.store(normed + place * hidden + column, value * factor * scale, mask=real)
    else:
        tl.store(total + place * hidden + column, value, mask=real)
