"""(token, expert) pairs sorted by expert into tiles of equal height, on the device.

Pair p is token p // topk's expert number p % topk. Few pairs: one kernel, in which every program
counts all of them, cheaper than a launch more. Many: one kernel counts them by chunks, a second one
places them, so that no program reads more than its own chunk and the counts. Neither uses atomics:
the order is always the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.experts.expert_routing import Routing

CHUNK = 1024
"""Pairs that a program of the one kernel counts at once."""
MOST_AT_ONCE = 6144
"""Most pairs that one kernel sorts: two take 16 us up to 25,000 pairs, one 14 us for so many and as
much more as there are more (H200, 128 experts)."""
PLACED_CHUNK = 512
"""Pairs of a program where two kernels do."""
RANKED = 128
"""Pairs that such a program compares with each other."""
SUMMED_CHUNKS = 16
"""Chunks whose counts such a program adds at once."""


class SortedPairs(NamedTuple):
    """Tiles of pairs, int32, on the device.

    Attributes:
        num_tiles: `[1]`: how many there are.
        tile_experts: `[most tiles]`: of each, the expert's number on this rank.
        pairs: `[most tiles * block_m]`: of each tile, its pairs in order; places left over in an
            expert's last tile have the number of all pairs.
    """

    num_tiles: Tensor
    tile_experts: Tensor
    pairs: Tensor

    @property
    def most_tiles(self) -> int:
        """Tiles that there may be, whatever the routing."""
        return self.tile_experts.numel()


def sort_pairs(
    routing: Routing, first_expert: int, local: int, block_m: int, at_once: int = MOST_AT_ONCE
) -> SortedPairs:
    """The pairs of a routing, on a GPU, of at least one token, whose experts are among the `local`
    ones here, in tiles of `block_m`. One kernel sorts up to `at_once` pairs (tests and benchmarks
    set it); there are two for more."""
    experts = routing.experts
    pairs, topk = experts.numel(), experts.size(1)
    tiles = min(pairs, min(pairs, local) + pairs // block_m)
    # Tensors of their own, because Triton compiles a kernel anew for another alignment.
    num_tiles, tile_experts, sorted_pairs = (
        torch.empty(size, dtype=torch.int32, device=experts.device)
        for size in (1, tiles, tiles * block_m)
    )
    found = SortedPairs(num_tiles, tile_experts, sorted_pairs)
    bins = triton.next_power_of_2(local + 1)
    options = {"num_warps": 4, **launch_options(experts)}
    if pairs <= at_once:
        chunk = min(CHUNK, max(32, triton.next_power_of_2(pairs)))
        _sort_kernel[(local,)](
            experts, experts.stride(0), *found, pairs, first_expert, local=local, bins=bins,
            topk=topk, block_m=block_m, chunk=chunk, **options,
        )  # fmt: skip
        return found
    chunks = triton.cdiv(pairs, PLACED_CHUNK)
    counts = torch.empty((chunks, bins), dtype=torch.int32, device=experts.device)
    _count_kernel[(chunks,)](
        experts, experts.stride(0), counts, pairs, first_expert, local=local, bins=bins, topk=topk,
        chunk=PLACED_CHUNK, **options,
    )  # fmt: skip
    _place_kernel[(chunks + local,)](
        experts, experts.stride(0), counts, *found, pairs, first_expert, chunks, local=local,
        bins=bins, topk=topk, block_m=block_m, chunk=PLACED_CHUNK, ranked=RANKED,
        summed=SUMMED_CHUNKS, **options,
    )  # fmt: skip
    return found


@triton.jit
def _experts_of(
    experts: tl.tensor,
    experts_stride: tl.tensor,
    pair: tl.tensor,
    pairs: tl.tensor,
    first_expert: tl.tensor,
    local: tl.constexpr,
    topk: tl.constexpr,
) -> tl.tensor:
    """The number here of each pair's expert; `local`: elsewhere, or no pair."""
    place = experts + (pair // topk) * experts_stride + pair % topk
    expert = tl.load(place, mask=pair < pairs, other=-1) - first_expert
    return tl.where((pair < pairs) & (expert >= 0) & (expert < local), expert, local)


@triton.jit
def _fill_tiles(
    tile_experts: tl.tensor,
    sorted_pairs: tl.tensor,
    expert: tl.tensor,
    first_tile: tl.tensor,
    tiles: tl.tensor,
    count: tl.tensor,
    pairs: tl.tensor,
    block_m: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """What an expert's tiles hold beside its pairs: their owner, and places left over."""
    each = tl.arange(0, chunk)
    rest = count + tl.arange(0, block_m)
    tl.store(sorted_pairs + first_tile * block_m + rest, pairs, mask=rest < tiles * block_m)
    for at in range(0, tiles, chunk):
        tl.store(tile_experts + first_tile + at + each, expert, mask=at + each < tiles)


@triton.jit(do_not_specialize=["pairs", "first_expert"])
def _sort_kernel(
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
    overlap: tl.constexpr,
) -> None:
    """One expert: it counts all experts' pairs, which tells where its own tiles begin, and places
    its own."""
    wait_for_previous(overlap)
    own = tl.program_id(0)
    each = tl.arange(0, chunk)
    bin_ = tl.arange(0, bins)
    counts = tl.zeros((bins,), tl.int32)
    for at in range(0, pairs, chunk):
        counts += tl.histogram(
            _experts_of(experts, experts_stride, at + each, pairs, first_expert, local, topk), bins
        )
    tiles = tl.where(bin_ < local, (counts + block_m - 1) // block_m, 0)
    first_tile = tl.sum(tl.where(bin_ < own, tiles, 0), 0)
    own_tiles = tl.sum(tl.where(bin_ == own, tiles, 0), 0)
    own_count = tl.sum(tl.where(bin_ == own, counts, 0), 0)
    if own == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))
    done = tl.zeros((), tl.int32)
    for at in range(0, pairs, chunk):
        expert = _experts_of(experts, experts_stride, at + each, pairs, first_expert, local, topk)
        mine = expert == own
        rank = done + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(sorted_pairs + first_tile * block_m + rank, at + each, mask=mine)
        done += tl.sum(mine.to(tl.int32), 0)
    _fill_tiles(
        tile_experts, sorted_pairs, own, first_tile, own_tiles, own_count, pairs, block_m, chunk
    )


@triton.jit(do_not_specialize=["pairs", "first_expert"])
def _count_kernel(
    experts: tl.tensor,
    experts_stride: tl.tensor,
    counts: tl.tensor,
    pairs: tl.tensor,
    first_expert: tl.tensor,
    local: tl.constexpr,
    bins: tl.constexpr,
    topk: tl.constexpr,
    chunk: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One chunk: how many of its pairs each expert has."""
    wait_for_previous(overlap)
    pair = tl.program_id(0) * chunk + tl.arange(0, chunk)
    expert = _experts_of(experts, experts_stride, pair, pairs, first_expert, local, topk)
    bin_ = tl.arange(0, bins)
    tl.store(counts + tl.program_id(0) * bins + bin_, tl.histogram(expert, bins))


@triton.jit(do_not_specialize=["pairs", "first_expert", "chunks"])
def _place_kernel(
    experts: tl.tensor,
    experts_stride: tl.tensor,
    counts: tl.tensor,
    num_tiles: tl.tensor,
    tile_experts: tl.tensor,
    sorted_pairs: tl.tensor,
    pairs: tl.tensor,
    first_expert: tl.tensor,
    chunks: tl.tensor,
    local: tl.constexpr,
    bins: tl.constexpr,
    topk: tl.constexpr,
    block_m: tl.constexpr,
    chunk: tl.constexpr,
    ranked: tl.constexpr,
    summed: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One chunk: its pairs to their tiles; after all chunks one expert: the rest of its tiles."""
    wait_for_previous(overlap)
    own = tl.program_id(0)
    bin_ = tl.arange(0, bins)
    total = tl.zeros((bins,), tl.int32)
    before = tl.zeros((bins,), tl.int32)
    for at in range(0, chunks, summed):
        row = at + tl.arange(0, summed)
        place = counts + row[:, None] * bins + bin_[None, :]
        found = tl.load(place, mask=(row < chunks)[:, None], other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where((row < own)[:, None], found, 0), 0)
    tiles = tl.where(bin_ < local, (total + block_m - 1) // block_m, 0)
    first_tile = tl.cumsum(tiles, 0) - tiles
    if own < chunks:
        target = first_tile * block_m + before
        earlier = tl.arange(0, ranked)[None, :] < tl.arange(0, ranked)[:, None]
        for at in range(0, chunk, ranked):
            pair = own * chunk + at + tl.arange(0, ranked)
            expert = _experts_of(experts, experts_stride, pair, pairs, first_expert, local, topk)
            same = (expert[:, None] == expert[None, :]) & earlier
            rank = tl.sum(same.to(tl.int32), 1)
            place = tl.gather(target, expert, 0) + rank
            tl.store(sorted_pairs + place, pair, mask=expert < local)
            target += tl.histogram(expert, bins)
    else:
        expert_here = own - chunks
        mine = bin_ == expert_here
        own_first = tl.sum(tl.where(mine, first_tile, 0), 0)
        own_tiles = tl.sum(tl.where(mine, tiles, 0), 0)
        count = tl.sum(tl.where(mine, total, 0), 0)
        if expert_here == 0:
            tl.store(num_tiles, tl.sum(tiles, 0))
        _fill_tiles(
            tile_experts, sorted_pairs, expert_here, own_first, own_tiles, count, pairs, block_m,
            chunk,
        )  # fmt: skip
