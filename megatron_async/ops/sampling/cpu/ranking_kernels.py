"""Loops that rank tokens without a sort: which ones top_k, top_p and min_p drop.

The rank of a token is found by radix search: the bits of its score, in three parts, from counts and
sums of weights of all scores with the same leading bits. Imported only where loops are compiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_async.ops.cpu.float_math import exp
from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.sampling.slot_records import Header

_TOP_K, _TOP_P, _MIN_P = (int(word) for word in (Header.TOP_K, Header.TOP_P, Header.MIN_P))
_BITS = 11, 11, 10
_SHIFTS = np.array([21, 10, 0], np.uint32)
"""Parts of a key of 32 bits: each one's bits, and the bits behind it."""
_BINS = 2**11
_LANES = 64
"""Sums of weights that are kept beside each other."""
_NEARLY = 0.99
"""Less than what rounding may add to a sum of weights."""
_STRETCH = 64
"""Tokens that are looked at at once."""
_SIGN = np.int32(31)
_REST = np.int32(0x7FFFFFFF)


@njit(nogil=True, cache=True, error_model="numpy")
def _fill_keys(scores: Any, keys: Any) -> None:  # pragma: no cover - compiled
    """Into keys, uint32: smaller for a larger score; equal ones have equal keys."""
    for i in range(len(scores)):
        scores[i] += np.float32(0.0)  # minus zero becomes zero
    bits = scores.view(np.int32)
    for i in range(len(bits)):
        ordered = bits[i] ^ ((bits[i] >> _SIGN) & _REST)
        keys[i] = np.uint32(_REST - ordered)


@njit(nogil=True, cache=True, error_model="numpy")
def _fill_weights(scores: Any, most: Any, weights: Any) -> Any:  # pragma: no cover - compiled
    """Into weights: exp(score - most); their sum, float64, in an order that is written here: so
    every copy of this loop has the same bits, and all agree on which tokens are dropped."""
    lanes = np.zeros(_LANES, np.float32)
    whole = len(scores) // _LANES * _LANES
    for first in range(0, whole, _LANES):
        given, found = scores[first : first + _LANES], weights[first : first + _LANES]
        for i in range(_LANES):
            weight = exp(given[i] - most)
            found[i] = weight
            lanes[i] += weight
    total = np.float64(0.0)
    for i in range(_LANES):
        total += np.float64(lanes[i])
    for i in range(whole, len(scores)):
        weights[i] = exp(scores[i] - most)
        total += np.float64(weights[i])
    return total


@njit(inline="always")
def _compact(
    keys: Any, weights: Any, shift: Any, leading: Any, some_keys: Any, some_weights: Any
) -> Any:  # pragma: no cover - compiled
    """Copy the tokens whose keys have these leading bits; their number."""
    count = 0
    for first in range(0, len(keys), _STRETCH):
        part = keys[first : first + _STRETCH]
        found = 0
        for i in range(len(part)):
            found |= part[i] >> shift == leading
        if found:
            for i in range(len(part)):
                if part[i] >> shift == leading:
                    some_keys[count], some_weights[count] = part[i], weights[first + i]
                    count += 1
    return count


@njit(inline="always")
def _compact_heavy(
    keys: Any, weights: Any, least: Any, some_keys: Any, some_weights: Any
) -> Any:  # pragma: no cover - compiled
    """Copy the tokens that weigh so much at least; their number."""
    count = 0
    for first in range(0, len(keys), _STRETCH):
        part = weights[first : first + _STRETCH]
        found = 0
        for i in range(len(part)):
            found |= part[i] >= least
        if found:
            for i in range(len(part)):
                if part[i] >= least:
                    some_keys[count], some_weights[count] = keys[first + i], part[i]
                    count += 1
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def _search(
    keys: Any, weights: Any, count: Any, weight: Any, counts: Any, sums: Any, others: Any
) -> Any:  # pragma: no cover - compiled
    """The fewest of the best tokens that are `count`, or that weigh `weight`; infinity: nothing
    ends the search. counts, sums and others are for this function's own use.

    Gives the key of the last token, how many tokens with this key there are among them, and what
    all of them weigh.
    """
    before, weight_before, leading, found = 0, 0.0, np.uint32(0), 0
    for part in range(3):
        shift, bins, rest = _SHIFTS[part], 1 << _BITS[part], np.uint32((1 << _BITS[part]) - 1)
        counts[:bins], sums[:bins] = 0, 0.0
        for i in range(len(keys)):
            place = (keys[i] >> shift) & rest
            counts[place] += 1
            sums[place] += weights[i]
        found = -1
        for b in range(bins):
            if counts[b] == 0:
                continue
            if found >= 0:  # the bin before this one does not end the search
                before, weight_before = before + counts[found], weight_before + sums[found]
            found = b
            if before + counts[b] >= count or weight_before + sums[b] >= weight:
                break
        leading = np.uint32((leading << np.uint32(_BITS[part])) | np.uint32(found))
        if part < 2:
            left = _compact(keys, weights, shift, leading, others[0], others[1])
            keys, weights = others[0][:left], others[1][:left]
    ties = counts[found]
    one = sums[found] / ties
    taken = 0
    while taken < ties and before + taken < count and weight_before + taken * one < weight:
        taken += 1
    return leading, taken, weight_before + taken * one


@njit(nogil=True, cache=True, error_model="numpy")
def drop(scores: Any, most: Any, record: Any, numbers: Any) -> None:  # pragma: no cover - compiled
    """Set scores that a row's filters exclude to minus infinity, as `filter_logits` does; `most` is
    the largest score, `numbers` the record as float32."""
    size, none = len(scores), np.float32(-np.inf)
    top_k, top_p, min_p = record[_TOP_K], numbers[_TOP_P], numbers[_MIN_P]
    has_k, has_p = 0 < top_k < size, 0 < top_p < 1
    if not has_k and not has_p and min_p <= 0:
        return
    weights = np.empty(size, np.float32)
    total = _fill_weights(scores, most, weights)
    if has_k or has_p:
        keys = np.empty(size, np.uint32)
        _fill_keys(scores, keys)
        counts, sums = np.empty(_BINS, np.int64), np.empty(_BINS, np.float64)
        others = np.empty(size, np.uint32), np.empty(size, np.float32)
        last, taken = np.uint32(0), 0
        if has_k:
            last, taken, total = _search(keys, weights, top_k, np.inf, counts, sums, others)
        if has_p:
            # All lighter tokens together weigh less than what top_p drops.
            least = np.float32(_NEARLY * (1 - top_p) * total / size)
            left = _compact_heavy(keys, weights, least, others[0], others[1])
            last, taken, _ = _search(
                others[0][:left], others[1][:left], np.inf, top_p * total, counts, sums, others
            )
        ties = 0
        for i in range(size):
            ties += keys[i] == last
            scores[i] = none if keys[i] > last else scores[i]
        if ties > taken:
            ties = 0
            for i in range(size):
                if keys[i] == last:
                    ties += 1
                    if ties > taken:
                        scores[i] = none
    if min_p > 0:
        for i in range(size):
            scores[i] = none if weights[i] < min_p else scores[i]
