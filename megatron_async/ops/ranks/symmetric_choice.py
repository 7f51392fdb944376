"""The best token of each row over all ranks in one kernel, over symmetric memory.

One program a row, which is a place of a `Meeting`. It finds the best of its rank's columns from the
tiles' best, and writes score and token as one word of eight bytes. Then it meets the other ranks,
and reads all words. Every rank compares the same words in the same order, so all ranks choose the
same token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.ranks.symmetric_memory import Meeting, meet
from megatron_async.ops.sampling.slot_records import NO_TOKEN
from megatron_async.ops.sampling.tile_scores import is_finite, nan_to_infinity

NOTHING = tl.constexpr(NO_TOKEN)
LEAST_ROWS = 1024
"""Rows for which there is room at least, so that the next engine of a process finds it, too."""


def choose_among_ranks(scores: Tensor, ids: Tensor, meeting: Meeting) -> Tensor:
    """The best token of each row over all ranks.

    Args:
        scores: float32 `[rows, splits]`, contiguous, on a GPU: the best of each part of this rank's
            columns.
        ids: int32 `[rows, splits]`, contiguous: the tokens that have them, rising.
        meeting: its data are words, int64 `[2, places]`. Ranks hold the vocabulary in their order.

    Returns:
        int64 `[rows]`: the largest score of all, of equal ones the lowest token; -1 where the
        largest is not finite, or one is NaN. The same on all ranks.

    Raises:
        ValueError: shapes or strides do not fit, or there are more rows than places.
    """
    rows, splits = scores.shape
    if ids.shape != scores.shape or not (scores.is_contiguous() and ids.is_contiguous()):
        raise ValueError(
            f"choose_among_ranks: scores {tuple(scores.shape)} and ids {tuple(ids.shape)} must be "
            "contiguous and of one shape: call .contiguous()."
        )
    if rows > meeting.places:
        raise ValueError(f"choose_among_ranks: at most {meeting.places} rows; found {rows}.")
    tokens = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if rows:
        _choose_among_ranks_kernel[(rows,)](
            scores,
            ids,
            tokens,
            meeting.pointers,
            meeting.turns,
            splits,
            **meeting.constants,
            block=triton.next_power_of_2(splits),
            num_warps=1,
            **launch_options(scores),
        )
    return tokens


@triton.jit
def _choose_among_ranks_kernel(
    scores: tl.tensor,
    ids: tl.tensor,
    tokens: tl.tensor,
    pointers: tl.tensor,
    turns: tl.tensor,
    splits: tl.tensor,
    rank: tl.constexpr,
    ranks: tl.constexpr,
    lanes: tl.constexpr,
    places: tl.constexpr,
    first: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, block)
    wait_for_previous(overlap)
    score = tl.load(scores + row * splits + split, mask=split < splits, other=float("-inf"))
    best, index = tl.max(nan_to_infinity(score), axis=0, return_indices=True)
    token = tl.load(ids + row * splits + index)
    word = (best.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token.to(tl.int64)
    turn = tl.load(turns + row) + 1
    start = first + (turn & 1).to(tl.int64) * places + row
    mine = tl.load(pointers + rank).to(tl.pointer_type(tl.int64))
    tl.store(mine + start, word)
    meet(pointers, turns, row, turn, rank, ranks, lanes)
    peer = tl.arange(0, lanes)
    exists = peer < ranks
    theirs = tl.load(pointers + peer, mask=exists, other=0).to(tl.pointer_type(tl.int64))
    found = tl.load(theirs + start, mask=exists, other=0, cache_modifier=".cg")
    score = (found >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    # Of equal scores the first wins, from the rank with the lowest tokens.
    best, winner = tl.max(tl.where(exists, score, float("-inf")), axis=0, return_indices=True)
    chosen = tl.sum(tl.where(peer == winner, found.to(tl.int32), 0)).to(tl.int64)
    tl.store(tokens + row, tl.where(is_finite(best), chosen, NOTHING))
