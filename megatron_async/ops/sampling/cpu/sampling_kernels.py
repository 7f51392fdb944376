"""Loops that choose tokens from logits on a CPU, and write log probs and the likeliest tokens: what
`ops/sampling/sampling.py` and `ops/sampling/log_probs.py` do with sorts.

Imported only where loops are compiled. No sum is reordered: a row's token depends on no other row,
nor on the batch's mode, and log probs are of the tokens that filters leave here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_async.ops.cpu.float_math import exp
from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.sampling.cpu.noise_kernels import (
    GROUPS,
    MOST_NOISE,
    ROUNDS,
    TOKENS,
    fill_numbers,
    gumbel,
    rest_of,
    set_keys,
)
from megatron_async.ops.sampling.cpu.ranking_kernels import drop
from megatron_async.ops.sampling.slot_records import MAX_TOP_N, Header, RowFeature

_TEMPERATURE, _TOP_K, _TOP_N = int(Header.TEMPERATURE), int(Header.TOP_K), int(Header.TOP_N)
_SEED_LOW, _SEED_HIGH = int(Header.SEED_LOW), int(Header.SEED_HIGH)
_WANTED, _CONSTRAINED = int(RowFeature.LOG_PROBS), int(RowFeature.CONSTRAINED)
_PROCESSED = int(RowFeature.PROCESSED_LOG_PROBS)
_MARGIN = np.float32(1.001)
"""More than what `exp` errs."""
_STRETCH = 256
"""Logits that are compared with the largest one so far at once."""


@njit(inline="always")
def _has_more(part: Any, bound: Any) -> Any:  # pragma: no cover - compiled
    """Whether a number is more than the bound, or NaN."""
    found = 0
    for i in range(len(part)):
        found |= not (part[i] <= bound)
    return found


@njit(nogil=True, cache=True, error_model="numpy")
def likeliest(logits: Any) -> Any:  # pragma: no cover - compiled
    """The first of the largest logits, its place, and whether it is a finite number. With a NaN
    among them: infinity, and the place of the first NaN."""
    best, place = np.float32(-np.inf), 0
    for first in range(0, len(logits), _STRETCH):
        part = logits[first : first + _STRETCH]
        if not _has_more(part, best):
            continue
        for i in range(len(part)):
            if part[i] != part[i]:
                return np.float32(np.inf), first + i, False
            if part[i] > best:
                best, place = part[i], first + i
    return best, place, abs(best) < np.inf


@njit(inline="always")
def _draw_among(
    scores: Any, numbers: Any, best: Any, place: Any, first: Any
) -> Any:  # pragma: no cover - compiled
    """The best of `TOKENS` with their noise, or the one that was the best before: an earlier place
    of equal ones."""
    for i in range(TOKENS):
        score = scores[i] + gumbel(numbers[i])
        if score > best or (score == best and first + i < place):
            best, place = score, first + i
    return best, place


@njit(nogil=True, cache=True, error_model="numpy")
def draw(
    scores: Any, keys: Any, position: Any, group: Any, likely: Any
) -> Any:  # pragma: no cover - compiled
    """The largest sum of score and noise, and its place. Scores are a multiple of `TOKENS`, minus
    infinity where there is no token; `group` is of the first four, `likely` the place of a large
    one.

    Few tokens can have it. With a likely token's sum known, a token needs noise that its uniform
    number seldom gives; that is seen without a logarithm.
    """
    words, numbers = np.empty((4, GROUPS), np.uint32), np.empty(TOKENS, np.float32)
    start = likely // TOKENS * TOKENS
    fill_numbers(keys, position, group + start // 4, words, numbers)
    part = scores[start : start + TOKENS]
    best, place = _draw_among(part, numbers, np.float32(-np.inf), start, start)
    for first in range(0, len(scores), TOKENS):
        part = scores[first : first + TOKENS]
        if first == start or not _has_more(part, best - MOST_NOISE):
            continue
        fill_numbers(keys, position, group + first // 4, words, numbers)
        can_win = 0
        for i in range(TOKENS):
            can_win |= rest_of(numbers[i]) <= exp(part[i] - best) * _MARGIN
        if can_win:
            best, place = _draw_among(part, numbers, best, place, first)
    return best, place


@njit(nogil=True, cache=True, error_model="numpy")
def choose_rows(
    logits: Any, columns: Any, first_id: Any, slots: Any, positions: Any, records: Any,
    numbers: Any, mode: Any, unsound: Any, first_row: Any, end_row: Any, tokens: Any, scores: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """The token (column) of each row from `first_row` to `end_row`, and the score that it won with,
    infinity where a logit is NaN. The first `columns` logits are tokens, from id `first_id` on;
    slots are not read in mode 0.

    `unsound`, if negative, is the token of a row whose largest logit is no finite number; else that
    is the column of its largest logit, or of the first NaN.
    """
    lead = first_id % 4
    size = (lead + columns + TOKENS - 1) // TOKENS * TOKENS if mode else 0
    scaled, keys = np.full(size, np.float32(-np.inf)), np.empty((2, ROUNDS), np.uint32)
    for row in range(first_row, end_row):
        given = logits[row, :columns]
        score, place, is_sound = likeliest(given)
        if mode > 0 and is_sound:
            slot = slots[row]
            if slot < 0 or slot >= len(records):
                raise IndexError("a slot that does not exist")
            record, real = records[slot], numbers[slot]
            heat = real[_TEMPERATURE]
            if heat > 0 and record[_TOP_K] != 1:
                inner = scaled[lead : lead + columns]
                for i in range(columns):
                    inner[i] = given[i] / heat
                if mode > 1:
                    drop(inner, inner[place], record, real)
                set_keys(np.int64(record[_SEED_LOW]), np.int64(record[_SEED_HIGH]), keys)
                score, place = draw(scaled, keys, positions[row], first_id // 4, lead + place)
                place -= lead
        is_marked = not is_sound and unsound < 0
        tokens[row], scores[row] = unsound if is_marked else place, score


@njit(nogil=True, cache=True, error_model="numpy")
def log_of_sum(values: Any, most: Any) -> Any:  # pragma: no cover - compiled
    """Logarithm of the sum of exponentials of values, the largest of which is `most`; float64."""
    total = np.float64(0.0)
    for first in range(0, len(values), 64):
        part, sum_of_part = values[first : first + 64], np.float32(0.0)
        for i in range(len(part)):
            sum_of_part += exp(part[i] - most)
        total += np.float64(sum_of_part)
    return np.log(total) + most


@njit(nogil=True, cache=True, error_model="numpy")
def find_likeliest(values: Any, ids: Any) -> None:  # pragma: no cover - compiled
    """Into ids: places of the largest values, in order, equal ones by place."""
    found = 0
    for i in range(len(values)):
        if found == len(ids) and not values[i] > values[ids[found - 1]]:
            continue
        place = found if found < len(ids) else found - 1
        found = min(found + 1, len(ids))
        while place > 0 and values[i] > values[ids[place - 1]]:
            ids[place] = ids[place - 1]
            place -= 1
        ids[place] = i


@njit(cache=True, error_model="numpy")
def write_rows(
    logits: Any, processed: Any, tokens: Any, features: Any, slots: Any, records: Any,
    numbers: Any, ring: Any, ring_numbers: Any, entry: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """`log_probs`; `numbers` and `ring_numbers` are `records` and `ring` as float32, and logits may
    have more rows than tokens."""
    vocabulary = logits.shape[1]
    values, ids = np.empty(vocabulary, np.float32), np.empty(MAX_TOP_N, np.int64)
    out, out_numbers = ring[entry[0]], ring_numbers[entry[0]]
    for row in range(len(tokens)):
        if features[row] & (_WANTED | _CONSTRAINED) != _WANTED:
            continue
        slot, token = slots[row], tokens[row]
        if slot < 0 or slot >= len(records) or token < -vocabulary or token >= vocabulary:
            raise IndexError("a slot or a token that does not exist")
        record, real = records[slot], numbers[slot]
        is_processed = features[row] & _PROCESSED != 0
        given = processed[row] if is_processed else logits[row]
        heat = real[_TEMPERATURE]
        drawn = is_processed and heat > 0 and record[_TOP_K] != 1
        for i in range(vocabulary):
            values[i] = given[i] / heat if drawn else given[i]
        most, _, is_sound = likeliest(values)
        if drawn and is_sound:
            drop(values, most, record, real)
        total = log_of_sum(values, most) if is_sound else np.nan
        out_numbers[row, 0] = np.float32(values[token] - total)
        top_n = min(record[_TOP_N], MAX_TOP_N, vocabulary)
        wanted = ids[:top_n]
        if top_n > 0:
            find_likeliest(values, wanted)
        for n in range(top_n):
            out[row, 1 + n] = wanted[n]
            out_numbers[row, 1 + MAX_TOP_N + n] = np.float32(values[wanted[n]] - total)
