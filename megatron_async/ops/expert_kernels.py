"""Kernels of the experts' grouped products; `ops/expert_mlp.py` launches them.

A pair is a token and one of its experts: pair p is token p // topk's expert number p % topk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.dependent_launch import wait_for_previous


@triton.jit
def load_experts(
    experts: tl.tensor,
    experts_stride: tl.tensor,
    pair: tl.tensor,
    pairs: tl.tensor,
    first_expert: tl.tensor,
    local: tl.constexpr,
    topk: tl.constexpr,
) -> tl.tensor:
    """Which expert of those here each pair of a block has; `local` where that is elsewhere."""
    place = experts + (pair // topk) * experts_stride + pair % topk
    expert = tl.load(place, mask=pair < pairs, other=-1) - first_expert
    return tl.where((pair < pairs) & (expert >= 0) & (expert < local), expert, local)


@triton.jit(do_not_specialize=["pairs", "first_expert"])
def sort_kernel(
    experts: tl.tensor,
    experts_stride: tl.tensor,
    num_tiles: tl.tensor,
    tile_experts: tl.tensor,
    sorted_pairs: tl.tensor,
    pairs: tl.tensor,
    first_expert: tl.tensor,
    local: tl.constexpr,
    bins: tl.constexpr,
    topk: tl.constexpr,
    block_m: tl.constexpr,
    chunk: tl.constexpr,
    once: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One expert: its pairs, in order, into its tiles of `block_m`; places left over in the last
    tile get the number `pairs`.

    Every program counts all experts' pairs, which tells where its own tiles begin: cheaper than a
    kernel more and without atomics, so the order is always the same. Where `once`, all pairs are
    one chunk, which stays in registers.
    """
    wait_for_previous(overlap)
    own = tl.program_id(0)
    each = tl.arange(0, chunk)
    bin_ = tl.arange(0, bins)
    if once:
        all_experts = load_experts(experts, experts_stride, each, pairs, first_expert, local, topk)
        counts = tl.histogram(all_experts, bins)
    else:
        counts = tl.zeros((bins,), tl.int32)
        for at in range(0, pairs, chunk):
            found = load_experts(
                experts, experts_stride, at + each, pairs, first_expert, local, topk
            )
            counts += tl.histogram(found, bins)
    tiles = (counts + block_m - 1) // block_m
    # One sum over the bins for both: each takes as long as reading the pairs from the cache.
    before = tl.where(bin_ < own, tiles, 0).to(tl.int64)
    both = tl.sum(before + (tl.where(bin_ == own, counts, 0).to(tl.int64) << 32), 0)
    first_tile, own_count = both.to(tl.int32), (both >> 32).to(tl.int32)
    own_tiles = (own_count + block_m - 1) // block_m
    if own == local - 1:
        tl.store(num_tiles, first_tile + own_tiles)
    target = sorted_pairs + first_tile * block_m
    if once:
        mine = all_experts == own
        tl.store(target + tl.cumsum(mine.to(tl.int32), 0) - 1, each, mask=mine)
    else:
        done = tl.zeros((), tl.int32)
        for at in range(0, pairs, chunk):
            found = load_experts(
                experts, experts_stride, at + each, pairs, first_expert, local, topk
            )
            mine = found == own
            rank = done + tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(target + rank, at + each, mask=mine)
            done += tl.sum(mine.to(tl.int32), 0)
    rest = own_count + tl.arange(0, block_m)
    tl.store(target + rest, pairs, mask=rest < own_tiles * block_m)
    for at in range(0, own_tiles, chunk):
        tl.store(tile_experts + first_tile + at + each, own, mask=at + each < own_tiles)


@triton.jit
def places_of(all_experts: tl.tensor, lanes: tl.constexpr) -> tl.tensor:
    """Of few pairs: how many before each have its expert."""
    each = tl.arange(0, lanes)
    same = all_experts[:, None] == all_experts[None, :]
    earlier = each[None, :] < each[:, None]
    return tl.sum((same & earlier).to(tl.int32), 1)


@triton.jit
def number_tiles(
    all_experts: tl.tensor, places: tl.tensor, local: tl.constexpr, block_m: tl.constexpr
) -> tl.tensor:
    """Which tile a pair is the first of; -1 for the others."""
    opens = (all_experts < local) & (places % block_m == 0)
    return tl.where(opens, tl.cumsum(opens.to(tl.int32), 0) - 1, -1)


@triton.jit
def find_pairs(
    all_experts: tl.tensor,
    places: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    pairs: tl.tensor,
    lanes: tl.constexpr,
    block_m: tl.constexpr,
) -> tl.tensor:
    """An expert's pairs from its `first` on, in order, and `pairs` behind them: `[block_m]`."""
    each = tl.arange(0, lanes)
    row = tl.where(all_experts == expert, places - first, -1)
    is_row = row[None, :] == tl.arange(0, block_m)[:, None]
    return pairs + tl.sum(tl.where(is_row, each[None, :] - pairs, 0), 1)


@triton.jit(do_not_specialize=["pairs", "walkers", "first_expert"])
def grouped_product_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    pair_weights: tl.tensor,
    pair_weights_stride: tl.tensor,
    experts: tl.tensor,
    experts_stride: tl.tensor,
    num_tiles: tl.tensor,
    tile_experts: tl.tensor,
    sorted_pairs: tl.tensor,
    pairs: tl.tensor,
    walkers: tl.tensor,
    first_expert: tl.tensor,
    local: tl.constexpr,
    n: tl.constexpr,
    k: tl.constexpr,
    topk: tl.constexpr,
    pairs_per_row: tl.constexpr,
    lanes: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    gated: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Tiles of pairs times `block_n` rows of their experts' weights.

    Row of pair p is p // pairs_per_row. The `walkers` of one weight tile share the pair tiles: one
    takes every `walkers`-th. They are neighbours, so an expert's weight is read from memory once.
    With `lanes` nothing is sorted: a program looks for its pairs among that many.
    """
    wait_for_previous(overlap)
    walker = tl.program_id(0) % walkers
    column = tl.program_id(0) // walkers * block_n + tl.arange(0, block_n)
    is_column = (column < n)[:, None]
    inner = tl.arange(0, block_k)
    if lanes:
        all_experts = load_experts(
            experts, experts_stride, tl.arange(0, lanes), pairs, first_expert, local, topk
        )
        places = places_of(all_experts, lanes)
        numbers = number_tiles(all_experts, places, local, block_m)
        count = tl.max(numbers, 0) + 1
    else:
        count = tl.load(num_tiles)
    for tile in range(walker, count, walkers):
        if lanes:
            both = tl.sum(tl.where(numbers == tile, all_experts * lanes + places, 0), 0)
            expert, first = both // lanes, both % lanes
            pair = find_pairs(all_experts, places, expert, first, pairs, lanes, block_m)
        else:
            expert = tl.load(tile_experts + tile)
            pair = tl.load(sorted_pairs + tile * block_m + tl.arange(0, block_m))
        expert = expert.to(tl.int64)
        real = pair < pairs
        is_row = real[:, None]
        rows = x + (pair // pairs_per_row).to(tl.int64)[:, None] * x_stride + inner[None, :]
        height: tl.constexpr = 2 * n if gated else n
        cells = weight + expert * (height * k) + column[:, None] * k + inner[None, :]
        sums = tl.zeros((block_m, block_n), tl.float32)
        up_sums = tl.zeros((block_m, block_n), tl.float32)
        for at in range(0, k, block_k):
            if k % block_k == 0:
                row_mask, cell_mask = is_row, is_column
            else:
                left = (inner < k - at)[None, :]
                row_mask, cell_mask = is_row & left, is_column & left
            v = tl.load(rows + at, mask=row_mask, other=0.0)
            w = tl.load(cells + at, mask=cell_mask, other=0.0)
            sums = tl.dot(v, tl.trans(w), sums, input_precision="ieee")
            if gated:
                u = tl.load(cells + n * k + at, mask=cell_mask, other=0.0)
                up_sums = tl.dot(v, tl.trans(u), up_sums, input_precision="ieee")
        if gated:
            sums = sums * tl.sigmoid(sums) * up_sums
        else:
            place = (pair // topk) * pair_weights_stride + pair % topk
            share = tl.load(pair_weights + place, mask=real, other=0.0)
            sums = sums * share[:, None]
        target = out + pair.to(tl.int64)[:, None] * n + column[None, :]
        tl.store(target, sums.to(out.dtype.element_ty), mask=is_row & (column < n)[None, :])
