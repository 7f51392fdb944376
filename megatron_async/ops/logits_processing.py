"""Penalties, logit bias, min tokens and bad words, in plain torch; on a GPU `triton_logits`.

They apply in this order: repetition penalty, frequency and presence penalty, bias, bans. The
repetition penalty (Keskar et al. 2019, CTRL) divides positive logits of tokens seen in prompt or
generation and multiplies negative ones; frequency and presence penalties are OpenAI's: of generated
tokens alone, by their number and by whether there are any.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_async.ops.sampling import SamplingRows
from megatron_async.ops.sampling_state import PROMPT_TOKEN, SamplingState
from megatron_async.ops.slot_records import (
    EDIT_WORDS,
    HEADER,
    NO_TOKEN,
    WINDOW,
    Header,
    RowFeature,
)


@dataclass
class ProcessingRows(SamplingRows):
    """Rows whose logits may have to be processed.

    Attributes:
        features: int32 `[rows]`, bits of `RowFeature`.
        state: per-slot counts and recent tokens.
    """

    features: Tensor
    state: SamplingState


@dataclass
class ChunkTensors:
    """The prefill chunks of a step.

    Attributes:
        first_row: index of the first among the step's rows.
        starts: int32 `[chunks + 1]`: where each begins in `token_ids`, and its end.
        token_ids: int64 `[prefill tokens]`, perhaps padded.
        max_query_length: no chunk has more tokens.
    """

    first_row: int
    starts: Tensor
    token_ids: Tensor
    max_query_length: int

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.starts) - 1


def begin_chunks_reference(rows: ProcessingRows, chunks: ChunkTensors) -> None:
    """Count the chunks' tokens, those of requests that start from zero.

    Every known token of a request passes here once since it got its slot, also those that it
    generated before an eviction.

    Args:
        rows: their `state` is changed.
        chunks: the step's prefill chunks, one at least.
    """
    for chunk in range(chunks.count):
        row = chunks.first_row + chunk
        features, slot = int(rows.features[row]), int(rows.slots[row])
        record = rows.records[slot]
        counts, recent = rows.state.counts[slot], rows.state.recent[slot]
        if features & RowFeature.STARTS and features & RowFeature.PENALTIES:
            counts.zero_()
        start, end = chunks.starts[chunk : chunk + 2].tolist()  # sync-ok: CPU
        tokens = chunks.token_ids[start:end]
        position = int(rows.positions[row]) - (end - start)
        in_prompt = max(int(record[Header.PROMPT_LENGTH]) - position, 0)
        if features & RowFeature.PENALTIES:
            prompt, generated = tokens[:in_prompt], tokens[in_prompt:]
            counts[prompt] = counts[prompt] | PROMPT_TOKEN
            counts.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
        if features & RowFeature.BAD_WORDS:
            last = tokens[-WINDOW:]
            positions = torch.arange(len(tokens), device=tokens.device)[-WINDOW:] + position
            recent[positions % WINDOW] = last.int()


def process_logits_reference(
    logits: Tensor, rows: ProcessingRows, out: Tensor, kept: Tensor
) -> Tensor:
    """Penalise, bias and ban.

    Args:
        logits: `[rows, vocabulary]`, any float dtype.
        rows: what each row asks for.
        out: float32 `[rows or more, vocabulary]`, written.
        kept: `[rows or more, vocabulary]`, dtype of the logits, written with those of constrained
            rows as they were.

    Returns:
        the rows of `out`.
    """
    processed = out[: len(logits)]
    processed.copy_(logits)
    constrained = (rows.features & RowFeature.CONSTRAINED) != 0
    kept[: len(logits)][constrained] = logits[constrained]
    for row, features in enumerate(rows.features.tolist()):  # sync-ok: CPU
        slot = int(rows.slots[row])
        record, position = rows.records[slot], int(rows.positions[row])
        if features & RowFeature.PENALTIES:
            _penalise(processed[row], rows.state.counts[slot], record)
        if features & RowFeature.EDITS:
            count = int(record[Header.NUM_EDITS])
            edits = record[HEADER : HEADER + count * EDIT_WORDS].view(-1, EDIT_WORDS)
            due = edits[position < edits[:, 2]]
            values = due[:, 1].contiguous().view(torch.float32)
            processed[row].index_add_(0, due[:, 0].long(), values)
        if features & RowFeature.BAD_WORDS:
            banned = _banned(record, rows.state.recent[slot], position)
            processed[row, banned] = -torch.inf
    return processed


def count_tokens_reference(tokens: Tensor, rows: ProcessingRows) -> None:
    """Count the sampled tokens, int64 `[rows]`, of the rows that produce one; a constrained row's
    is none yet, and -1 is none."""
    slots, length = rows.slots, rows.state.recent.size(1)
    is_final = RowFeature.PRODUCES | RowFeature.CONSTRAINED
    produces = ((rows.features & is_final) == RowFeature.PRODUCES) & (tokens >= 0)
    counted = produces & ((rows.features & RowFeature.PENALTIES) != 0)
    rows.state.counts[slots[counted], tokens[counted]] += 1
    kept = produces & ((rows.features & RowFeature.BAD_WORDS) != 0)
    place = (rows.positions[kept] % length).long()
    rows.state.recent[slots[kept], place] = tokens[kept].int()


def _penalise(logits: Tensor, counts: Tensor, record: Tensor) -> None:
    words = (Header.FREQUENCY, Header.PRESENCE, Header.REPETITION)
    frequency, presence, repetition = record.view(torch.float32)[list(words)]
    seen = counts != 0
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(seen, penalised, logits))
    generated = counts & (PROMPT_TOKEN - 1)
    logits.sub_(frequency * generated + presence * (generated > 0))


def _banned(record: Tensor, recent: Tensor, position: int) -> Tensor:
    """Last tokens of the bad words whose other tokens were generated just before `position`."""
    edits, count = int(record[Header.NUM_EDITS]), int(record[Header.NUM_BAD_WORDS])
    generated = position - int(record[Header.PROMPT_LENGTH])
    start = HEADER + edits * EDIT_WORDS
    words = record[start : start + count * WINDOW].view(-1, WINDOW)
    back = torch.arange(WINDOW - 1, 0, -1, device=record.device)
    before = recent[(position - back) % WINDOW]
    before = torch.where(back <= generated, before, NO_TOKEN - 1)
    prefix = words[:, :-1]
    matches = ((prefix == NO_TOKEN) | (prefix == before)).all(dim=1)
    return words[matches, -1].long()
