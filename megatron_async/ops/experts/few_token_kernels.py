"""Products of an expert layer for a few tokens; `ops/experts/few_tokens.py` launches them.

Such a layer takes as long as the weights of its experts take to arrive. No weight is prefetched to
the second cache before it is needed: that was tried, for the shared expert and for the second
product, and took 8 to 13 % longer (docs/records/several_gpus.md).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.dependent_launch import await_previous, let_next_start
from megatron_async.ops.experts.few_token_routing import choose
from megatron_async.ops.linear.row_tiles import add_products, ask_first, load_tiles


@triton.jit
def _activated_rows(
    x: tl.tensor,
    start: tl.tensor,
    out: tl.tensor,
    here: tl.tensor,
    n: tl.constexpr,
    k: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    depth: tl.constexpr,
    gated: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """A row of x times `here` rows of a weight, from `start` on, and the activation; the up row of
    each, if `gated`, is `n` rows behind it."""
    line, column = tl.arange(0, block_n), tl.arange(0, block_k)
    length = tl.where(line < here, k, 0)
    inputs = x + line[:, None] * 0 + column[None, :]
    cells = start + line[:, None] * k + column[None, :]
    sums = tl.zeros((block_n, block_k), tl.float32)
    ups = tl.zeros((block_n, block_k), tl.float32)
    for at in range(0, k, depth * block_k):
        w = load_tiles(cells, column, length, at, k, block_k, depth)
        if gated:
            u = load_tiles(cells + n * k, column, length, at, k, block_k, depth)
        ask_first(overlap)
        sums = add_products(sums, w, inputs, column, length, at, block_k)
        if gated:
            ups = add_products(ups, u, inputs, column, length, at, block_k)
    y = tl.sum(sums, 1)
    if gated:
        y = y * tl.sigmoid(y) * tl.sum(ups, 1)
    else:
        y = tl.maximum(y, 0.0)
        y = y * y
    tl.store(out + line, y.to(out.dtype.element_ty), mask=line < here)


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
    gated: tl.constexpr,
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
    halves: tl.constexpr = 2 if gated else 1
    program = tl.program_id(0)
    if program < shared:
        begin = program // tokens * rows
        token = program % tokens
        own = tl.minimum(shared_ffn - begin, rows)
        start = shared_fc1 + begin.to(tl.int64) * hidden
        await_previous(overlap)
        for turn in range(tl.cdiv(own, block_n)):
            _activated_rows(
                x + token * x_stride,
                start + turn * (block_n * hidden),
                shared_activated + token * shared_ffn + begin + turn * block_n,
                tl.minimum(own - turn * block_n, block_n),
                shared_ffn,
                hidden,
                block_n,
                block_k,
                depth,
                gated,
                overlap,
            )
    else:
        pair = (program - shared) % (tokens * topk)
        tile = (program - shared) // (tokens * topk)
        owner, nth = pair // topk, pair % topk
        await_previous(overlap)
        expert = choose(
            logits,
            bias,
            places,
            out_experts,
            out_weights,
            owner,
            nth,
            (tile == 0) & (nth == 0),
            num_places,
            dummy_place,
            scale,
            experts,
            topk,
            width,
            block_experts,
            pre_softmax,
            sigmoid,
            has_bias,
            has_places,
        )
        if expert >= 0:
            first = tile * rows
            rest = tl.minimum(ffn - first, rows)
            source = fc1 + (expert.to(tl.int64) * (halves * ffn) + first) * hidden
            for turn in range(tl.cdiv(rest, block_n)):
                _activated_rows(
                    x + owner * x_stride,
                    source + turn * (block_n * hidden),
                    activated + pair * ffn + first + turn * block_n,
                    tl.minimum(rest - turn * block_n, block_n),
                    ffn,
                    hidden,
                    block_n,
                    block_k,
                    depth,
                    gated,
                    overlap,
                )


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
    rows = fc2 + (expert.to(tl.int64) * hidden + row) * ffn
    inputs = activated + pair * ffn
    if shared_ffn > 0:
        begin = (unit - topk) * ffn
        length = tl.where(is_pair, length, tl.minimum(shared_ffn - begin, ffn))
        rows = tl.where(is_pair, rows, shared_fc2 + row.to(tl.int64) * shared_ffn + begin)
        inputs = tl.where(is_pair, inputs, shared_activated + token * shared_ffn + begin)
        extra = 1.0
        if has_gate:
            extra = tl.sigmoid(tl.load(logits + token * width + (width - 1)))
        share = tl.where(is_pair, share, extra)
    length = tl.where(row < hidden, length, 0)
    cells = rows[:, None] + column[None, :]
    inputs = inputs[:, None] + column[None, :]
    sums = tl.zeros((block_n * units, block_k), tl.float32)
    for at in range(0, ffn, depth * block_k):
        tiles = load_tiles(cells, column, length, at, ffn, block_k, depth)
        ask_first(overlap)
        sums = add_products(sums, tiles, inputs, column, length, at, block_k)
    y = tl.reshape(tl.sum(sums, 1) * share, (block_n, units))
    y = tl.sum(y, 1).to(out.dtype.element_ty)
    if has_added:
        y = (y.to(tl.float32) + stream.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + token * hidden + target, y, mask=target < hidden)
