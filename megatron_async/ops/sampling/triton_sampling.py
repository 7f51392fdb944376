"""The sampler as kernels: computes `sample.reference` without a sort, for a captured step.

Every row's parameters are read on the device, from its request's record. So one captured graph
serves every mixture of greedy, sampled and filtered rows, and a row costs only its own work:

1. `best_of_tile`: the vocabulary in tiles, many programs a row. The best token of each tile: of
   logits + Gumbel noise for a row that is sampled from all tokens, of the logits for any other.
2. `_bounds`: one program for each filtered row finds where its filters cut.
3. `_choose`: filtered rows again in tiles, the best of what is kept.
4. `_combine`: the best tile of each row.

top_k, top_p and min_p each keep a prefix of the tokens ranked by (logit, token id). So together
they keep a prefix too. It is described by its last logit, and by the last token id among those with
exactly that logit. `ops/sampling/triton_search.py` finds both.

A tensor-parallel rank runs the first kernel for its own columns, and
`ops/ranks/symmetric_choice.py` replaces the last one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.op import promising
from megatron_async.ops.sampling.sampling import (
    FilterCuts,
    SamplingMode,
    SamplingRows,
    best_tokens,
    sample,
)
from megatron_async.ops.sampling.slot_records import NO_TOKEN, RECORD_WORDS
from megatron_async.ops.sampling.tile_scores import (
    LOG2_E,
    NOISE_GROUP,
    TOP_K,
    TOP_P,
    best_of_tile,
    float_of,
    heat_of,
    is_filtered,
    is_finite,
    keeps,
    noise_of,
    record_of,
)
from megatron_async.ops.sampling.triton_search import (
    key_value,
    load_tile,
    measure_tails,
    nth_collected,
    nth_equal,
    ordered_key,
    search_tail,
)

TILE = 2048
"""Tokens of one program of the tiled kernels."""
SEARCH_TILE = 8192
"""Tokens that the search of a row reads together, and the warps of its program."""
SEARCH_WARPS = 32
CANDIDATES = 4096
"""Undecided tokens that the search finishes in registers."""
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits of a float32 that numbers of the dtype do not use."""

NOTHING = tl.constexpr(NO_TOKEN)
SPAN = tl.constexpr(40.0)
"""The end of the search, in nats below the likeliest token. Gumbel noise of 23 bits lies in
[-2.9, 16.7], so a token 20 nats down is never chosen, and 2 ** 18 tokens 40 nats down weigh less
than the rounding of the sum: whether the filters keep these tokens changes nothing."""


@sample.gpu
@promising("invariant")
def sample_gpu(
    logits: Tensor, rows: SamplingRows | None, mode: SamplingMode
) -> tuple[Tensor, FilterCuts | None]:
    """The tokens are the reference's, except where two scores, or a filter and its limit, are equal
    up to float32 rounding. top_p of 1 or more is off. A captured step takes mode `FILTERED`."""
    count, vocab = logits.shape
    row = _row_arguments(logits, rows, mode, vocab)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    cuts = None
    if count == 0:
        return tokens, cuts
    scores, ids = best_of_tiles(row, mode)
    splits = scores.size(1)
    if mode == SamplingMode.FILTERED:
        cuts = FilterCuts(*bounds(row, scores))
        _choose[(splits, count)](*row, *cuts, scores, ids, tile=TILE, num_warps=4)
    _combine[(count,)](scores, ids, tokens, splits, block=triton.next_power_of_2(splits))
    return tokens, cuts


@best_tokens.gpu
@promising("invariant")
def best_tokens_gpu(
    logits: Tensor, rows: SamplingRows | None, mode: SamplingMode, first: int, columns: int
) -> tuple[Tensor, Tensor]:
    """The best of each tile, `[rows, splits]`, with the bits that `sample` compares. A tile whose
    best score is minus infinity may name a token that is not this rank's."""
    return best_of_tiles(_row_arguments(logits, rows, mode, columns), mode, first)


def best_of_tiles(
    row: tuple[Any, ...], mode: SamplingMode, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Scores and ids of `best_tokens`, from what describes the rows (`_row_arguments`)."""
    logits, columns = row[0], row[-1]
    rows, splits = len(logits), max(triton.cdiv(first % NOISE_GROUP + columns, TILE), 1)
    scores = torch.empty((rows, splits), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    if rows:
        best_of_tile[(splits, rows)](
            *row,
            scores,
            ids,
            first=first,
            lead=first % NOISE_GROUP,
            mode=int(mode),
            tile=TILE,
            num_warps=4,
        )
    return scores, ids


def bounds(row: tuple[Any, ...], scores: Tensor) -> tuple[Tensor, ...]:
    """`FilterCuts` of rows with a filter, from the largest logits of their tiles, float32 `[rows,
    splits]`; of a row whose largest logit is not finite only `top` is written."""
    rows, splits = scores.shape
    cut = torch.empty(rows, dtype=torch.float32, device=scores.device)
    top = torch.empty_like(cut)
    last = torch.empty(rows, dtype=torch.int32, device=scores.device)
    scratch = torch.empty((rows, CANDIDATES), dtype=torch.float32, device=scores.device)
    _bounds[(rows,)](
        *row,
        scores,
        cut,
        last,
        top,
        scratch,
        torch.empty_like(scratch, dtype=torch.int32),
        splits,
        block=triton.next_power_of_2(splits),
        shift=UNUSED_BITS[row[0].dtype],
        tile=SEARCH_TILE,
        candidates=CANDIDATES,
        num_warps=SEARCH_WARPS,
    )
    return cut, last, top


def _row_arguments(
    logits: Tensor, rows: SamplingRows | None, mode: SamplingMode, columns: int
) -> tuple[Any, ...]:
    """What describes the rows, the same for every kernel that reads logits. Strided rows, other
    dtypes, and `rows` that are missing or do not fit are refused."""
    if logits.stride(1) != 1 or logits.size(1) < 1 or logits.dtype not in UNUSED_BITS:
        raise ValueError(
            f"sample: {logits.dtype} logits of {tuple(logits.shape)} with strides "
            f"{logits.stride()}: rows must be adjacent and not empty, of float32, float16 or "
            "bfloat16: call .contiguous() or .float()."
        )
    if rows is None:
        if mode != SamplingMode.GREEDY:
            raise ValueError(f"sample: mode {mode.name} needs what the rows ask for; found None.")
        fields = (logits, logits, logits)
    else:
        fields = (rows.slots, rows.positions, rows.records)
        wanted = (logits.size(0),), (logits.size(0),), (len(rows.records), RECORD_WORDS)
        found = tuple(tuple(field.shape) for field in fields)
        if found != wanted or not all(field.is_contiguous() for field in fields):
            raise ValueError(
                f"sample: slots, positions and records must be contiguous and {wanted}; found "
                f"{found}."
            )
    return (logits, *fields, logits.stride(0), columns)


# ---- Kernels ---------------------------------------------------------------------------------


@triton.jit
def _bounds(
    logits: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    records: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.constexpr,
    scores: tl.tensor,
    cut_out: tl.tensor,
    last_out: tl.tensor,
    top_out: tl.tensor,
    scratch: tl.tensor,
    scratch_ids: tl.tensor,
    splits: tl.tensor,
    block: tl.constexpr,
    shift: tl.constexpr,
    tile: tl.constexpr,
    candidates: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    record = record_of(records, slots, row)
    heat = heat_of(record)
    if (heat <= 0) | (is_filtered(record) == 0):
        return
    k, p = tl.load(record + TOP_K), float_of(record, TOP_P)
    split = tl.arange(0, block)
    tops = tl.load(scores + row * splits + split, mask=split < splits, other=float("-inf"))
    top = tl.max(tops)
    tl.store(top_out + row, top)
    if is_finite(top) == 0:
        return
    rate = LOG2_E / heat
    logits += row * row_stride
    scratch += row * candidates
    scratch_ids += row * candidates
    low, high = ordered_key(top - SPAN * heat, shift), ordered_key(top, shift) + 1
    floor = key_value(low, shift)
    count, total, _, _ = measure_tails(logits, vocab, floor, floor, top, rate, tile)
    keep, ties, found, whole = count, count, 0, 0
    given = (logits, scratch, scratch_ids, top, rate)
    if (k > 0) & (k < count):
        low, above, mass_above, count, found, whole = search_tail(
            *given, k, low, high, count, whole, vocab, False, shift, tile, candidates
        )
        keep, ties = k - above, count - above
        total = mass_above + keep * tl.exp2((key_value(low, shift) - top) * rate)
    if (p > 0) & (p < 1):
        target = p * total
        low, above, mass_above, count, found, whole = search_tail(
            *given, target, low, high, count, whole, vocab, True, shift, tile, candidates
        )
        # At top_k's own cut this is no more than top_k left: total counts no others.
        room = (target - mass_above) / tl.exp2((key_value(low, shift) - top) * rate)
        keep, ties = tl.maximum(tl.ceil(room), 1.0).to(tl.int32), count - above
    cut = key_value(low, shift)
    last = vocab
    if keep < ties:
        if found > 0:
            last = nth_collected(scratch, scratch_ids, found, vocab, cut, keep, candidates)
        else:
            last = nth_equal(logits, vocab, cut, keep, tile)
    tl.store(cut_out + row, cut)
    tl.store(last_out + row, last)


@triton.jit
def _choose(
    logits: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    records: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.constexpr,
    cut: tl.tensor,
    last: tl.tensor,
    top: tl.tensor,
    scores: tl.tensor,
    ids: tl.tensor,
    tile: tl.constexpr,
) -> None:
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = record_of(records, slots, row)
    heat = heat_of(record)
    if (heat <= 0) | (is_filtered(record) == 0):
        return
    largest = tl.load(top + row)
    if is_finite(largest) == 0:
        return  # the tiles' best scores stay, and say so
    score = load_tile(logits + row * row_stride, split * tile, vocab, tile)
    token = split * tile + tl.arange(0, tile)
    limit, last_id = tl.load(cut + row), tl.load(last + row)
    keep = keeps(record, score, token, heat, limit, last_id, largest) & (token < vocab)
    best, index = float("-inf"), 0
    # Most tiles keep nothing: they skip the noise.
    if tl.max(keep.to(tl.int32)) > 0:
        noise = noise_of(record, tl.load(positions + row), split * tile, tile)
        score = tl.where(keep, score / heat + noise, float("-inf"))
        best, index = tl.max(score, axis=0, return_indices=True)
    out = row * tl.num_programs(0) + split
    tl.store(scores + out, best)
    tl.store(ids + out, split * tile + index)


@triton.jit
def _combine(
    scores: tl.tensor, ids: tl.tensor, tokens: tl.tensor, splits: tl.tensor, block: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, block)
    score = tl.load(scores + row * splits + split, mask=split < splits, other=float("-inf"))
    best, index = tl.max(score, axis=0, return_indices=True)
    token = tl.load(ids + row * splits + index).to(tl.int64)
    tl.store(tokens + row, tl.where(is_finite(best), token, NOTHING))
