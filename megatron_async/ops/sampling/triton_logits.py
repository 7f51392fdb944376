"""`ops/sampling/logits_processing.py` as kernels, for a captured step: a row's parameters are read
on the device, and programs of a row without such parameters end at once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.op import promising
from megatron_async.ops.sampling.logits_processing import (
    ChunkTensors,
    ProcessingRows,
    begin_chunks,
    count_tokens,
    process_logits,
)
from megatron_async.ops.sampling.slot_records import (
    EDIT_WORDS,
    HEADER,
    MAX_BAD_WORDS,
    MAX_EDITS,
    NO_TOKEN,
    PROMPT_TOKEN,
    WINDOW,
    Header,
    RowFeature,
)
from megatron_async.ops.sampling.tile_scores import float_of, record_of

TILE = 2048
"""Tokens of the vocabulary of one program."""
CHUNK_TILE = 1024
"""Tokens of a chunk, of one program at a time."""
CACHED_PROGRAMS = 16
"""Fewest programs of a chunk whose row may begin after cached tokens: only the device knows how
many these are. 100,000 tokens are 7 tiles for each program."""
ROW_TILE = 128

PENALTIES = tl.constexpr(int(RowFeature.PENALTIES))
EDITS = tl.constexpr(int(RowFeature.EDITS))
BAD_WORDS = tl.constexpr(int(RowFeature.BAD_WORDS))
PRODUCES = tl.constexpr(int(RowFeature.PRODUCES))
STARTS = tl.constexpr(int(RowFeature.STARTS))
CONSTRAINED = tl.constexpr(int(RowFeature.CONSTRAINED))
IN_PROMPT = tl.constexpr(PROMPT_TOKEN)
FREQUENCY = tl.constexpr(int(Header.FREQUENCY))
PRESENCE = tl.constexpr(int(Header.PRESENCE))
REPETITION = tl.constexpr(int(Header.REPETITION))
PROMPT_LENGTH = tl.constexpr(int(Header.PROMPT_LENGTH))
NUM_EDITS = tl.constexpr(int(Header.NUM_EDITS))
NUM_BAD_WORDS = tl.constexpr(int(Header.NUM_BAD_WORDS))
HEAD = tl.constexpr(HEADER)
EDIT = tl.constexpr(EDIT_WORDS)
LONGEST = tl.constexpr(WINDOW)
NOTHING = tl.constexpr(NO_TOKEN)


@begin_chunks.gpu
@promising("invariant")
def begin_chunks_gpu(rows: ProcessingRows, chunks: ChunkTensors) -> None:
    counts, recent, cached = rows.memory.counts, rows.memory.recent, chunks.cached
    vocab, programs = counts.size(1), triton.cdiv(chunks.max_query_length, CHUNK_TILE)
    tables = tokens = chunks.starts  # any tensors, where there are none
    if cached is not None:
        tables, tokens = cached.block_tables, cached.block_tokens
        programs = max(programs, CACHED_PROGRAMS)
    _reset_counts[(chunks.count, triton.cdiv(vocab, TILE))](
        rows.features, rows.slots, chunks.first_row, counts, vocab, TILE
    )
    _count_chunks[(chunks.count, programs)](
        rows.features, rows.slots, rows.positions, chunks.first_row,
        chunks.starts, chunks.token_ids, rows.records, counts, vocab, recent,
        tables, tables.stride(0), tokens, 1 if cached is None else tokens.size(1),
        cached is not None, CHUNK_TILE,
    )  # fmt: skip


@process_logits.gpu
@promising("invariant")
def process_logits_gpu(logits: Tensor, rows: ProcessingRows, out: Tensor, kept: Tensor) -> Tensor:
    """Elements of a row of `logits` must be adjacent, `out`, `kept` and `rows.records`
    contiguous."""
    count, vocab = logits.shape
    processed = out[:count]
    drafts = _drafts(rows)
    _process[(triton.cdiv(vocab, TILE), count)](
        logits, logits.stride(0), processed, kept, vocab,
        rows.features, rows.slots, rows.records, rows.memory.counts, *drafts, TILE,
    )  # fmt: skip
    _edit[(count,)](
        processed, vocab, rows.features, rows.slots, rows.positions,
        rows.records, rows.memory.recent, *drafts, MAX_EDITS, MAX_BAD_WORDS,
    )  # fmt: skip
    return processed


@count_tokens.gpu
@promising("invariant")
def count_tokens_gpu(tokens: Tensor, rows: ProcessingRows) -> None:
    count, drafts = tokens.numel(), rows.drafts
    ring = rows.slots if drafts is None else drafts.yielded
    _count_tokens[(triton.cdiv(count, ROW_TILE),)](
        tokens, count, rows.features, rows.slots, rows.positions,
        rows.memory.counts, rows.memory.counts.size(1), rows.memory.recent,
        ring, ring.stride(0), 1 if drafts is None else ring.size(2),
        ring if drafts is None else drafts.entry,
        0 if drafts is None else drafts.decode_rows, 1 if drafts is None else drafts.width,
        ROW_TILE,
    )  # fmt: skip


def _drafts(rows: ProcessingRows) -> tuple[Tensor, int, int]:
    """Token ids, decode rows and width, for kernels that look at drafts where width is above 1."""
    drafts = rows.drafts
    return (rows.slots, 0, 1) if drafts is None else (
        drafts.token_ids, drafts.decode_rows, drafts.width
    )  # fmt: skip


# ---- Kernels ---------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first_row"])
def _reset_counts(
    features: tl.tensor,
    slots: tl.tensor,
    first_row: tl.tensor,
    counts: tl.tensor,
    vocab: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    row = first_row + tl.program_id(0)
    asked = tl.load(features + row)
    if ((asked & STARTS) != 0) & ((asked & PENALTIES) != 0):
        token = tl.program_id(1) * tile + tl.arange(0, tile)
        zero = tl.zeros((tile,), tl.int32)
        tl.store(counts + tl.load(slots + row) * vocab + token, zero, mask=token < vocab)


@triton.jit(do_not_specialize=["first_row", "table_stride"])
def _count_chunks(
    features: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    first_row: tl.tensor,
    starts: tl.tensor,
    token_ids: tl.tensor,
    records: tl.tensor,
    counts: tl.tensor,
    vocab: tl.constexpr,
    recent: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    block_tokens: tl.tensor,
    block_size: tl.constexpr,
    has_cached: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    row = first_row + chunk
    asked = tl.load(features + row)
    if (asked & (PENALTIES | BAD_WORDS)) != 0:
        start, end = tl.load(starts + chunk), tl.load(starts + chunk + 1)
        slot, length = tl.load(slots + row), tl.load(positions + row)
        prompt_length = tl.load(record_of(records, slots, row) + PROMPT_LENGTH)
        begins = length - (end - start)  # position of the chunk's first token
        first = begins
        if has_cached:
            first = tl.where((asked & STARTS) != 0, 0, begins)
        first += tl.program_id(1) * tile
        while first < length:
            position = first + tl.arange(0, tile)
            inside = position < length
            given = inside & (position >= begins)
            token = tl.load(token_ids + start - begins + position, mask=given, other=0)
            if has_cached:
                skipped = inside & (position < begins)
                entry = tables + chunk.to(tl.int64) * table_stride + position // block_size
                block = tl.load(entry, mask=skipped, other=0).to(tl.int64)
                kept = block_tokens + block * block_size + position % block_size
                token += tl.load(kept, mask=skipped, other=0)
            in_prompt = position < prompt_length
            if (asked & PENALTIES) != 0:
                # A token may be there many times, in the prompt and in what was generated.
                place = counts + slot * vocab + token
                tl.atomic_or(place, IN_PROMPT, mask=inside & in_prompt, sem="relaxed")
                tl.atomic_add(place, 1, mask=inside & (in_prompt == 0), sem="relaxed")
            if (asked & BAD_WORDS) != 0:
                last = inside & (position >= length - LONGEST)
                window = recent + slot * LONGEST + position % LONGEST
                tl.store(window, token.to(tl.int32), mask=last)
            first += tl.num_programs(1) * tile


@triton.jit(do_not_specialize=["decode_rows"])
def _process(
    logits: tl.tensor,
    row_stride: tl.tensor,
    processed: tl.tensor,
    kept: tl.tensor,
    vocab: tl.constexpr,
    features: tl.tensor,
    slots: tl.tensor,
    records: tl.tensor,
    counts: tl.tensor,
    token_ids: tl.tensor,
    decode_rows: tl.tensor,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = token < vocab
    given = tl.load(logits + row * row_stride + token, mask=inside, other=0)
    logit = given.to(tl.float32)
    asked = tl.load(features + row)
    if (asked & CONSTRAINED) != 0:
        tl.store(kept + row * vocab + token, given, mask=inside)
    if (asked & PENALTIES) != 0:
        slot = tl.load(slots + row)
        record = record_of(records, slots, row)
        frequency, presence = float_of(record, FREQUENCY), float_of(record, PRESENCE)
        repetition = float_of(record, REPETITION)
        seen = tl.load(counts + slot * vocab + token, mask=inside, other=0)
        if width > 1:
            for draft in tl.static_range(1, width):
                precedes = (draft <= row % width) & (row < decode_rows * width)
                drafted = tl.load(token_ids + row - row % width + draft, mask=precedes, other=-1)
                seen += tl.where(token == drafted, 1, 0)
        penalised = tl.where(logit > 0, logit / repetition, logit * repetition)
        logit = tl.where(seen != 0, penalised, logit)
        generated = seen & (IN_PROMPT - 1)
        logit -= frequency * generated + presence * (generated > 0)
    tl.store(processed + row * vocab + token, logit, mask=inside)


@triton.jit(do_not_specialize=["decode_rows"])
def _edit(
    processed: tl.tensor,
    vocab: tl.constexpr,
    features: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    records: tl.tensor,
    recent: tl.tensor,
    token_ids: tl.tensor,
    decode_rows: tl.tensor,
    width: tl.constexpr,
    most_edits: tl.constexpr,
    most_words: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    asked = tl.load(features + row)
    if (asked & (EDITS | BAD_WORDS)) != 0:
        slot, position = tl.load(slots + row), tl.load(positions + row)
        record = record_of(records, slots, row)
        edits = tl.load(record + NUM_EDITS)
        logits = processed + row * vocab
        # Additions only, and atomic: a token may be edited twice and banned too.
        if (asked & EDITS) != 0:
            edit = tl.arange(0, most_edits)
            exists = edit < edits
            given = record + HEAD + edit * EDIT
            value = tl.load(given + 1, mask=exists, other=0).to(tl.float32, bitcast=True)
            due = exists & (position < tl.load(given + 2, mask=exists, other=0))
            token = tl.load(given, mask=exists, other=0)
            tl.atomic_add(logits + token, value, mask=due, sem="relaxed")
        if (asked & BAD_WORDS) != 0:
            word, column = tl.arange(0, most_words), tl.arange(0, LONGEST)
            exists = word < tl.load(record + NUM_BAD_WORDS)
            words = record + HEAD + edits * EDIT + word * LONGEST
            back = LONGEST - 1 - column
            place = (position - back + LONGEST) % LONGEST
            generated = position - tl.load(record + PROMPT_LENGTH)
            before = tl.load(recent + slot * LONGEST + place)
            if width > 1:
                drafts = tl.where(row < decode_rows * width, row % width, 0)
                is_draft = (back > 0) & (back <= drafts)
                near = tl.load(token_ids + row + 1 - back, mask=is_draft, other=0)
                before = tl.where(is_draft, near.to(tl.int32), before)
            before = tl.where(back <= generated, before, NOTHING - 1)
            wanted = tl.load(words[:, None] + column[None, :], mask=exists[:, None], other=NOTHING)
            fits = (wanted == NOTHING) | (wanted == before[None, :]) | (back == 0)[None, :]
            matches = exists & (tl.sum(fits.to(tl.int32), axis=1) == LONGEST)
            banned = tl.load(words + LONGEST - 1, mask=exists, other=0)
            minus = tl.full((most_words,), float("-inf"), tl.float32)
            tl.atomic_add(logits + banned, minus, mask=matches, sem="relaxed")


@triton.jit(do_not_specialize=["count", "ring_stride", "decode_rows"])
def _count_tokens(
    tokens: tl.tensor,
    count: tl.tensor,
    features: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    counts: tl.tensor,
    vocab: tl.constexpr,
    recent: tl.tensor,
    ring: tl.tensor,
    ring_stride: tl.tensor,
    row_words: tl.constexpr,
    entry: tl.tensor,
    decode_rows: tl.tensor,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = row < count
    asked = tl.load(features + row, mask=inside, other=0)
    token = tl.load(tokens + row, mask=inside, other=0)
    produces = ((asked & (PRODUCES | CONSTRAINED)) == PRODUCES) & (token >= 0)
    if width > 1:
        decodes = row < decode_rows * width
        owner = tl.where(decodes, row // width, row - decode_rows * (width - 1))
        found = ring + tl.load(entry).to(tl.int64) * ring_stride + owner * row_words
        yields = tl.load(found, mask=inside, other=0)
        produces = produces & (tl.where(decodes, row % width, 0) < yields)
    slot = tl.load(slots + row, mask=inside, other=0)
    counted = produces & ((asked & PENALTIES) != 0)
    place = counts + slot * vocab + token
    if width > 1:  # several tokens of a slot may be equal
        tl.atomic_add(place, 1, mask=counted, sem="relaxed")
    else:
        tl.store(place, tl.load(place, mask=counted, other=0) + 1, mask=counted)
    kept = produces & ((asked & BAD_WORDS) != 0)
    position = tl.load(positions + row, mask=inside, other=0)
    tl.store(recent + slot * LONGEST + position % LONGEST, token.to(tl.int32), mask=kept)
