"""Products of an expert layer for a few tokens; `ops/experts/few_tokens.py` launches them.

Such a layer takes as long as the weights of its experts take to arrive. No weight is prefetched to
the second cache before it is needed: that was tried, for the shared expert and for the second
product, and took 8 to 13 % longer (docs/records/several_gpus.md).

A warp takes whole weight rows, `block_k` elements at a time: 512 bytes, 16 for each of its threads.
It asks for `depth` such tiles of a row at once and adds up its own sums, so that no warp waits for
another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.dependent_launch import await_previous, let_next_start
from megatron_async.ops.experts.few_token_routing import choose


@triton.jit
def _ask_first(overlap: tl.constexpr) -> None:
    """Loads before this are issued before any later load.

    Left alone, ptxas moves inputs and products among a row's loads: 3 of 16 were on their way when
    the first product waited for its weight (sm_90, CUDA 12.8). A warp that waits for itself costs
    no instruction.
    """
    if overlap:
        tl.inline_asm_elementwise(
            "{ bar.warp.sync 0xffffffff; mov.u32 $0, 0; }",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _load_tiles(
    rows: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    at: tl.tensor,
    k: tl.constexpr,
    block_k: tl.constexpr,
    depth: tl.constexpr,
) -> tl.tuple:
    """`depth` tiles of weight rows of k elements, from element `at` on; zeros after the end."""
    tiles = ()
    for step in tl.static_range(depth):
        if step * block_k < k:
            mask = inside & (column < k - at - step * block_k)[None, :]
            # Read once: past the first cache, where the inputs lie.
            tile = tl.load(rows + (at + step * block_k), mask, other=0.0, cache_modifier=".cg")
            tiles += (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def _add_products(
    sums: tl.tensor,
    tiles: tl.tuple,
    x: tl.tensor,
    column: tl.tensor,
    real: tl.tensor,
    at: tl.tensor,
    k: tl.constexpr,
    block_k: tl.constexpr,
) -> tl.tensor:
    """`sums` and the products of `_load_tiles`'s tiles with the inputs, which are loaded as wide as
    a tile: no exchange between threads."""
    for step in tl.static_range(len(tiles)):
        mask = (column < k - at - step * block_k)[None, :] & real
        v = tl.load(x + (at + step * block_k), mask=mask, other=0.0).to(tl.float32)
        sums += tiles[step].to(tl.float32) * v
    return sums


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
    inside = (line < here)[:, None]
    inputs = x + line[:, None] * 0 + column[None, :]
    cells = start + line[:, None] * k + column[None, :]
    sums = tl.zeros((block_n, block_k), tl.float32)
    ups = tl.zeros((block_n, block_k), tl.float32)
    for at in range(0, k, depth * block_k):
        w = _load_tiles(cells, column, inside, at, k, block_k, depth)
        if gated:
            u = _load_tiles(cells + n * k, column, inside, at, k, block_k, depth)
        _ask_first(overlap)
        sums = _add_products(sums, w, inputs, column, inside, at, k, block_k)
        if gated:
            ups = _add_products(ups, u, inputs, column, inside, at, k, block_k)
    y = tl.sum(sums, 1)
    if gated:
        y = y * tl.sigmoid(y) * tl.sum(ups, 1)
    else:
        y = tl.maximum(y, 0.0)
        y = y * y
    tl.store(out + line, y.to(out.dtype.element_ty), mask=line < here)


@triton.jit(do_not_specialize=["num_places", "limit"])
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
    limit: tl.tensor,
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
            limit,
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
    out: tl.tensor,
    tokens: tl.constexpr,
    topk: tl.constexpr,
    width: tl.constexpr,
    hidden: tl.constexpr,
    ffn: tl.constexpr,
    shared_ffn: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    depth: tl.constexpr,
    group: tl.constexpr,
    has_gate: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """`block_n` outputs of one token: the sum over its experts in their order, then the shared one.

    The weights of `group` pairs are asked for at once. The shared expert's product is computed
    first and added last.
    """
    let_next_start(overlap)
    token = tl.program_id(0) % tokens
    first = tl.program_id(0) // tokens * block_n
    line, column = tl.arange(0, block_n), tl.arange(0, block_k)
    here = tl.minimum(hidden - first, block_n)
    inside = (line < here)[:, None]
    place = line[:, None] * 0 + column[None, :]
    await_previous(overlap)
    if shared_ffn > 0:
        start = shared_fc2 + first.to(tl.int64) * shared_ffn
        shared_sums = tl.zeros((block_n, block_k), tl.float32)
        shared_cells = start + line[:, None] * shared_ffn + column[None, :]
        inputs = shared_activated + token * shared_ffn + place
        for at in range(0, shared_ffn, depth * block_k):
            w = _load_tiles(shared_cells, column, inside, at, shared_ffn, block_k, depth)
            _ask_first(overlap)
            shared_sums = _add_products(
                shared_sums, w, inputs, column, inside, at, shared_ffn, block_k
            )
    sums = tl.zeros((block_n, block_k), tl.float32)
    cells = first.to(tl.int64) * ffn + line[:, None] * ffn + column[None, :]
    for base in range(0, topk, group):
        for at in range(0, ffn, depth * block_k):
            held = ()
            for member in tl.static_range(group):
                pair = token * topk + base + member
                expert = tl.load(experts + pair, mask=base + member < topk, other=-1)
                real = inside & (expert >= 0)
                own = fc2 + expert.to(tl.int64) * (hidden * ffn) + cells
                held += (  # type: ignore[assignment]
                    _load_tiles(own, column, real, at, ffn, block_k, depth),
                )
            _ask_first(overlap)
            for member in tl.static_range(group):
                pair = token * topk + base + member
                expert = tl.load(experts + pair, mask=base + member < topk, other=-1)
                share = tl.load(weights + pair, mask=base + member < topk, other=0.0)
                # What a pair without an expert has activated was never written.
                real = inside & (expert >= 0)
                product = tl.zeros((block_n, block_k), tl.float32)
                product = _add_products(
                    product, held[member], activated + pair * ffn + place, column, real, at, ffn,
                    block_k,
                )  # fmt: skip
                sums += product * share
    y = tl.sum(sums, 1)
    if shared_ffn > 0:
        extra = tl.sum(shared_sums, 1)
        if has_gate:
            extra = extra * tl.sigmoid(tl.load(logits + token * width + (width - 1)))
        y = y + extra
    target = out + token * hidden + first + line
    tl.store(target, y.to(out.dtype.element_ty), mask=line < here)
