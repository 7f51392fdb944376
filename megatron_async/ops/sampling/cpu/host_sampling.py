"""Sampling and log probs on a CPU by compiled loops, with the signatures of their references.

A sort of 49,152 logits takes torch 5 ms, and their noise 1.2: as long as all layers of a small
model. The loops rank without a sort, and compute noise only where it can matter.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from megatron_async.ops.cpu.rows import run_shares
from megatron_async.ops.sampling.log_probs import log_probs
from megatron_async.ops.sampling.logits_processing import ProcessingRows, TokenMemory
from megatron_async.ops.sampling.sampling import (
    FilterCuts,
    SamplingMode,
    SamplingRows,
    best_tokens,
    sample,
)
from megatron_async.ops.sampling.slot_records import (
    NO_TOKEN,
    OUT_WORDS,
    RECORD_WORDS,
    Header,
    RowFeature,
)

LEAST_SHARED, LEAST_SHARED_GREEDY = 2**17, 2**20
"""Logits from which on threads share the rows: some 400 microseconds of one core."""


@sample.cpu
def sample_cpu(
    logits: Tensor, rows: SamplingRows | None, mode: SamplingMode
) -> tuple[Tensor, FilterCuts | None]:
    """A row of a slot that does not exist is an IndexError."""
    tokens, _ = _choose(logits, rows, mode, 0, logits.size(-1), marks=True)
    return tokens, None


@best_tokens.cpu
def best_tokens_cpu(
    logits: Tensor, rows: SamplingRows | None, mode: SamplingMode, first: int, columns: int
) -> tuple[Tensor, Tensor]:
    tokens, scores = _choose(logits, rows, mode, first, columns, marks=False)
    return scores[:, None], (tokens + first).to(torch.int32)[:, None]


def _choose(
    logits: Tensor,
    rows: SamplingRows | None,
    mode: SamplingMode,
    first: int,
    columns: int,
    marks: bool,
) -> tuple[Tensor, Tensor]:
    from megatron_async.ops.sampling.cpu.sampling_kernels import choose_rows

    count = logits.size(0)
    given = logits.detach().to(torch.float32).contiguous()
    tokens, scores = torch.empty(count, dtype=torch.int64), torch.empty(count)
    if rows is None:
        mode = SamplingMode.GREEDY
        rows = SamplingRows(tokens, torch.empty(0, dtype=torch.int32), tokens[:0, None].int())
    arguments = (
        given.numpy(), columns, first, rows.slots.contiguous().numpy(),
        rows.positions.to(torch.int32).contiguous().numpy(), rows.records.numpy(),
        rows.records.view(torch.float32).numpy(), int(mode), NO_TOKEN if marks else 0,
    )  # fmt: skip
    results = tokens.numpy(), scores.numpy()

    def choose(first_row: int, end_row: int) -> None:
        choose_rows(*arguments, first_row, end_row, *results)

    least = LEAST_SHARED if mode else LEAST_SHARED_GREEDY
    shares = min(torch.get_num_threads(), count) if given.numel() >= least else 1
    run_shares(choose, list(pairwise(count * share // shares for share in range(shares + 1))))
    return tokens, scores


@log_probs.cpu
def log_probs_cpu(
    logits: Tensor,
    processed: Tensor,
    tokens: Tensor,
    cuts: FilterCuts | None,
    rows: ProcessingRows,
    ring: Tensor,
    entry: Tensor,
) -> None:
    from megatron_async.ops.sampling.cpu.sampling_kernels import write_rows

    write_rows(
        logits.detach().to(torch.float32).contiguous().numpy(),
        processed.detach().contiguous().numpy(),
        tokens.contiguous().numpy(),
        rows.features.contiguous().numpy(),
        rows.slots.contiguous().numpy(),
        rows.records.numpy(),
        rows.records.view(torch.float32).numpy(),
        ring.numpy(),
        ring.view(torch.float32).numpy(),
        entry.numpy(),
    )


def compile_loops() -> None:
    """Compile the loops, by calls for one row that asks for everything."""
    records = torch.zeros(1, RECORD_WORDS, dtype=torch.int32)
    numbers, logits = records.view(torch.float32), torch.zeros(1, 8)
    numbers[0, [Header.TEMPERATURE, Header.TOP_P, Header.MIN_P]] = 0.5
    records[0, Header.TOP_K], records[0, Header.TOP_N] = 3, 1
    number = torch.zeros(1, dtype=torch.int32)
    features, memory = number + int(RowFeature.LOG_PROBS), TokenMemory(records, records)
    rows = ProcessingRows(number.long(), number, records, features, memory)
    tokens, _ = sample_cpu(logits, rows, SamplingMode.FILTERED)
    ring = torch.zeros(1, 1, OUT_WORDS, dtype=torch.int32)
    log_probs_cpu(logits, logits, tokens, None, rows, ring, number)
