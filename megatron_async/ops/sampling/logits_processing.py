"""Penalties, logit bias, min tokens and bad words, in plain torch; on a GPU `triton_logits`.

They apply in this order: repetition penalty, frequency and presence penalty, bias, bans. The
repetition penalty (Keskar et al. 2019, CTRL) divides positive logits of tokens seen in prompt or
generation and multiplies negative ones. Frequency and presence penalties are OpenAI's: they apply
only to generated tokens, by their count and by whether they have occurred.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.ops.op import op
from megatron_async.ops.sampling.sampling import SamplingRows
from megatron_async.ops.sampling.slot_records import (
    EDIT_WORDS,
    HEADER,
    NO_TOKEN,
    PROMPT_TOKEN,
    WINDOW,
    Header,
    RowFeature,
)


class TokenMemory(NamedTuple):
    """Tokens of each slot's request; one row more than there are slots.

    Attributes:
        counts: int32 `[slots + 1, vocabulary]`: see `PROMPT_TOKEN`; kept for rows with penalties.
        recent: int32 `[slots + 1, WINDOW]`: the generated token at position p is at p % WINDOW;
            kept for rows with bad words.
    """

    counts: Tensor
    recent: Tensor


@dataclass
class DraftTensors:
    """Rows of logits that follow drafts: `width` rows for each decode row, of which row j follows
    the first j drafts. Other rows come after them.

    Attributes:
        decode_rows, width: number of decode rows, and rows of logits for each.
        token_ids: int64 `[tokens]`: of each decode row the last token, then its drafts.
        yielded: int32 `[entries, rows, words]`: the sample ring, which says how many tokens a row
            yields.
        entry: int32 `[1]`: the step's entry of it.
    """

    decode_rows: int
    width: int
    token_ids: Tensor
    yielded: Tensor
    entry: Tensor

    def before(self, row: int) -> Tensor:
        """Drafts before a row of logits, int64 `[drafts]`."""
        if row >= self.decode_rows * self.width:
            return self.token_ids[:0]
        first = row - row % self.width + 1
        return self.token_ids[first : first + row % self.width]

    def is_yielded(self) -> Tensor:
        """Whether the token sampled from each row of logits is yielded to its request, bool
        `[sample rows or more]`."""
        counts = self.yielded[:, :, 0].index_select(0, self.entry.long())[0]
        place = torch.arange(self.width, device=counts.device)
        decode = (place < counts[: self.decode_rows, None]).flatten()
        return torch.cat((decode, counts[self.decode_rows :] > 0))


@dataclass
class ProcessingRows(SamplingRows):
    """Rows whose logits may have to be processed.

    Attributes:
        features: int32 `[rows]`, bits of `RowFeature`.
        memory: of the slots.
        drafts: None if no row of logits follows a draft, so that each yields its token.
    """

    features: Tensor
    memory: TokenMemory
    drafts: DraftTensors | None = None

    def drafts_before(self, row: int) -> Tensor:
        """Drafts between the tokens counted in `memory` and a row's token, int64 `[drafts]`."""
        return self.slots[:0] if self.drafts is None else self.drafts.before(row)


@dataclass
class CachedTokens:
    """Tokens in the blocks of a step's chunks, also those before the chunks.

    Attributes:
        block_tables: int32 `[chunks, blocks of a row]`; rows may be strided, elements not.
        block_tokens: int32 `[blocks, block size]`, contiguous; unwritten places are undefined.
    """

    block_tables: Tensor
    block_tokens: Tensor

    def first(self, chunk: int, count: int) -> Tensor:
        """The first `count` tokens of a chunk's sequence, int64 `[count]`."""
        size = self.block_tokens.size(1)
        blocks = self.block_tables[chunk, : -(-count // size)].long()
        return self.block_tokens[blocks].flatten()[:count].long()


@dataclass
class ChunkTensors:
    """The prefill chunks of a step.

    Attributes:
        first_row: index of the first among the step's rows.
        starts: int32 `[chunks + 1]`: where each begins in `token_ids`, and its end.
        token_ids: int64 `[prefill tokens]`, perhaps padded.
        max_query_length: no chunk has more tokens.
        cached: tokens by block; None where every sequence begins with a chunk at 0.
    """

    first_row: int
    starts: Tensor
    token_ids: Tensor
    max_query_length: int
    cached: CachedTokens | None = None

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.starts) - 1


@op(gpu="sampling.triton_logits")
def begin_chunks(rows: ProcessingRows, chunks: ChunkTensors) -> None:
    """Count the chunks' tokens; the counts of requests that start are reset to zero first.

    Every known token of a request is counted once since it got its slot, also those that it
    generated before an eviction. Tokens before a request's first chunk, whose keys and values were
    in the cache already, are read from the blocks and counted with that chunk.

    Args:
        rows: their `memory` is changed.
        chunks: the step's prefill chunks, one at least.
    """
    for chunk in range(chunks.count):
        row = chunks.first_row + chunk
        features, slot = int(rows.features[row]), int(rows.slots[row])
        record = rows.records[slot]
        counts, recent = rows.memory.counts[slot], rows.memory.recent[slot]
        if features & RowFeature.STARTS and features & RowFeature.PENALTIES:
            counts.zero_()
        start, end = chunks.starts[chunk : chunk + 2].tolist()
        tokens = chunks.token_ids[start:end]
        position = int(rows.positions[row]) - (end - start)
        if chunks.cached is not None and features & RowFeature.STARTS:
            tokens = torch.cat((chunks.cached.first(chunk, position), tokens))
            position = 0
        in_prompt = max(int(record[Header.PROMPT_LENGTH]) - position, 0)
        if features & RowFeature.PENALTIES:
            prompt, generated = tokens[:in_prompt], tokens[in_prompt:]
            counts[prompt] = counts[prompt] | PROMPT_TOKEN
            counts.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
        if features & RowFeature.BAD_WORDS:
            last = tokens[-WINDOW:]
            positions = torch.arange(len(tokens), device=tokens.device)[-WINDOW:] + position
            recent[positions % WINDOW] = last.int()


@op(gpu="sampling.triton_logits")
def process_logits(logits: Tensor, rows: ProcessingRows, out: Tensor, kept: Tensor) -> Tensor:
    """Penalise, bias and ban.

    Args:
        logits: `[rows, vocabulary]`, any float dtype.
        rows: what each row asks for.
        out: float32 `[rows or more, vocabulary]`, written.
        kept: `[rows or more, vocabulary]`, dtype of the logits, written with the logits of
            constrained rows as they were.

    Returns:
        the rows of `out`.
    """
    processed = out[: len(logits)]
    processed.copy_(logits)
    constrained = (rows.features & RowFeature.CONSTRAINED) != 0
    kept[: len(logits)][constrained] = logits[constrained]
    for row, features in enumerate(rows.features.tolist()):
        slot, drafts = int(rows.slots[row]), rows.drafts_before(row)
        record, position = rows.records[slot], int(rows.positions[row])
        if features & RowFeature.PENALTIES:
            ones = torch.ones_like(drafts, dtype=torch.int32)
            counts = rows.memory.counts[slot].index_add(0, drafts, ones)
            _penalise(processed[row], counts, record)
        if features & RowFeature.EDITS:
            count = int(record[Header.NUM_EDITS])
            edits = record[HEADER : HEADER + count * EDIT_WORDS].view(-1, EDIT_WORDS)
            due = edits[position < edits[:, 2]]
            values = due[:, 1].contiguous().view(torch.float32)
            processed[row].index_add_(0, due[:, 0].long(), values)
        if features & RowFeature.BAD_WORDS:
            banned = _banned(record, rows.memory.recent[slot], position, drafts)
            processed[row, banned] = -torch.inf
    return processed


@op(gpu="sampling.triton_logits")
def count_tokens(tokens: Tensor, rows: ProcessingRows) -> None:
    """Count the sampled tokens, int64 `[rows]`, of the rows that produce one which their request
    gets; a constrained row's is none yet, and -1 is none."""
    slots, length = rows.slots, rows.memory.recent.size(1)
    is_final = RowFeature.PRODUCES | RowFeature.CONSTRAINED
    produces = ((rows.features & is_final) == RowFeature.PRODUCES) & (tokens >= 0)
    if rows.drafts is not None:
        produces &= rows.drafts.is_yielded()[: len(tokens)]
    counted = produces & ((rows.features & RowFeature.PENALTIES) != 0)
    ones = torch.ones_like(tokens[counted], dtype=torch.int32)
    rows.memory.counts.index_put_((slots[counted], tokens[counted]), ones, accumulate=True)
    kept = produces & ((rows.features & RowFeature.BAD_WORDS) != 0)
    place = (rows.positions[kept] % length).long()
    rows.memory.recent[slots[kept], place] = tokens[kept].int()


def _penalise(logits: Tensor, counts: Tensor, record: Tensor) -> None:
    words = (Header.FREQUENCY, Header.PRESENCE, Header.REPETITION)
    frequency, presence, repetition = record.view(torch.float32)[list(words)]
    seen = counts != 0
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(seen, penalised, logits))
    generated = counts & (PROMPT_TOKEN - 1)
    logits.sub_(frequency * generated + presence * (generated > 0))


def _banned(record: Tensor, recent: Tensor, position: int, drafts: Tensor) -> Tensor:
    """Last tokens of the bad words whose other tokens were generated just before `position`."""
    edits, count = int(record[Header.NUM_EDITS]), int(record[Header.NUM_BAD_WORDS])
    generated = position - int(record[Header.PROMPT_LENGTH])
    start = HEADER + edits * EDIT_WORDS
    words = record[start : start + count * WINDOW].view(-1, WINDOW)
    back = torch.arange(WINDOW - 1, 0, -1, device=record.device)
    before = recent[(position - back) % WINDOW]
    if len(drafts):
        near = min(len(drafts), WINDOW - 1)
        before[-near:] = drafts[-near:].int()
    before = torch.where(back <= generated, before, NO_TOKEN - 1)
    prefix = words[:, :-1]
    matches = ((prefix == NO_TOKEN) | (prefix == before)).all(dim=1)
    return words[matches, -1].long()
