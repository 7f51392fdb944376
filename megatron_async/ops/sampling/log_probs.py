"""Log probabilities of sampled tokens and of the likeliest ones.

On a GPU two kernels, for a captured step; programs of a row without log probs end at once:

1. `_tiles`: the vocabulary in tiles: largest score, sum of exponentials, and the tile's likeliest
   tokens, one after another.
2. `_finish`: one program a row joins them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.op import op, promising
from megatron_async.ops.sampling.logits_processing import ProcessingRows
from megatron_async.ops.sampling.sampling import FilterCuts, filter_logits
from megatron_async.ops.sampling.slot_records import MAX_TOP_N, OUT_WORDS, Header, RowFeature
from megatron_async.ops.sampling.tile_scores import heat_of, is_filtered, keeps, record_of
from megatron_async.ops.sampling.triton_search import load_tile


@op(cpu="sampling.cpu.host_sampling")
def log_probs(
    logits: Tensor,
    processed: Tensor,
    tokens: Tensor,
    cuts: FilterCuts | None,
    rows: ProcessingRows,
    ring: Tensor,
    entry: Tensor,
) -> None:
    """Log probs of a step's rows.

    *Raw* ones are of the model's logits. *Processed* ones are of the distribution that the token
    was drawn from: penalties, biases, bans, temperature and filters included (a greedy row's as if
    at temperature 1 without filters). A constrained row has no token yet and is skipped.

    Args:
        logits: `[rows, vocabulary]`, the model's.
        processed: float32, the same after `process_logits`.
        tokens: int64 `[rows]`, sampled.
        cuts: where the filters cut, from `sample` of `processed`; the reference and the
            CPU find this anew.
        rows: what each row asks for.
        ring: int32 `[entries, max rows, OUT_WORDS]`, written for rows that ask: float32 log prob of
            the token, int32 ids of the likeliest tokens (equal ones by id), their float32 log
            probs.
        entry: int32 `[1]`: which entry of the ring.
    """
    out, floats = ring[int(entry)], ring[int(entry)].view(torch.float32)
    is_final = RowFeature.LOG_PROBS | RowFeature.CONSTRAINED
    wanted = (rows.features & is_final) == RowFeature.LOG_PROBS
    for row in wanted.nonzero()[:, 0].tolist():
        values = logits[row].float()
        if int(rows.features[row]) & RowFeature.PROCESSED_LOG_PROBS:
            one, values = rows.one(row), processed[row]
            if (heat := one.heats()) != 0:
                values = filter_logits(values[None] / heat[:, None], one)[0]
        log_probs = torch.log_softmax(values, dim=-1)
        top_n = min(int(rows.records[int(rows.slots[row]), Header.TOP_N]), log_probs.numel())
        likeliest, ids = torch.sort(log_probs, descending=True, stable=True)
        floats[row, 0] = log_probs[tokens[row]]
        out[row, 1 : 1 + top_n] = ids[:top_n].int()
        floats[row, 1 + MAX_TOP_N : 1 + MAX_TOP_N + top_n] = likeliest[:top_n]


def empty_log_probs(entries: int, rows: int, device: torch.device) -> Tensor:
    """A ring of outputs: int32 `[entries, rows, OUT_WORDS]`."""
    return torch.zeros(entries, rows, OUT_WORDS, dtype=torch.int32, device=device)


TILE = 2048

LOG_PROBS = tl.constexpr(int(RowFeature.LOG_PROBS))
PROCESSED = tl.constexpr(int(RowFeature.PROCESSED_LOG_PROBS))
CONSTRAINED = tl.constexpr(int(RowFeature.CONSTRAINED))
TOP_N = tl.constexpr(int(Header.TOP_N))
MOST = tl.constexpr(MAX_TOP_N)
WORDS_OUT = tl.constexpr(OUT_WORDS)


@log_probs.gpu
@promising("invariant")
def log_probs_gpu(
    logits: Tensor,
    processed: Tensor,
    tokens: Tensor,
    cuts: FilterCuts | None,
    rows: ProcessingRows,
    ring: Tensor,
    entry: Tensor,
) -> None:
    """Elements of a row of `logits` must be adjacent, the other tensors contiguous."""
    assert cuts is not None, "of a step with filters"
    count, vocab = logits.shape
    splits = triton.cdiv(vocab, TILE)
    device = logits.device
    most = torch.empty(count, splits, dtype=torch.float32, device=device)
    total = torch.empty_like(most)
    values = torch.empty(count, splits, MAX_TOP_N, dtype=torch.float32, device=device)
    ids = torch.empty_like(values, dtype=torch.int32)
    asked = (rows.features, rows.slots, rows.records)
    scores = (logits, logits.stride(0), processed, vocab)
    _tiles[(splits, count)](*scores, *asked, *cuts, most, total, values, ids, TILE, num_warps=4)
    _finish[(count,)](
        *scores, *asked, tokens, most, total, values, ids,
        ring, ring.stride(0), entry, splits,
        triton.next_power_of_2(splits), triton.next_power_of_2(splits * MAX_TOP_N),
    )  # fmt: skip


@triton.jit
def _tiles(
    logits: tl.tensor,
    row_stride: tl.tensor,
    processed: tl.tensor,
    vocab: tl.constexpr,
    features: tl.tensor,
    slots: tl.tensor,
    records: tl.tensor,
    cut: tl.tensor,
    last: tl.tensor,
    top: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    tile: tl.constexpr,
) -> None:
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    asked = tl.load(features + row)
    if (asked & (LOG_PROBS | CONSTRAINED)) == LOG_PROBS:
        record = record_of(records, slots, row)
        token = split * tile + tl.arange(0, tile)
        if (asked & PROCESSED) != 0:
            score = load_tile(processed + row * vocab, split * tile, vocab, tile)
            heat = heat_of(record)
            if heat > 0:
                if is_filtered(record):
                    limit, largest = tl.load(cut + row), tl.load(top + row)
                    last_id = tl.load(last + row)
                    keep = keeps(record, score, token, heat, limit, last_id, largest)
                    score = tl.where(keep, score, float("-inf"))
                score = score / heat
        else:
            score = load_tile(logits + row * row_stride, split * tile, vocab, tile)
        out = row * tl.num_programs(0) + split
        largest = tl.max(score, axis=0)
        finite = tl.where(largest > float("-inf"), largest, 0.0)
        tl.store(most + out, largest)
        tl.store(total + out, tl.sum(tl.exp(score - finite), axis=0))
        wanted = tl.load(record + TOP_N)
        place = 0
        while place < wanted:
            value, index = tl.max(score, axis=0, return_indices=True)
            tl.store(values + out * MOST + place, value)
            tl.store(ids + out * MOST + place, split * tile + index)
            score = tl.where(token == split * tile + index, float("-inf"), score)
            place += 1


@triton.jit
def _finish(
    logits: tl.tensor,
    row_stride: tl.tensor,
    processed: tl.tensor,
    vocab: tl.constexpr,
    features: tl.tensor,
    slots: tl.tensor,
    records: tl.tensor,
    tokens: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    ring: tl.tensor,
    ring_stride: tl.tensor,
    entry: tl.tensor,
    splits: tl.tensor,
    block: tl.constexpr,
    candidates: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    asked = tl.load(features + row)
    if (asked & (LOG_PROBS | CONSTRAINED)) == LOG_PROBS:
        record = record_of(records, slots, row)
        split = tl.arange(0, block)
        part = tl.load(most + row * splits + split, mask=split < splits, other=float("-inf"))
        sums = tl.load(total + row * splits + split, mask=split < splits, other=0.0)
        largest = tl.max(part, axis=0)
        log_total = largest + tl.log(tl.sum(sums * tl.exp(part - largest), axis=0))
        token = tl.maximum(tl.load(tokens + row), 0)  # of a row without a token nobody reads it
        if (asked & PROCESSED) != 0:
            score = tl.load(processed + row * vocab + token)
            heat = heat_of(record)
            if heat > 0:
                score = score / heat
        else:
            score = tl.load(logits + row * row_stride + token).to(tl.float32)
        out = ring + tl.load(entry).to(tl.int64) * ring_stride + row * WORDS_OUT
        tl.store(out, (score - log_total).to(tl.int32, bitcast=True))
        wanted = tl.load(record + TOP_N)
        # Tile after tile, in each from the likeliest on: equal ones are in order of their ids.
        index = tl.arange(0, candidates)
        exists = (index < splits * MOST) & (index % MOST < wanted)
        first = row * splits * MOST + index
        value = tl.load(values + first, mask=exists, other=float("-inf"))
        place = 0
        while place < wanted:
            best, where = tl.max(value, axis=0, return_indices=True)
            tl.store(out + 1 + place, tl.load(ids + row * splits * MOST + where))
            tl.store(out + 1 + MOST + place, (best - log_total).to(tl.int32, bitcast=True))
            value = tl.where(index == where, float("-inf"), value)
            place += 1
