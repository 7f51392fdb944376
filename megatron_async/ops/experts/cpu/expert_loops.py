"""All experts of a step as one compiled call: their products are jobs that threads share.

Pairs of a token and one of its experts are sorted by expert. Each of both products is one job over
the outputs of all experts that have pairs, so that threads wait for each other four times a layer
and not four times an expert. Imported only where loops are compiled; see `jobs.py` about addresses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from megatron_async.ops.cpu.kept_loops import njit
from megatron_async.ops.cpu.row_kernels import REORDERS, floats, longs, words
from megatron_async.ops.experts.expert_routing import LEAST_SUM, NO_EXPERT
from megatron_async.ops.linear.cpu.group_rows import row_bytes
from megatron_async.ops.linear.cpu.jobs import (
    ACTIVATE,
    EXPERTS,
    NEVER,
    ROUND,
    rows_of_chunk,
    share,
)
from megatron_async.ops.linear.cpu.weight_record import (
    IS_FINE,
    LOOP,
    OUTPUTS,
    block_bytes,
    field,
)


@njit(nogil=True, cache=True, error_model="numpy")
def _sort_pairs(
    chosen: Any, first_expert: Any, local: Any, which: Any, starts: Any, row_of: Any
) -> Any:  # pragma: no cover - compiled
    """Sort pairs by expert; how many experts have some.

    Args:
        chosen: int32 `[pairs]`, experts; those elsewhere have no row.
        which: `[local]`, written: numbers of the experts that have pairs.
        starts: `[local + 1]`, written: the first row of each of these, and the end of the last.
        row_of: `[pairs]`, written: the row of each pair; -1: none.
    """
    counts = np.zeros(local + 1, np.int64)
    for pair in range(len(chosen)):
        expert = chosen[pair] - first_expert
        if 0 <= expert < local:
            counts[expert] += 1
    found, start = 0, 0
    for expert in range(local):
        count = counts[expert]
        counts[expert] = start
        if count:
            which[found], starts[found] = expert, start
            found, start = found + 1, start + count
    starts[found] = start
    for pair in range(len(chosen)):
        expert = chosen[pair] - first_expert
        row_of[pair] = -1
        if 0 <= expert < local:
            row_of[pair] = counts[expert]
            counts[expert] += 1
    return found


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply(
    work: Any, experts: Any, rows: Any, k: Any, weight: Any, record: Any, outputs: Any, out: Any
) -> None:  # pragma: no cover - compiled
    """Rounded rows of all experts by the weights of each; rows and `outputs` of one expert."""
    control, least, chunk_bytes, which, starts = work
    blocks, of_block = outputs // field(record, OUTPUTS), block_bytes(record, k)
    length, stride = experts * blocks, row_bytes(k, field(record, IS_FINE) != 0)
    size = max(chunk_bytes // of_block, 1) if length * of_block >= least else length
    arguments = (
        rows, k, weight, blocks, out, field(record, LOOP), which, starts, of_block, stride, outputs,
    )  # fmt: skip
    share(control, EXPERTS, length, size, arguments)


@njit(nogil=True, cache=True, error_model="numpy")
def expert_mlp(
    control: Any, least: Any, chunk_bytes: Any, sizes: Any, weights: Any, addresses: Any
) -> None:  # pragma: no cover - compiled
    """`ops/experts/expert_mlp.py`'s op; all by addresses.

    Args:
        control, least: of `Helpers.held`.
        sizes: tokens, topk, hidden, ffn, whether fc1 has gates, first expert, experts here.
        weights: both `GroupedWeight`s' numbers and records.
        addresses: x, float32 `[tokens, hidden]`; chosen experts, int32 `[tokens, topk]`; their
            weights, float32; out, like x, written; and room, for P pairs: int64 `[experts + experts
            + 1 + P]`, rounded rows of x, rounded rows of P pairs, and float32 `[P, outputs of
            fc1]`, `[P, ffn]` and `[P, hidden]`.
    """
    tokens, topk, hidden, ffn, gated, first_expert, local = sizes
    fc1, record1, fc2, record2 = weights
    x, chosen_at, shares_at, out_at, numbers, of_x, of_pairs, both, activated, products = addresses
    if tokens == 0:
        return
    pairs = tokens * topk
    which_at, starts_at, row_of_at = numbers, numbers + 8 * local, numbers + 8 * (2 * local + 1)
    row_of = carray(longs(row_of_at), (pairs,))
    experts = _sort_pairs(
        carray(words(chosen_at), (pairs,)), first_expert, local, carray(longs(which_at), (local,)),
        carray(longs(starts_at), (local + 1,)), row_of,
    )  # fmt: skip
    is_shared = least < NEVER
    share(control, ROUND, tokens, rows_of_chunk(tokens, is_shared), (x, hidden, record1, of_x))
    width = row_bytes(hidden, field(record1, IS_FINE) != 0) // 4
    given, target = carray(words(of_x), (tokens, width)), carray(words(of_pairs), (pairs, width))
    for pair in range(pairs):
        if row_of[pair] >= 0:
            source, place = given[pair // topk], target[row_of[pair]]
            for i in range(width):
                place[i] = source[i]
    rows = carray(longs(starts_at), (local + 1,))[experts]
    if rows > 0:
        work, up = (control, least, chunk_bytes, which_at, starts_at), (1 + gated) * ffn
        _multiply(work, experts, of_pairs, hidden, fc1, record1, up, both)
        arguments = (both, ffn, record2, of_pairs, activated, gated)
        share(control, ACTIVATE, rows, rows_of_chunk(rows, is_shared), arguments)
        _multiply(work, experts, of_pairs, ffn, fc2, record2, hidden, products)
    out, found = carray(floats(out_at), (tokens, hidden)), carray(floats(products), (pairs, hidden))
    shares = carray(floats(shares_at), (pairs,))
    for token in range(tokens):
        total = out[token]
        total[:] = 0
        for pair in range(token * topk, (token + 1) * topk):
            if row_of[pair] >= 0:
                product, part = found[row_of[pair]], shares[pair]
                for i in range(hidden):
                    total[i] += product[i] * part


SOFTMAX_OF_CHOSEN, SOFTMAX_OF_ALL, SIGMOID = range(3)
"""What weights are made of."""


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REORDERS)
def route(
    addresses: Any, sizes: Any, dummy_place: Any, kind: Any, scale: Any
) -> None:  # pragma: no cover - compiled
    """`ops/experts/expert_routing.py`'s op by addresses: x, the router's weight and bias, the bias
    of the choice, and places, 0 where there are none; chosen experts and their weights, written."""
    x_at, weight_at, logit_bias_at, bias_at, places_at, chosen_at, shares_at = addresses
    tokens, hidden, experts, topk, real = sizes
    x, weight = carray(floats(x_at), (tokens, hidden)), carray(floats(weight_at), (experts, hidden))
    logit_bias = carray(floats(logit_bias_at), (experts,))
    bias, places = carray(floats(bias_at), (experts,)), carray(longs(places_at), (max(real, 1),))
    chosen = carray(words(chosen_at), (tokens, topk))
    shares = carray(floats(shares_at), (tokens, topk))
    one, logits = np.float32(1), np.empty(experts, np.float32)
    preferred = np.empty(experts, np.float32)
    for token in range(tokens):
        given = x[token]
        for expert in range(experts):
            row, total = weight[expert], np.float32(0)
            for i in range(hidden):
                total += given[i] * row[i]
            if logit_bias_at != 0:
                total += logit_bias[expert]
            logits[expert] = preferred[expert] = total
            if kind == SIGMOID:
                logits[expert] = preferred[expert] = one / (one + np.exp(-total))
            if bias_at != 0:
                preferred[expert] += bias[expert]
        own, part = chosen[token], shares[token]
        for nth in range(topk):
            best = -1
            for expert in range(experts):
                is_taken = False
                for before in range(nth):
                    is_taken |= own[before] == expert
                if not is_taken and (best < 0 or preferred[expert] > preferred[best]):
                    best = expert
            own[nth], part[nth] = best, logits[best]
        if kind == SIGMOID:
            total = np.float32(LEAST_SUM)
            for nth in range(topk):
                total += part[nth]
            for nth in range(topk):
                part[nth] = (part[nth] / total if topk > 1 else part[nth]) * scale
        else:
            most, total = part[0], np.float32(0)
            if kind == SOFTMAX_OF_ALL:
                for expert in range(experts):
                    total += np.exp(logits[expert] - most)
            for nth in range(topk):
                part[nth] = np.exp(part[nth] - most)
                if kind == SOFTMAX_OF_CHOSEN:
                    total += part[nth]
            for nth in range(topk):
                part[nth] = part[nth] / total * scale
        if real >= 0 and (token >= real or places[token] == dummy_place):
            for nth in range(topk):
                own[nth], part[nth] = NO_EXPERT, 0


def compile_loops() -> None:
    """Compile all, so that no first step does: without tokens they read nothing."""
    expert_mlp(0, NEVER, 1, (0,) * 7, (0,) * 4, (0,) * 10)
    route((0,) * 7, (0, 1, 1, 1, -1), 0, SIGMOID, np.float32(1))
