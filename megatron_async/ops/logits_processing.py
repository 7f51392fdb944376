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
class ProcessingTensors:
    """What the rows of a step ask for; on the device of the logits.

    Attributes:
        features: int32 `[rows]`, bits of `RowFeature`.
        slots: int64 `[rows]`.
        kv_lengths: int32 `[rows]`: position of the token to be sampled.
        records: int32 `[slots + 1, RECORD_WORDS]`.
        state: per-slot counts and recent tokens.
    """

    features: Tensor
    slots: Tensor
    kv_lengths: Tensor
    records: Tensor
    state: SamplingState


@dataclass
class ChunkTensors:
    """The prefill chunks of a step.

    Attributes:
        first_row: index of the first among the step's rows.
        starts: int32 `[chunks + 1]`: where each begins in `token_ids`, and its end.
        token_ids: int64 `[prefill tokens]`, perhaps padded.
        words: int32 `[ring, words]`: bookkeeping of the steps in flight.
        entry: int32 `[1]`: which of them is this step's.
        record_field: where in it the chunks say where their requests' records are (or -1).
        max_query_length: no chunk has more tokens.
    """

    first_row: int
    starts: Tensor
    token_ids: Tensor
    words: Tensor
    entry: Tensor
    record_field: int
    max_query_length: int

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.starts) - 1


def begin_chunks_reference(rows: ProcessingTensors, chunks: ChunkTensors) -> None:
    """Take over records of requests that start, and count the chunks' tokens.

    Every known token of a request passes here once since it got its slot, also those that it
    generated before an eviction.

    Args:
        rows: their `records` and `state` are changed.
        chunks: the step's prefill chunks, one at least.
    """
    words = chunks.words[int(chunks.entry)]
    offsets = words[chunks.record_field : chunks.record_field + chunks.count]
    for chunk, offset in enumerate(offsets.tolist()):  # sync-ok: CPU
        row = chunks.first_row + chunk
        features, slot = int(rows.features[row]), int(rows.slots[row])
        record = rows.records[slot]
        if offset >= 0:
            length = _record_words(words[offset : offset + HEADER])
            record[:length] = words[offset : offset + length]
        counts, recent = rows.state.counts[slot], rows.state.recent[slot]
        if features & RowFeature.STARTS and features & RowFeature.PENALTIES:
            counts.zero_()
        start, end = chunks.starts[chunk : chunk + 2].tolist()  # sync-ok: CPU
        tokens = chunks.token_ids[start:end]
        position = int(rows.kv_lengths[row]) - (end - start)
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
    logits: Tensor, rows: ProcessingTensors, out: Tensor, kept: Tensor
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
        record, position = rows.records[slot], int(rows.kv_lengths[row])
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


def count_tokens_reference(tokens: Tensor, rows: ProcessingTensors) -> None:
    """Count the sampled tokens, int64 `[rows]`, of the rows that produce one; a constrained row's
    is none yet."""
    slots, length = rows.slots, rows.state.recent.size(1)
    is_final = RowFeature.PRODUCES | RowFeature.CONSTRAINED
    produces = (rows.features & is_final) == RowFeature.PRODUCES
    counted = produces & ((rows.features & RowFeature.PENALTIES) != 0)
    rows.state.counts[slots[counted], tokens[counted]] += 1
    kept = produces & ((rows.features & RowFeature.BAD_WORDS) != 0)
    place = (rows.kv_lengths[kept] % length).long()
    rows.state.recent[slots[kept], place] = tokens[kept].int()


def _record_words(header: Tensor) -> int:
    edits, words = int(header[Header.NUM_EDITS]), int(header[Header.NUM_BAD_WORDS])
    return HEADER + edits * EDIT_WORDS + words * WINDOW


def _penalise(logits: Tensor, counts: Tensor, record: Tensor) -> None:
    frequency, presence, repetition = record[:3].view(torch.float32)
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
