"""The sampler as kernels: what `sample_reference` computes, without a sort, for a captured step.

Every row's parameters are read on the device, so one captured graph serves every mixture of
greedy, sampled and filtered rows, and a row pays only for what it asks:

1. `_partials`: the vocabulary in tiles, many programs a row. The best token of each tile: of
   logits + Gumbel noise for a row that is sampled from all tokens, of the logits for any other.
2. `_bounds`: one program for each filtered row finds where its filters cut.
3. `_choose`: filtered rows again in tiles, the best of what is kept.
4. `_combine`: the best tile of each row.

top_k, top_p and min_p each keep a prefix of the tokens ranked by (logit, token id), so together
they keep one too: it is described by its last logit, and by the last token id among those with
exactly that logit. Both top_k and top_p look for the largest logit t at which a falling function,
the count or the probability of all tokens with a logit of at least t, reaches a target. `_search`
bisects for it over the whole row until few tokens are undecided, collects these and goes on in
registers, down to a single float32 number: the cut is exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.sampling import SamplingMode, SamplingTensors

TILE = 2048
"""Tokens of one program of the tiled kernels."""
SEARCH_TILE = 8192
"""Tokens that the search looks at together."""
CANDIDATES = 4096
"""Undecided tokens that the search finishes in registers."""

LOG2_E = tl.constexpr(1.4426950408889634)
SPAN = tl.constexpr(40.0)
"""Where the search ends, in nats below the likeliest token. Gumbel noise of 23 bits lies in
[-2.9, 16.7], so a token 20 nats down is never chosen, and 2 ** 18 tokens 40 nats down weigh less
than the rounding of the sum: what the filters say of them changes nothing."""
VALUE_STEPS = tl.constexpr(12)
"""Steps that halve the interval of values before the rest halve the set of float32 numbers in it,
which bounds the steps whatever the logits are."""


def sample(logits: Tensor, params: SamplingTensors | None, mode: SamplingMode) -> Tensor:
    """Sample one token a row; as `sample_reference`, with tensors on a GPU.

    The tokens are the reference's, except where two scores, or a filter and its limit, are equal
    up to float32 rounding. top_p of 1 or more is off. A row's token depends on that row alone.

    Args:
        logits: `[rows, vocabulary]`, bfloat16, float16 or float32; elements of a row adjacent.
        params: per-row parameters; None only for `GREEDY`.
        mode: the highest mode among the rows; a captured step takes `FILTERED`.

    Returns:
        int64 `[rows]` token ids.

    Raises:
        ValueError: the logits' rows are strided, or parameters are missing or not contiguous.
    """
    rows, vocab = logits.shape
    if logits.stride(1) != 1 or vocab < 1:
        raise ValueError(
            f"sample: logits of {tuple(logits.shape)} with strides {logits.stride()}: a row must "
            "be adjacent and not empty: call .contiguous()."
        )
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    splits = triton.cdiv(vocab, TILE)
    grid = (splits, rows)
    scores = torch.empty((rows, splits), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    row = _row_arguments(logits, params, mode)
    _partials[grid](*row, scores, ids, mode=int(mode), tile=TILE, num_warps=4)
    if mode == SamplingMode.FILTERED:
        cut, last, top = bounds(row, scores)
        _choose[grid](*row, cut, last, top, scores, ids, tile=TILE, num_warps=4)
    _combine[(rows,)](scores, ids, tokens, vocab, splits, block=triton.next_power_of_2(splits))
    return tokens


def bounds(row: tuple[Tensor | int, ...], scores: Tensor) -> tuple[Tensor, ...]:
    """Where the filters of each row cut.

    Args:
        row: what describes the rows, from `_row_arguments`.
        scores: float32 `[rows, splits]`, the largest logits of the tiles, from `_partials`.

    Returns:
        cut (float32), last (int32) and top (float32), each `[rows]`: top_k and top_p keep the
        tokens with a logit over `cut`, and those with exactly `cut` up to token id `last`; `top` is
        the largest logit. Only rows with a filter are written.
    """
    rows, splits = scores.shape
    cut, top = torch.empty((2, rows), dtype=torch.float32, device=scores.device)
    last = torch.empty(rows, dtype=torch.int32, device=scores.device)
    scratch = torch.empty((rows, CANDIDATES), dtype=torch.float32, device=scores.device)
    _bounds[(rows,)](
        *row,
        scores,
        cut,
        last,
        top,
        scratch,
        splits,
        block=triton.next_power_of_2(splits),
        tile=SEARCH_TILE,
        candidates=CANDIDATES,
        num_warps=16,
    )
    return cut, last, top


def _row_arguments(
    logits: Tensor, params: SamplingTensors | None, mode: SamplingMode
) -> tuple[Tensor | int, ...]:
    """The arguments that describe the rows, the same for every kernel that reads logits."""
    if params is None:
        if mode != SamplingMode.GREEDY:
            raise ValueError(f"sample: mode {mode.name} needs the rows' parameters; found None.")
        fields = [logits] * 6
    else:
        fields = [params.temperature, params.top_k, params.top_p, params.min_p]
        fields += [params.seeds, params.positions]
        rows = logits.size(0)
        if any(field.shape != (rows,) or not field.is_contiguous() for field in fields):
            found = [tuple(field.shape) for field in fields]
            raise ValueError(
                f"sample: each parameter must be contiguous and ({rows},), one a row of the "
                f"logits; found {found}."
            )
    return (logits, *fields, logits.stride(0), logits.size(1))


# ---- Kernels ---------------------------------------------------------------------------------


@triton.jit
def _partials(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.constexpr,
    scores: tl.tensor,
    ids: tl.tensor,
    mode: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    score = _load(logits + row * row_stride, split * tile, vocab, tile)
    out = row * tl.num_programs(0) + split
    if mode > 0:
        heat = tl.load(temperature + row)
        k = tl.load(top_k + row)
        if (heat > 0) & (k != 1):
            filtered = False
            if mode == 2:
                filtered = _is_filtered(k, tl.load(top_p + row), tl.load(min_p + row))
            if not filtered:
                score = score / heat + _gumbel(
                    tl.load(seeds + row), tl.load(positions + row), split * tile, tile
                )
                score = tl.where(split * tile + tl.arange(0, tile) < vocab, score, float("-inf"))
    best, index = tl.max(score, axis=0, return_indices=True)
    tl.store(scores + out, best)
    tl.store(ids + out, split * tile + index)


@triton.jit
def _bounds(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.constexpr,
    scores: tl.tensor,
    cut_out: tl.tensor,
    last_out: tl.tensor,
    top_out: tl.tensor,
    scratch: tl.tensor,
    splits: tl.tensor,
    block: tl.constexpr,
    tile: tl.constexpr,
    candidates: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    if (heat <= 0) | (k == 1) | (_is_filtered(k, p, tl.load(min_p + row)) == 0):
        return
    split = tl.arange(0, block)
    tops = tl.load(scores + row * splits + split, mask=split < splits, other=float("-inf"))
    top = tl.max(tops)
    rate = LOG2_E / heat
    logits += row * row_stride
    scratch += row * candidates
    low, high = _key(top - SPAN * heat), _key(top) + 1
    count, total = _tail(logits, vocab, _value(low), top, rate, tile)
    keep, ties = count, count
    if (k > 0) & (k < count):
        low, above, mass_above, count = _search(
            logits, scratch, vocab, top, rate, k, low, high, count, False, tile, candidates
        )
        keep, ties = k - above, count - above
        total = mass_above + keep * tl.exp2((_value(low) - top) * rate)
    if (p > 0) & (p < 1):
        floor, target = low, p * total
        low, above, mass_above, count = _search(
            logits, scratch, vocab, top, rate, target, low, high, count, True, tile, candidates
        )
        room = tl.ceil((target - mass_above) / tl.exp2((_value(low) - top) * rate))
        room = tl.maximum(room, 1.0).to(tl.int32)
        # At top_k's own cut both limit how many of the equal logits stay.
        keep = tl.where(low == floor, tl.minimum(keep, room), room)
        ties = count - above
    cut = _value(low)
    last = vocab
    if keep < ties:
        last = _nth_equal(logits, vocab, cut, keep, tile)
    tl.store(cut_out + row, cut)
    tl.store(last_out + row, last)
    tl.store(top_out + row, top)


@triton.jit
def _choose(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
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
    heat = tl.load(temperature + row)
    k, least = tl.load(top_k + row), tl.load(min_p + row)
    if (heat <= 0) | (k == 1) | (_is_filtered(k, tl.load(top_p + row), least) == 0):
        return
    score = _load(logits + row * row_stride, split * tile, vocab, tile)
    token = split * tile + tl.arange(0, tile)
    limit = tl.load(cut + row)
    keep = (score > limit) | ((score == limit) & (token <= tl.load(last + row)))
    keep &= tl.exp2((score - tl.load(top + row)) * (LOG2_E / heat)) >= least
    keep &= token < vocab
    best, index = float("-inf"), 0
    # Most tiles keep nothing: they skip the noise.
    if tl.max(keep.to(tl.int32)) > 0:
        noise = _gumbel(tl.load(seeds + row), tl.load(positions + row), split * tile, tile)
        score = tl.where(keep, score / heat + noise, float("-inf"))
        best, index = tl.max(score, axis=0, return_indices=True)
    out = row * tl.num_programs(0) + split
    tl.store(scores + out, best)
    tl.store(ids + out, split * tile + index)


@triton.jit
def _combine(
    scores: tl.tensor,
    ids: tl.tensor,
    tokens: tl.tensor,
    vocab: tl.constexpr,
    splits: tl.tensor,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, block)
    score = tl.load(scores + row * splits + split, mask=split < splits, other=float("-inf"))
    _, index = tl.max(score, axis=0, return_indices=True)
    # With NaN among the logits any lane may win; the token stays one that exists.
    token = tl.load(ids + row * splits + tl.minimum(index, splits - 1))
    tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))


# ---- Parts of them ---------------------------------------------------------------------------


@triton.jit
def _is_filtered(k: tl.tensor, p: tl.tensor, least: tl.tensor) -> tl.tensor:
    return (k > 0) | (p > 0) | (least > 0)


@triton.jit
def _load(row: tl.tensor, start: tl.tensor, vocab: tl.constexpr, tile: tl.constexpr) -> tl.tensor:
    token = start + tl.arange(0, tile)
    return tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _gumbel(
    seed: tl.tensor, position: tl.tensor, start: tl.tensor, tile: tl.constexpr
) -> tl.tensor:
    """Noise of `ops/philox.py` for the tokens start .. start + tile - 1, four from one counter."""
    group = start // 4 + tl.arange(0, tile // 4)
    w0, w1, w2, w3 = tl.philox(seed, group, position.to(tl.int32), 0, 0)
    # join makes the last dimension: [group, 2, 2] whose flat order is w0, w1, w2, w3.
    bits = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (tile,))
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _key(value: tl.tensor) -> tl.tensor:
    """int32 that orders as the float32 does; +0 and -0 are one number."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key: tl.tensor) -> tl.tensor:
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search(
    row: tl.tensor,
    scratch: tl.tensor,
    vocab: tl.constexpr,
    top: tl.tensor,
    rate: tl.tensor,
    target: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    count_low: tl.tensor,
    by_mass: tl.constexpr,
    tile: tl.constexpr,
    candidates: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The largest key in [low, high) whose tail, the tokens at or over it, reaches `target`.

    The tail is measured by its mass (probability times the softmax sum) or by its number of tokens,
    `count_low` at low and none at high.

    Returns:
        the key, the number and the mass of the tokens over it, the number at or over it.
    """
    count_high, mass_high, step = 0, 0.0, 0
    while (low + 1 < high) & (count_low - count_high > candidates):
        # Cuts lie near the top: a quarter below it, rather than the half.
        by_value = _key(_value(high) - 0.25 * (_value(high) - _value(low)))
        half = (low & high) + ((low ^ high) >> 1)
        middle = tl.where(step < VALUE_STEPS, by_value, half)
        middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        count, mass = _tail(row, vocab, _value(middle), top, rate, tile)
        if by_mass:
            reached = mass >= target
        else:
            reached = count >= target
        low, count_low = tl.where(reached, middle, low), tl.where(reached, count, count_low)
        high = tl.where(reached, high, middle)
        count_high = tl.where(reached, count_high, count)
        mass_high = tl.where(reached, mass_high, mass)
        step += 1

    if low + 1 < high:
        found = _collect(row, scratch, vocab, _value(low), _value(high), tile)
        slot = tl.arange(0, candidates)
        value = tl.load(scratch + slot, mask=slot < found, other=float("-inf"))
        share = tl.exp2((value - top) * rate)
        while low + 1 < high:
            middle = (low & high) + ((low ^ high) >> 1)
            over = value >= _value(middle)
            if by_mass:
                reached = mass_high + tl.sum(tl.where(over, share, 0.0)) >= target
            else:
                reached = count_high + tl.sum(over.to(tl.int32)) >= target
            low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
        count_low = count_high + tl.sum((value >= _value(low)).to(tl.int32))
        over = value >= _value(high)
        count_high += tl.sum(over.to(tl.int32))
        mass_high += tl.sum(tl.where(over, share, 0.0))
    return low, count_high, mass_high, count_low


@triton.jit
def _tail(
    row: tl.tensor,
    vocab: tl.constexpr,
    limit: tl.tensor,
    top: tl.tensor,
    rate: tl.tensor,
    tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Number and mass of the tokens with a logit of `limit` or more."""
    counts = tl.zeros((tile,), tl.int32)
    masses = tl.zeros((tile,), tl.float32)
    for start in range(0, vocab, tile):
        value = _load(row, start, vocab, tile)
        over = value >= limit
        counts += over.to(tl.int32)
        masses += tl.where(over, tl.exp2((value - top) * rate), 0.0)
    return tl.sum(counts), tl.sum(masses)


@triton.jit
def _collect(
    row: tl.tensor,
    scratch: tl.tensor,
    vocab: tl.constexpr,
    low: tl.tensor,
    high: tl.tensor,
    tile: tl.constexpr,
) -> tl.tensor:
    """Store the logits in [low, high) to `scratch`, in order of token id; return how many."""
    found = 0
    for start in range(0, vocab, tile):
        value = _load(row, start, vocab, tile)
        inside = ((value >= low) & (value < high)).to(tl.int32)
        number = tl.sum(inside)
        if number > 0:
            place = found + tl.cumsum(inside, axis=0) - 1
            tl.store(scratch + place, value, mask=inside > 0)
        found += number
    # Other threads of this program read what these wrote.
    tl.debug_barrier()
    return found


@triton.jit
def _nth_equal(
    row: tl.tensor, vocab: tl.constexpr, limit: tl.tensor, n: tl.tensor, tile: tl.constexpr
) -> tl.tensor:
    """Id of the n-th token, in order of id, whose logit is exactly `limit`."""
    seen, last = 0, vocab
    for start in range(0, vocab, tile):
        equal = (_load(row, start, vocab, tile) == limit).to(tl.int32)
        number = tl.sum(equal)
        if (seen < n) & (seen + number >= n):
            is_last = (equal > 0) & (seen + tl.cumsum(equal, axis=0) == n)
            last = tl.sum(tl.where(is_last, start + tl.arange(0, tile), 0))
        seen += number
    return last
