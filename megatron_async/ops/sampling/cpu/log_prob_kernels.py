"""Loops that write log probs and the likeliest tokens on a CPU; see `ops/sampling/log_probs.py`.

Imported only where loops are compiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_async.ops.cpu.float_math import exp
from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.sampling.cpu.ranking_kernels import drop
from megatron_async.ops.sampling.cpu.sampling_kernels import likeliest
from megatron_async.ops.sampling.slot_records import MAX_TOP_N, Header, RowFeature

_TEMPERATURE, _TOP_K, _TOP_N = int(Header.TEMPERATURE), int(Header.TOP_K), int(Header.TOP_N)
_WANTED, _CONSTRAINED = int(RowFeature.LOG_PROBS), int(RowFeature.CONSTRAINED)
_PROCESSED = int(RowFeature.PROCESSED_LOG_PROBS)


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
    """Log probs of rows that ask for them.

    Args:
        logits, processed: float32 `[rows, vocabulary]`, and perhaps more rows.
        tokens, slots: int64 `[rows]`.
        features: int32 `[rows]`.
        records: int32 `[slots + 1, RECORD_WORDS]`.
        numbers: `records` as float32.
        ring: int32 `[entries, max rows, OUT_WORDS]`, written.
        ring_numbers: `ring` as float32.
        entry: int32 `[1]`.
    """
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
