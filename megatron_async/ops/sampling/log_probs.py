"""Log probabilities of sampled tokens and of the likeliest ones, in plain torch; on a GPU
`triton_log_probs`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.ops.op import op
from megatron_async.ops.sampling.logits_processing import ProcessingRows
from megatron_async.ops.sampling.sampling import FilterCuts, SamplingRows, filter_logits
from megatron_async.ops.sampling.slot_records import MAX_TOP_N, OUT_WORDS, Header, RowFeature


@op(gpu="sampling.triton_log_probs", cpu="sampling.cpu.host_sampling")
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
        cuts: where the filters cut, from `sample_with_cuts` of `processed`; the reference and the
            CPU find this anew.
        rows: what each row asks for.
        ring: int32 `[entries, max rows, OUT_WORDS]`, written for rows that ask: float32 log prob of
            the token, int32 ids of the likeliest tokens (equal ones by id), their float32 log
            probs.
        entry: int32 `[1]`: which entry of the ring.
    """
    out = ring[int(entry)]
    is_final = RowFeature.LOG_PROBS | RowFeature.CONSTRAINED
    wanted = (rows.features & is_final) == RowFeature.LOG_PROBS
    for row in wanted.nonzero()[:, 0].tolist():
        values = logits[row].float()
        if int(rows.features[row]) & RowFeature.PROCESSED_LOG_PROBS:
            values = _drawn_from(processed[row : row + 1], rows.one(row))[0]
        log_probs = torch.log_softmax(values, dim=-1)
        top_n = int(rows.records[int(rows.slots[row]), Header.TOP_N])
        write_log_probs(log_probs, tokens[row], top_n, out[row])


def write_log_probs(log_probs: Tensor, token: Tensor, top_n: int, out: Tensor) -> None:
    """One row of `log_probs.reference`'s output.

    Args:
        log_probs: float32 `[vocabulary]`.
        token: int64, whose log prob comes first.
        top_n: likeliest tokens.
        out: int32 `[OUT_WORDS]`.
    """
    top_n = min(top_n, log_probs.numel())
    values, ids = torch.sort(log_probs, descending=True, stable=True)
    floats = out.view(torch.float32)
    floats[0] = log_probs[token]
    out[1 : 1 + top_n] = ids[:top_n].int()
    floats[1 + MAX_TOP_N : 1 + MAX_TOP_N + top_n] = values[:top_n]


def empty_log_probs(entries: int, rows: int, device: torch.device) -> Tensor:
    """A ring of outputs: int32 `[entries, rows, OUT_WORDS]`."""
    return torch.zeros(entries, rows, OUT_WORDS, dtype=torch.int32, device=device)


def _drawn_from(processed: Tensor, row: SamplingRows) -> Tensor:
    heat = row.heats()
    if heat == 0:
        return processed
    return filter_logits(processed / heat[:, None], row)
