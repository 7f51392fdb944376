"""Find where top_k and top_p cut a row of logits: parts of the sampler's kernels.

Both look for the largest logit t at which a falling function reaches a target: the number, or the
probability, of the tokens with a logit of at least t. `search_tail` bisects for it over the whole
row until few tokens are undecided, collects these, and goes on in registers down to a single
float32 number: the answer is exact. All functions here run inside a kernel, one program a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

VALUE_STEPS = tl.constexpr(12)
"""Steps that halve the interval of values before the rest halve the set of float32 numbers in it,
which bounds the steps whatever the logits are."""


@triton.jit
def load_tile(
    row: tl.tensor, start: tl.tensor, vocab: tl.constexpr, tile: tl.constexpr
) -> tl.tensor:
    """float32 logits start .. start + tile - 1 of a row; minus infinity beyond its end."""
    token = start + tl.arange(0, tile)
    return tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def ordered_key(value: tl.tensor) -> tl.tensor:
    """int32 that orders as the float32 does; +0 and -0 are one number."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key: tl.tensor) -> tl.tensor:
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def search_tail(
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
        by_value = ordered_key(key_value(high) - 0.25 * (key_value(high) - key_value(low)))
        half = (low & high) + ((low ^ high) >> 1)
        middle = tl.where(step < VALUE_STEPS, by_value, half)
        middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        count, mass = measure_tail(row, vocab, key_value(middle), top, rate, tile)
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
        found = _collect(row, scratch, vocab, key_value(low), key_value(high), tile)
        slot = tl.arange(0, candidates)
        value = tl.load(scratch + slot, mask=slot < found, other=float("-inf"))
        share = tl.exp2((value - top) * rate)
        while low + 1 < high:
            middle = (low & high) + ((low ^ high) >> 1)
            over = value >= key_value(middle)
            if by_mass:
                reached = mass_high + tl.sum(tl.where(over, share, 0.0)) >= target
            else:
                reached = count_high + tl.sum(over.to(tl.int32)) >= target
            low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
        count_low = count_high + tl.sum((value >= key_value(low)).to(tl.int32))
        over = value >= key_value(high)
        count_high += tl.sum(over.to(tl.int32))
        mass_high += tl.sum(tl.where(over, share, 0.0))
    return low, count_high, mass_high, count_low


@triton.jit
def measure_tail(
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
        value = load_tile(row, start, vocab, tile)
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
        value = load_tile(row, start, vocab, tile)
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
def nth_equal(
    row: tl.tensor, vocab: tl.constexpr, limit: tl.tensor, n: tl.tensor, tile: tl.constexpr
) -> tl.tensor:
    """Id of the n-th token, in order of id, whose logit is exactly `limit`."""
    seen, last = 0, vocab
    for start in range(0, vocab, tile):
        equal = (load_tile(row, start, vocab, tile) == limit).to(tl.int32)
        number = tl.sum(equal)
        if (seen < n) & (seen + number >= n):
            is_last = (equal > 0) & (seen + tl.cumsum(equal, axis=0) == n)
            last = tl.sum(tl.where(is_last, start + tl.arange(0, tile), 0))
        seen += number
    return last
