"""The best token of each row over all ranks in one kernel, over symmetric memory.

One program a row. It finds the best of its rank's columns from the tiles' best, and writes score
and token to its rank's memory as one word of eight bytes. Then it signals all ranks, waits for the
signals of all ranks, and reads all words. Every rank compares the same words in the same order, so
all ranks choose the same token.

`ops/ranks/symmetric_meeting.py` describes how ranks meet; a row is a place. All ranks must launch
the same rows in the same order, as with collectives.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.ranks.symmetric_meeting import meet
from megatron_async.ops.ranks.symmetric_memory import flag_bytes, make_on_all, share
from megatron_async.ops.sampling.slot_records import NO_TOKEN
from megatron_async.ops.sampling.tile_scores import is_finite, nan_to_infinity

NOTHING = tl.constexpr(NO_TOKEN)
WORD_BYTES = 8
"""A score and its token."""
LEAST_ROWS = 1024
"""Rows for which there is room at least, so that the next engine of a process finds it, too."""


def choose_among_ranks(
    scores: Tensor,
    ids: Tensor,
    pointers: Tensor,
    turns: Tensor,
    rank: int,
    first_word: int,
) -> Tensor:
    """The best token of each row over all ranks.

    Args:
        scores: float32 `[rows, splits]`, contiguous, on a GPU: the best of each part of this rank's
            columns.
        ids: int32 `[rows, splits]`, contiguous: the tokens that have them, rising.
        pointers: int64 `[ranks]`: addresses of the ranks' symmetric memory: int32 flags `[places,
            ranks]`, zero at first, then, at `first_word` words of eight bytes, two for each row,
            `[2, places]`. Ranks hold the vocabulary in their order.
        turns: int32 `[places]`, this rank's own memory, zero at first.
        rank: of this process.
        first_word: words before the rows' own.

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
    if rows > len(turns):
        raise ValueError(f"choose_among_ranks: at most {len(turns)} rows; found {rows}.")
    tokens = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if rows:
        _choose_among_ranks_kernel[(rows,)](
            scores,
            ids,
            tokens,
            pointers,
            turns,
            splits,
            rank=rank,
            ranks=len(pointers),
            lanes=triton.next_power_of_2(len(pointers)),
            places=len(turns),
            first_word=first_word,
            block=triton.next_power_of_2(splits),
            num_warps=1,
            **launch_options(scores),
        )
    return tokens


class SymmetricChoice:
    """Workspace of a group, made once, and the kernel on it.

    Flags and words lie in one symmetric tensor; writers and readers of a row take turns by its
    flags.

    Args:
        group: the ranks, all on this host.
        rows: most rows of a step.
        device: of this rank.

    Attributes:
        rows: the argument.

    Raises:
        RuntimeError: the memory cannot be shared.
    """

    def __init__(self, group: dist.ProcessGroup, rows: int, device: torch.device) -> None:
        self.rows = rows
        self._rank = group.rank()
        self._first_word = flag_bytes(rows, group.size()) // WORD_BYTES
        self._words, self._pointers = share(self._first_word + 2 * rows, torch.int64, device, group)
        self._turns = torch.zeros(rows, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # sync-ok: at the start

    def choose(self, scores: Tensor, ids: Tensor) -> Tensor:
        """The best of all ranks' candidates, by `choose_among_ranks`."""
        return choose_among_ranks(
            scores, ids, self._pointers, self._turns, self._rank, self._first_word
        )


def make_symmetric_choice(
    group: dist.ProcessGroup, max_rows: int, device: torch.device
) -> tuple[SymmetricChoice | None, str]:
    """A workspace for a group, if all of its ranks can have it; see `make_on_all`."""
    rows = max(max_rows, LEAST_ROWS)
    return make_on_all(group, lambda: SymmetricChoice(group, rows, device))


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
    first_word: tl.constexpr,
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
    start = first_word + (turn & 1).to(tl.int64) * places + row
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
