"""Find where top_k and top_p cut a row of logits: parts of the sampler's kernels.

Both look for the largest logit t at which a falling function reaches a target: the number, or the
probability, of the tokens with a logit of at least t. `search_tail` narrows it down over the whole
row until few tokens are undecided, collects these, and goes on in registers down to a single
number of the logits' dtype: the answer is exact. All functions here run inside a kernel, one
program a row; a pass over the row waits for memory more than it computes, so passes are few.
"""

from __future__ import annotations

import triton
import triton.language as tl

TAIL_STEPS = tl.constexpr(2)
"""Passes that look close to the top of the interval, where cuts of a peaked row are."""
VALUE_STEPS = tl.constexpr(10)
"""Passes that divide the interval of values; the rest halve the set of numbers in it, which bounds
the passes whatever the logits are."""


@triton.jit
def load_tile(row: tl.tensor, start: tl.tensor, length: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """float32 numbers start .. start + tile - 1 of a row; minus infinity beyond its end."""
    place = start + tl.arange(0, tile)
    return tl.load(row + place, mask=place < length, other=float("-inf")).to(tl.float32)


@triton.jit
def ordered_key(value: tl.tensor, shift: tl.constexpr) -> tl.tensor:
    """int32 that orders as the float32 does; +0 and -0 are one number. `shift` drops the bits that
    a shorter dtype does not use (16 for bfloat16), so that its keys have no gaps."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift


@triton.jit
def key_value(key: tl.tensor, shift: tl.constexpr) -> tl.tensor:
    """The float32 of a key."""
    bits = key << shift
    return tl.where(key < 0, bits ^ (0x80000000 - (1 << shift)), bits).to(tl.float32, bitcast=True)


@triton.jit
def search_tail(
    row: tl.tensor,
    scratch: tl.tensor,
    scratch_ids: tl.tensor,
    top: tl.tensor,
    rate: tl.tensor,
    target: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    count_low: tl.tensor,
    whole: tl.tensor,
    vocab: tl.constexpr,
    by_mass: tl.constexpr,
    shift: tl.constexpr,
    tile: tl.constexpr,
    candidates: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The largest key in [low, high) whose tail, the tokens at or over it, reaches `target`.

    The tail is measured by its mass (probability times the softmax sum) or by its number of tokens,
    `count_low` at low and none at high. `whole` tokens, all at or over low, are in the scratch of
    an earlier search; 0 if they are not.

    Returns:
        the key, the number and the mass of the tokens over it, the number at or over it; how many
        tokens the scratch holds now, among them all with the key (0: it was not needed), and
        `whole` for the next search.
    """
    count_high, mass_high, step = 0, 0.0, 0
    while (low + 1 < high) & (count_low - count_high > candidates) & (whole == 0):
        far_part, near_part = 0.6666667, 0.3333333
        if step < TAIL_STEPS:
            far_part, near_part = 0.25, 0.0625
        width = key_value(high, shift) - key_value(low, shift)
        far = ordered_key(key_value(high, shift) - far_part * width, shift)
        near = ordered_key(key_value(high, shift) - near_part * width, shift)
        half = (low & high) + ((low ^ high) >> 1)
        far = tl.where(step < VALUE_STEPS, far, half)
        far = tl.minimum(tl.maximum(far, low + 1), high - 1)
        near = tl.minimum(tl.maximum(near, far), high - 1)
        count_far, mass_far, count_near, mass_near = measure_tails(
            row, vocab, key_value(far, shift), key_value(near, shift), top, rate, tile
        )
        if by_mass:
            far_reaches, near_reaches = mass_far >= target, mass_near >= target
        else:
            far_reaches, near_reaches = count_far >= target, count_near >= target
        if near_reaches:
            low, count_low = near, count_near
        else:
            if far_reaches:
                low, count_low = far, count_far
                high, count_high, mass_high = near, count_near, mass_near
            else:
                high, count_high, mass_high = far, count_far, mass_far
        step += 1

    found = whole
    if low + 1 < high:
        if whole == 0:
            limit = key_value(high, shift)
            if count_low <= candidates:
                # All that is over low fits: the next search, from low up, needs no more.
                count_high, mass_high, limit = 0, 0.0, float("inf")
            found = _collect(row, scratch, scratch_ids, vocab, key_value(low, shift), limit, tile)
            whole = tl.where(count_low <= candidates, found, 0)
        value = load_tile(scratch, 0, found, candidates)
        share = tl.exp2((value - top) * rate)
        while low + 1 < high:
            middle = (low & high) + ((low ^ high) >> 1)
            over = value >= key_value(middle, shift)
            if by_mass:
                reached = mass_high + tl.sum(tl.where(over, share, 0.0)) >= target
            else:
                reached = count_high + tl.sum(over.to(tl.int32)) >= target
            low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
        count_low = count_high + tl.sum((value >= key_value(low, shift)).to(tl.int32))
        over = value >= key_value(high, shift)
        count_high += tl.sum(over.to(tl.int32))
        mass_high += tl.sum(tl.where(over, share, 0.0))
    return low, count_high, mass_high, count_low, found, whole


@triton.jit
def measure_tails(
    row: tl.tensor,
    vocab: tl.constexpr,
    far: tl.tensor,
    near: tl.tensor,
    top: tl.tensor,
    rate: tl.tensor,
    tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Number and mass of the tokens with a logit of `far` or more, and of `near` or more."""
    count_far, count_near = tl.zeros((tile,), tl.int32), tl.zeros((tile,), tl.int32)
    mass_far, mass_near = tl.zeros((tile,), tl.float32), tl.zeros((tile,), tl.float32)
    for start in range(0, vocab, tile):
        value = load_tile(row, start, vocab, tile)
        share = tl.exp2((value - top) * rate)
        count_far += (value >= far).to(tl.int32)
        count_near += (value >= near).to(tl.int32)
        mass_far += tl.where(value >= far, share, 0.0)
        mass_near += tl.where(value >= near, share, 0.0)
    return tl.sum(count_far), tl.sum(mass_far), tl.sum(count_near), tl.sum(mass_near)


@triton.jit
def _collect(
    row: tl.tensor,
    scratch: tl.tensor,
    scratch_ids: tl.tensor,
    vocab: tl.constexpr,
    low: tl.tensor,
    limit: tl.tensor,
    tile: tl.constexpr,
) -> tl.tensor:
    """Store the tokens with a logit in [low, limit), in a fixed order; return how many.

    Two passes, count and store, in which each lane of the tile has a part of the scratch of its
    own: one scan in all, where a scan for each tile would cost more than reading the row again.
    """
    number = tl.zeros((tile,), tl.int32)
    for start in range(0, vocab, tile):
        value = load_tile(row, start, vocab, tile)
        number += ((value >= low) & (value < limit)).to(tl.int32)
    place = tl.cumsum(number, axis=0) - number
    for start in range(0, vocab, tile):
        value = load_tile(row, start, vocab, tile)
        inside = (value >= low) & (value < limit)
        tl.store(scratch + place, value, mask=inside)
        tl.store(scratch_ids + place, start + tl.arange(0, tile), mask=inside)
        place += inside.to(tl.int32)
    # Other threads of this program read what these wrote.
    tl.debug_barrier()
    return tl.sum(number)


@triton.jit
def nth_collected(
    scratch: tl.tensor,
    scratch_ids: tl.tensor,
    found: tl.tensor,
    vocab: tl.constexpr,
    limit: tl.tensor,
    n: tl.tensor,
    candidates: tl.constexpr,
) -> tl.tensor:
    """Id of the n-th token, by id, of those collected whose logit is exactly `limit`."""
    equal = load_tile(scratch, 0, found, candidates) == limit
    slot = tl.arange(0, candidates)
    ids = tl.load(scratch_ids + slot, mask=equal & (slot < found), other=vocab)
    low, high = -1, vocab - 1
    while low + 1 < high:
        middle = (low + high) >> 1
        reached = tl.sum((ids <= middle).to(tl.int32)) >= n
        low, high = tl.where(reached, low, middle), tl.where(reached, middle, high)
    return high


@triton.jit
def nth_equal(
    row: tl.tensor, vocab: tl.constexpr, limit: tl.tensor, n: tl.tensor, tile: tl.constexpr
) -> tl.tensor:
    """Id of the n-th token, by id, of the whole row whose logit is exactly `limit`."""
    seen, last, start = 0, 0, 0
    while (start < vocab) & (seen < n):
        equal = (load_tile(row, start, vocab, tile) == limit).to(tl.int32)
        order = seen + tl.cumsum(equal, axis=0)
        last += tl.sum(tl.where((equal > 0) & (order == n), start + tl.arange(0, tile), 0))
        seen = tl.max(order)
        start += tile
    return last
