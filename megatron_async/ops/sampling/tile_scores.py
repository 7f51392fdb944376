"""Scores of the tokens of one tile of a row, and reads of its request's record: functions shared by
the kernels of sampling and of log probs.

A score is the token's logit, for a row that is sampled from all tokens with its temperature and
noise. `best_of_tile` finds the best of a tile, of a whole vocabulary or of a tensor-parallel rank's
share of it: a token's score has the same bits in both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.sampling.slot_records import RECORD_WORDS, Header

NOISE_GROUP = 4
"""Token ids whose noise comes from one counter of `ops/sampling/philox.py`; tiles begin where they
do."""

WORDS = tl.constexpr(RECORD_WORDS)
TEMPERATURE = tl.constexpr(int(Header.TEMPERATURE))
TOP_K = tl.constexpr(int(Header.TOP_K))
TOP_P = tl.constexpr(int(Header.TOP_P))
MIN_P = tl.constexpr(int(Header.MIN_P))
SEED_LOW = tl.constexpr(int(Header.SEED_LOW))
SEED_HIGH = tl.constexpr(int(Header.SEED_HIGH))
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def best_of_tile(
    logits: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    records: tl.tensor,
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
    with a filter count as greedy. NaN counts as infinity, so that no comparison loses it: a row
    with either of them has a best score that is not finite after the tiles are joined.

    `first` is the token of the first column, and is `lead` tokens after the start of its noise
    group.
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
        record = record_of(records, slots, row)
        heat = heat_of(record)
        if heat > 0:
            filtered = False
            if mode == 2:
                filtered = is_filtered(record)
            if not filtered:
                score = score / heat + noise_of(record, tl.load(positions + row), start, tile)
                score = tl.where(inside, score, float("-inf"))
    score = nan_to_infinity(score)
    best, index = tl.max(score, axis=0, return_indices=True)
    tl.store(scores + out, best)
    tl.store(ids + out, start + index)


@triton.jit
def nan_to_infinity(score: tl.tensor) -> tl.tensor:
    """The scores, with infinity in place of NaN."""
    return tl.where(score == score, score, float("inf"))


@triton.jit
def is_finite(score: tl.tensor) -> tl.tensor:
    """Whether a score is a number, and not infinite."""
    return (score > float("-inf")) & (score < float("inf"))


# ---- Of a row's record -----------------------------------------------------------------------


@triton.jit
def record_of(records: tl.tensor, slots: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Pointer to the record of the request that a row belongs to."""
    return records + tl.load(slots + row) * WORDS


@triton.jit
def float_of(record: tl.tensor, word: tl.constexpr) -> tl.tensor:
    """A float32 word of a record."""
    return tl.load(record + word).to(tl.float32, bitcast=True)


@triton.jit
def heat_of(record: tl.tensor) -> tl.tensor:
    """The temperature at which a row is sampled; 0 for a greedy row."""
    return tl.where(tl.load(record + TOP_K) == 1, 0.0, float_of(record, TEMPERATURE))


@triton.jit
def is_filtered(record: tl.tensor) -> tl.tensor:
    """Whether a row has a filter: top_k, top_p or min_p."""
    by_rank = (tl.load(record + TOP_K) > 0) | (float_of(record, TOP_P) > 0)
    return by_rank | (float_of(record, MIN_P) > 0)


@triton.jit
def keeps(
    record: tl.tensor,
    logit: tl.tensor,
    token: tl.tensor,
    heat: tl.tensor,
    cut: tl.tensor,
    last: tl.tensor,
    top: tl.tensor,
) -> tl.tensor:
    """Which tokens the filters of a row of temperature `heat`, not 0, keep: top_k and top_p those
    with a logit over `cut`, and with exactly `cut` up to id `last`; `top` is the largest logit
    (`triton_sampling.bounds`)."""
    by_rank = (logit > cut) | ((logit == cut) & (token <= last))
    return by_rank & (tl.exp2((logit - top) * (LOG2_E / heat)) >= float_of(record, MIN_P))


@triton.jit
def noise_of(
    record: tl.tensor, position: tl.tensor, start: tl.tensor, tile: tl.constexpr
) -> tl.tensor:
    """Noise of `ops/sampling/philox.py`, with the seed of a row, for the tokens start ..
    start + tile - 1, four from one counter."""
    low = tl.load(record + SEED_LOW).to(tl.int64) & 0xFFFFFFFF
    seed = (tl.load(record + SEED_HIGH).to(tl.int64) << 32) | low
    group = start // 4 + tl.arange(0, tile // 4)
    w0, w1, w2, w3 = tl.philox(seed, group, position.to(tl.int32), 0, 0)
    # join makes the last dimension: [group, 2, 2] whose flat order is w0, w1, w2, w3.
    bits = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (tile,))
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))
