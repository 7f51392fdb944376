"""Kernels of an expert layer for a few tokens, which `ops/experts/few_tokens.py` launches: the
router's logits after the norm in one kernel, the choice of experts inside the next one, products.

A launch that chooses for all would take longer than it takes every program of the experts' first
product to choose for itself (`choose`): a step's launches wait for each other.

Such a layer takes as long as the weights of its experts take to arrive. No weight is prefetched to
the second cache before it is needed: that was tried, for the shared expert and for the second
product, and took 8 to 13 % longer (docs/records/several_gpus.md).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.dependent_launch import await_previous, let_next_start
from megatron_async.ops.experts.expert_routing import IN_KERNEL_LEAST_SUM, IN_KERNEL_NO_EXPERT
from megatron_async.ops.linear.activations import unit_of
from megatron_async.ops.linear.load_tile import stored_scale
from megatron_async.ops.linear.row_tiles import (
    add_products,
    add_scaled_products,
    ask_first,
    load_tiles,
)

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
    logit_bias: tl.tensor | None,
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
    if logit_bias is not None:
        expert = tile * block_experts + line
        sums += tl.load(logit_bias + expert, mask=expert < experts, other=0.0).to(tl.float32)
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
    tensors: tl.tuple,
    token: tl.tensor,
    nth: tl.tensor,
    stores: tl.tensor,
    rule: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """A token's expert number `nth`; if `stores`, all its experts and their weights are stored."""
    logits, bias, places, out_experts, out_weights, num_places, dummy_place, scale = tensors
    experts: tl.constexpr = rule[0]
    topk: tl.constexpr = rule[1]
    pre_softmax: tl.constexpr = rule[2]
    sigmoid: tl.constexpr = rule[3]
    has_bias: tl.constexpr = rule[4]
    has_places: tl.constexpr = rule[5]
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


@triton.jit
def _activated_rows(
    x: tl.tensor,
    start: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    n: tl.constexpr,
    sizes: tl.constexpr,
    biases: tl.tuple,
    scales: tl.tensor,
    first: tl.tensor,
    form: tl.constexpr,
) -> None:
    """A row of x times `count` rows of a weight, from `start` on, their `biases` (or None, and the
    first one's place), and the activation; the up row of each, if there is a gating, is `n` rows
    behind it. A weight with a `form` has `scales`, and the rows are those from the `first` on."""
    k: tl.constexpr = sizes[0]
    block_n: tl.constexpr = sizes[1]
    block_k: tl.constexpr = sizes[2]
    depth: tl.constexpr = sizes[3]
    gating: tl.constexpr = sizes[4]
    gated: tl.constexpr = gating is not None
    overlap: tl.constexpr = sizes[5]
    bias, first_bias = biases
    for turn in range(tl.cdiv(count, block_n)):
        here = tl.minimum(count - turn * block_n, block_n)
        line, column = tl.arange(0, block_n), tl.arange(0, block_k)
        length = tl.where(line < here, k, 0)
        inputs = x + line[:, None] * 0 + column[None, :]
        cells = start + turn * (block_n * k) + line[:, None] * k + column[None, :]
        by_part: tl.constexpr = form is not None and form.inputs > 0
        wide: tl.constexpr = block_k // 16 if by_part else block_k
        sums = tl.zeros((block_n, wide), tl.float32)
        ups = tl.zeros((block_n, wide), tl.float32)
        if form is not None:
            covers: tl.constexpr = form.inputs
            groups: tl.constexpr = (k + covers - 1) // covers if by_part else 1
            own = first + turn * block_n + tl.minimum(line, here - 1)
            row_scales = scales + own // form.rows * groups
            up_scales = scales + (n + own) // form.rows * groups
            begin, width = line * 0, line * 0 + k
        for at in range(0, k, depth * block_k):
            w = load_tiles(cells, column, length, at, k, block_k, depth)
            if gated:
                u = load_tiles(cells + n * k, column, length, at, k, block_k, depth)
            ask_first(overlap)
            if form is None:
                sums = add_products(sums, w, inputs, column, length, at, block_k)
            else:
                sums = add_scaled_products(
                    sums, w, inputs, column, length, at, block_k, row_scales, begin, width, covers
                )
            if gated and form is None:
                ups = add_products(ups, u, inputs, column, length, at, block_k)
            elif gated:
                ups = add_scaled_products(
                    ups, u, inputs, column, length, at, block_k, up_scales, begin, width, covers
                )
        y = tl.sum(sums, 1)
        of_all: tl.constexpr = form is not None and not by_part
        if of_all:
            y = y * stored_scale(tl.load(row_scales))
            ups = ups * stored_scale(tl.load(up_scales))[:, None] if gated else ups
        if bias is not None:
            at_bias = bias + first_bias + turn * block_n + line
            y += tl.load(at_bias, mask=line < here, other=0.0).to(tl.float32)
        if gated:
            up = tl.sum(ups, 1)
            if bias is not None:
                up += tl.load(at_bias + n, mask=line < here, other=0.0).to(tl.float32)
            y = unit_of(y, up, gating)
        else:
            y = tl.maximum(y, 0.0)
            y = y * y
        tl.store(out + turn * block_n + line, y.to(out.dtype.element_ty), mask=line < here)


@triton.jit(do_not_specialize=["num_places", "dummy_place"])
def few_up_kernel(
    x: tl.tensor,
    logits: tl.tensor,
    places: tl.tensor,
    bias: tl.tensor,
    fc1: tl.tensor,
    shared_fc1: tl.tensor,
    activated: tl.tensor,
    shared_activated: tl.tensor,
    out_experts: tl.tensor,
    out_weights: tl.tensor,
    x_stride: tl.tensor,
    num_places: tl.tensor,
    dummy_place: tl.tensor,
    scale: tl.tensor,
    bias1: tl.tensor | None,
    scales: tl.tuple,
    form: tl.constexpr,
    tokens: tl.constexpr,
    experts: tl.constexpr,
    topk: tl.constexpr,
    width: tl.constexpr,
    block_experts: tl.constexpr,
    hidden: tl.constexpr,
    ffn: tl.constexpr,
    shared_ffn: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    depth: tl.constexpr,
    turns: tl.constexpr,
    gating: tl.constexpr,
    pre_softmax: tl.constexpr,
    sigmoid: tl.constexpr,
    has_bias: tl.constexpr,
    has_places: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One token's `turns * block_n` inner rows, of the shared expert or of one of its experts.

    The shared expert's programs come first and keep the memory busy while others choose. Programs
    of one weight tile and all tokens, or pairs, are neighbours: an expert of two tokens is read
    from memory once.
    """
    let_next_start(overlap)
    rows: tl.constexpr = turns * block_n
    shared: tl.constexpr = (shared_ffn + rows - 1) // rows * tokens
    halves: tl.constexpr = 2 if gating is not None else 1
    sizes: tl.constexpr = (hidden, block_n, block_k, depth, gating, overlap)
    if form is None:
        of_experts, of_shared = fc1, fc1
    else:
        of_experts, of_shared = scales
        fc1 = fc1.to(tl.pointer_type(tl.uint8))
        shared_fc1 = shared_fc1.to(tl.pointer_type(tl.uint8))
    program = tl.program_id(0)
    if program < shared:
        begin = program // tokens * rows
        token = program % tokens
        own = tl.minimum(shared_ffn - begin, rows)
        start = shared_fc1 + begin.to(tl.int64) * hidden
        await_previous(overlap)
        row = x + token * x_stride
        target = shared_activated + token * shared_ffn + begin
        _activated_rows(
            row, start, target, own, shared_ffn, sizes, (None, 0), of_shared, begin, form
        )
    else:
        pair = (program - shared) % (tokens * topk)
        tile = (program - shared) // (tokens * topk)
        owner, nth = pair // topk, pair % topk
        await_previous(overlap)
        tensors = (logits, bias, places, out_experts, out_weights, num_places, dummy_place, scale)
        rule: tl.constexpr = (experts, topk, pre_softmax, sigmoid, has_bias, has_places)
        stores = (tile == 0) & (nth == 0)
        expert = choose(tensors, owner, nth, stores, rule, width, block_experts)
        if expert >= 0:
            first = tile * rows
            rest = tl.minimum(ffn - first, rows)
            source = fc1 + (expert.to(tl.int64) * (halves * ffn) + first) * hidden
            row = x + owner * x_stride
            target = activated + pair * ffn + first
            if form is not None:
                covers: tl.constexpr = form.inputs if form.inputs > 0 else hidden
                groups: tl.constexpr = (hidden + covers - 1) // covers
                grid: tl.constexpr = (halves * ffn + form.rows - 1) // form.rows * groups
                of_experts += expert.to(tl.int64) * grid
            biases = bias1, expert.to(tl.int64) * (halves * ffn) + first
            _activated_rows(row, source, target, rest, ffn, sizes, biases, of_experts, first, form)


@triton.jit
def few_down_kernel(
    activated: tl.tensor,
    shared_activated: tl.tensor,
    fc2: tl.tensor,
    shared_fc2: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    logits: tl.tensor,
    added: tl.tensor,
    out: tl.tensor,
    added_stride: tl.tensor,
    bias2: tl.tensor | None,
    scales: tl.tuple,
    form: tl.constexpr,
    tokens: tl.constexpr,
    topk: tl.constexpr,
    width: tl.constexpr,
    hidden: tl.constexpr,
    ffn: tl.constexpr,
    shared_ffn: tl.constexpr,
    units: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    depth: tl.constexpr,
    has_gate: tl.constexpr,
    has_added: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """`block_n` outputs of one token: the sum over its experts, then the shared one; `added` is
    added to the rounded sum.

    The inputs of such an output are units of `ffn` elements: one of each expert, and as many of the
    shared expert as it has. Each is a line of the tile, so that programs are many and short: long
    ones ended in a second wave that half of the processors had nothing of.
    """
    let_next_start(overlap)
    token = tl.program_id(0) % tokens
    first = tl.program_id(0) // tokens * block_n
    line, column = tl.arange(0, block_n * units), tl.arange(0, block_k)
    row, unit = first + line // units, line % units
    is_pair = unit < topk
    pair = token * topk + unit
    target = first + tl.arange(0, block_n)
    await_previous(overlap)
    if has_added:  # early: at the end, every program would wait for it
        stream = tl.load(added + token * added_stride + target, mask=target < hidden, other=0.0)
    expert = tl.load(experts + pair, mask=is_pair, other=-1)
    share = tl.load(weights + pair, mask=is_pair, other=0.0)
    # What a pair without an expert has activated was never written.
    length = tl.where(is_pair & (expert >= 0), ffn, 0)
    if form is not None:
        covers: tl.constexpr = form.inputs
        groups: tl.constexpr = (ffn + covers - 1) // covers if covers > 0 else 1
        last = tl.minimum(row, hidden - 1) // form.rows
        matrix = tl.maximum(expert, 0).to(tl.int64) * ((hidden + form.rows - 1) // form.rows)
        of_rows = scales[0] + (matrix + last) * groups
        start, width = unit * 0, unit * 0 + ffn
        fc2 = fc2.to(tl.pointer_type(tl.uint8))
        shared_fc2 = shared_fc2.to(tl.pointer_type(tl.uint8))
    rows = fc2 + (expert.to(tl.int64) * hidden + row) * ffn
    inputs = activated + pair * ffn
    if shared_ffn > 0:
        begin = (unit - topk) * ffn
        length = tl.where(is_pair, length, tl.minimum(shared_ffn - begin, ffn))
        rows = tl.where(is_pair, rows, shared_fc2 + row.to(tl.int64) * shared_ffn + begin)
        inputs = tl.where(is_pair, inputs, shared_activated + token * shared_ffn + begin)
        if form is not None:
            shared_groups: tl.constexpr = (shared_ffn + covers - 1) // covers if covers > 0 else 1
            of_rows = tl.where(is_pair, of_rows, scales[1] + last * shared_groups)
            start, width = tl.where(is_pair, 0, begin), tl.where(is_pair, ffn, shared_ffn)
        extra = 1.0
        if has_gate:
            extra = tl.sigmoid(tl.load(logits + token * width + (width - 1)))
        share = tl.where(is_pair, share, extra)
    length = tl.where(row < hidden, length, 0)
    cells = rows[:, None] + column[None, :]
    inputs = inputs[:, None] + column[None, :]
    by_part: tl.constexpr = form is not None and form.inputs > 0
    wide: tl.constexpr = block_k // 16 if by_part else block_k
    sums = tl.zeros((block_n * units, wide), tl.float32)
    if bias2 is not None:
        is_biased = is_pair & (expert >= 0) & (row < hidden)
        at_bias = bias2 + expert.to(tl.int64) * hidden + row
        weighted = share * tl.load(at_bias, mask=is_biased, other=0.0).to(tl.float32)
    if form is not None and not by_part:
        share = share * stored_scale(tl.load(of_rows))
    for at in range(0, ffn, depth * block_k):
        tiles = load_tiles(cells, column, length, at, ffn, block_k, depth)
        ask_first(overlap)
        if form is None:
            sums = add_products(sums, tiles, inputs, column, length, at, block_k)
        else:
            sums = add_scaled_products(
                sums, tiles, inputs, column, length, at, block_k, of_rows, start, width, covers
            )
    y = tl.sum(sums, 1) * share
    if bias2 is not None:
        y += weighted
    y = tl.reshape(y, (block_n, units))
    y = tl.sum(y, 1).to(out.dtype.element_ty)
    if has_added:
        y = (y.to(tl.float32) + stream.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + token * hidden + target, y, mask=target < hidden)
