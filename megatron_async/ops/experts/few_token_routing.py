"""Routing of a few tokens: logits after the norm in one kernel, the choice inside the next one.

A launch that chooses for all would take longer than it takes every program of the experts' first
product to choose for itself (`choose`): a step's launches wait for each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.dependent_launch import await_previous, let_next_start
from megatron_async.ops.experts.expert_routing import IN_KERNEL_LEAST_SUM, IN_KERNEL_NO_EXPERT

LEAST_SCORE = tl.constexpr(-3e38)
"""Stands in for logits that are no numbers: below all others, above an expert that is not there."""
BY_RANK = tl.constexpr(256)
"""Up to so many experts are all compared with each other: faster than one maximum after the other,
each of which passes through shared memory."""
COMPARED = tl.constexpr(128)
"""Experts that each expert is compared with at a time."""


@triton.jit
def norm_logits_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    router: tl.tensor,
    gate: tl.tensor,
    logits: tl.tensor,
    x_stride: tl.tensor,
    part_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    hidden: tl.constexpr,
    experts: tl.constexpr,
    parts: tl.constexpr,
    block: tl.constexpr,
    block_experts: tl.constexpr,
    has_norm: tl.constexpr,
    has_residual: tl.constexpr,
    has_gate: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One token's logits of `block_experts` experts, or its logit of the shared expert's gate.

    Residual add and norm are those of `ops/linear/rms_norm.py`, to the bit; every program does them
    again, which takes no longer than a kernel that does them once, and the first one stores them.
    The router's rows are loaded before the wait.
    """
    let_next_start(overlap)
    tile, token = tl.program_id(0), tl.program_id(1)
    tiles: tl.constexpr = (experts + block_experts - 1) // block_experts
    width: tl.constexpr = tiles * block_experts + (1 if has_gate else 0)
    line = tl.arange(0, block_experts)
    column = tl.arange(0, block)
    inside = column < hidden
    cell = line[:, None] * hidden + column[None, :]
    here = tl.minimum(experts - tile * block_experts, block_experts)
    if has_gate:
        here = tl.where(tile == tiles, 1, here)
    is_row = (line < here)[:, None] & inside[None, :]
    rows = router + tile * (block_experts * hidden) + cell
    w = tl.load(rows, mask=is_row & (tile < tiles), other=0.0).to(tl.float32)
    if has_gate:
        w += tl.load(gate + cell, mask=is_row & (tile == tiles), other=0.0).to(tl.float32)
    if has_norm:
        scale = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    await_previous(overlap)
    row = token.to(tl.int64)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if has_norm:
        dtype: tl.constexpr = normed.dtype.element_ty
        if parts > 1:
            for part in tl.static_range(1, parts):
                place = part * part_stride + row * x_stride + column
                value += tl.load(x + place, mask=inside, other=0.0)
            value = value.to(dtype).to(tl.float32)
        stored = inside & (tile == 0)
        if has_residual:
            before = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
            rounded = (before.to(tl.float32) + value).to(dtype)
            tl.store(total + row * hidden + column, rounded, mask=stored)
            value = rounded.to(tl.float32)
        factor = tl.rsqrt(tl.sum(value * value) / hidden + eps)
        result = (value * factor * scale).to(dtype)
        tl.store(normed + row * hidden + column, result, mask=stored)
        value = result.to(tl.float32)
    sums = tl.sum(w * value[None, :], 1)
    tl.store(logits + row * width + tile * block_experts + line, sums, mask=line < here)


@triton.jit
def _preferences(
    raw: tl.tensor,
    favour: tl.tensor,
    is_expert: tl.tensor,
    sigmoid: tl.constexpr,
    has_bias: tl.constexpr,
) -> tl.tensor:
    """By what experts are chosen; least those that are not there."""
    scores = raw
    if sigmoid:
        scores = tl.sigmoid(raw)
        if has_bias:
            scores += favour
    scores = tl.where(scores > LEAST_SCORE, scores, LEAST_SCORE)
    return tl.where(is_expert, scores, float("-inf"))


@triton.jit
def _ranks(
    logits: tl.tensor,
    bias: tl.tensor,
    scores: tl.tensor,
    expert: tl.tensor,
    experts: tl.constexpr,
    topk: tl.constexpr,
    block: tl.constexpr,
    sigmoid: tl.constexpr,
    has_bias: tl.constexpr,
) -> tl.tensor:
    """Place of each expert among a token's, best first; `topk` or more of those not chosen. Among
    equals the one with the lower number is first."""
    if block <= BY_RANK:
        rank = tl.zeros((block,), tl.int32)
        each: tl.constexpr = min(block, COMPARED)
        for at in tl.static_range(0, block, each):
            other = at + tl.arange(0, each)
            is_other = other < experts
            favour = tl.zeros((each,), tl.float32)
            if has_bias:
                favour = tl.load(bias + other, mask=is_other, other=0.0)
            raw = tl.load(logits + other, mask=is_other, other=float("-inf"))
            # A thread compares its experts with all others: no sum over threads.
            theirs = _preferences(raw, favour, is_other, sigmoid, has_bias)[:, None]
            mine = scores[None, :]
            ahead = (theirs == mine) & (other[:, None] < expert[None, :])
            rank += tl.sum(((theirs > mine) | ahead).to(tl.int32), 0)
    else:
        rank = tl.full((block,), topk, tl.int32)
        for nth in range(topk):
            best = tl.max(scores, 0)
            index = tl.min(tl.where(scores == best, expert, block), 0)
            rank = tl.where(expert == index, nth, rank)
            scores = tl.where(expert == index, float("-inf"), scores)
    return rank


@triton.jit
def choose(
    logits: tl.tensor,
    bias: tl.tensor,
    places: tl.tensor,
    out_experts: tl.tensor,
    out_weights: tl.tensor,
    token: tl.tensor,
    nth: tl.tensor,
    stores: tl.tensor,
    num_places: tl.tensor,
    dummy_place: tl.tensor,
    scale: tl.tensor,
    experts: tl.constexpr,
    topk: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    pre_softmax: tl.constexpr,
    sigmoid: tl.constexpr,
    has_bias: tl.constexpr,
    has_places: tl.constexpr,
) -> tl.tensor:
    """A token's expert number `nth`; if `stores`, all its experts and their weights are stored."""
    expert = tl.arange(0, block)
    is_expert = expert < experts
    own = logits + token * width
    raw = tl.load(own + expert, mask=is_expert, other=float("-inf"))
    favour = tl.zeros((block,), tl.float32)
    if has_bias:
        favour = tl.load(bias + expert, mask=is_expert, other=0.0)
    real = token >= 0
    if has_places:
        real = token < num_places
        real = real & (tl.load(places + token, mask=real, other=0) != dummy_place)
    scores = _preferences(raw, favour, is_expert, sigmoid, has_bias)
    rank = _ranks(own, bias, scores, expert, experts, topk, block, sigmoid, has_bias)
    chosen = rank < topk
    if stores:
        if sigmoid:
            powers = tl.sigmoid(raw)
            every = tl.sum(tl.where(chosen, powers, 0.0), 0) + IN_KERNEL_LEAST_SUM
            every = every if topk > 1 else 1.0
        else:
            powers = tl.exp(raw - tl.max(raw, 0))
            every = tl.sum(powers if pre_softmax else tl.where(chosen, powers, 0.0), 0)
        target = token * topk + rank
        named = tl.where(real, expert, IN_KERNEL_NO_EXPERT)
        tl.store(out_experts + target, named, mask=chosen)
        tl.store(out_weights + target, tl.where(real, powers / every * scale, 0.0), mask=chosen)
    found = tl.sum(tl.where(rank == nth, expert, 0), 0)
    return tl.where(real, found, IN_KERNEL_NO_EXPERT)
