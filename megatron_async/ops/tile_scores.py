"""Scores of the tokens of one tile of a row: what the sampler's kernels compare.

A score is the token's logit, for a row that is sampled from all tokens with its temperature and
noise. `best_of_tile` finds the best of a tile, of a whole vocabulary or of a tensor-parallel rank's
share of it: a token's score has the same bits in both.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOISE_GROUP = 4
"""Token ids whose noise comes from one counter of `ops/philox.py`; tiles begin where they do."""


@triton.jit
def best_of_tile(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    row_stride: tl.tensor,
    columns: tl.constexpr,
    scores: tl.tensor,
    ids: tl.tensor,
    first: tl.constexpr,
    lead: tl.constexpr,
    mode: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Kernel, one program a tile and row: the best score and its token, to `[rows, tiles]`. Rows
    with a filter count as greedy.

    `first` is the token of the first column; `lead` lies it behind the begin of its noise group.
    """
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = split * tile - lead + tl.arange(0, tile)
    inside = column < columns
    if lead > 0:
        inside &= column >= 0
    start = split * tile + (first - lead)
    score = tl.load(logits + row * row_stride + column, mask=inside, other=float("-inf"))
    score = score.to(tl.float32)
    out = row * tl.num_programs(0) + split
    if mode > 0:
        heat = tl.load(temperature + row)
        k = tl.load(top_k + row)
        if (heat > 0) & (k != 1):
            filtered = False
            if mode == 2:
                filtered = is_filtered(k, tl.load(top_p + row), tl.load(min_p + row))
            if not filtered:
                score = score / heat + gumbel(
                    tl.load(seeds + row), tl.load(positions + row), start, tile
                )
                score = tl.where(inside, score, float("-inf"))
    best, index = tl.max(score, axis=0, return_indices=True)
    tl.store(scores + out, best)
    tl.store(ids + out, start + index)


@triton.jit
def is_filtered(k: tl.tensor, p: tl.tensor, least: tl.tensor) -> tl.tensor:
    """Whether a row has a filter: top_k, top_p or min_p."""
    return (k > 0) | (p > 0) | (least > 0)


@triton.jit
def gumbel(seed: tl.tensor, position: tl.tensor, start: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """Noise of `ops/philox.py` for the tokens start .. start + tile - 1, four from one counter."""
    group = start // 4 + tl.arange(0, tile // 4)
    w0, w1, w2, w3 = tl.philox(seed, group, position.to(tl.int32), 0, 0)
    # join makes the last dimension: [group, 2, 2] whose flat order is w0, w1, w2, w3.
    bits = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (tile,))
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))
