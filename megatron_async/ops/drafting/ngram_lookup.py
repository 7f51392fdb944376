"""Prompt lookup: the tokens that followed an earlier occurrence of a sequence's last tokens.

A sequence's tokens are stored by block beside its keys (`PagedKVCache.block_tokens`), except the
last token, which is stored by slot. No state is kept between steps, so none can be stale: each step
searches the sequence again. This reads 4 bytes a token; attention reads hundreds.

The idea is Saxena's "Prompt Lookup Decoding" (2023). Matches of one token are not used: fewer than
half of them are right.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.op import op, promising
from megatron_async.ops.sampling.slot_records import RECORD_WORDS, Header

LONGEST = 4
"""Most tokens of a match: a longer match is not preferred."""
SHORTEST = 2
"""Fewest tokens of a match."""
SEARCHED = 16384
"""Tokens before the last one that are searched. This limits the cost of a step's lookup: 64 KiB of
reads a row for any length of the sequence."""
TILE = 2048
"""Tokens that one program compares: a row's programs run side by side."""
WORDS = tl.constexpr(RECORD_WORDS)
DRAFTS = tl.constexpr(int(Header.DRAFTS))
PLACES = 1 << 27
"""More than the tokens of any sequence: a match's score is its length times this, plus its
position."""


@op
def ngram_drafts(
    block_tokens: Tensor,
    block_tables: Tensor,
    row_slots: Tensor,
    lengths: Tensor,
    last_token: Tensor,
    records: Tensor,
    count: int,
    searched: int = SEARCHED,
) -> Tensor:
    """Drafts for each row: the tokens after the longest match of its last tokens; of several
    matches of the same length, after the latest.

    A match may overlap the row's last tokens. Where its successors reach the end of the sequence,
    the drafts themselves continue them (as in LZ77, Ziv and Lempel 1977). So a text that repeats
    itself has all its drafts, even with a short period.

    Args:
        block_tokens: int32 `[blocks, block size]`.
        block_tables: int32 `[rows, blocks]`; rows may be strided.
        row_slots: int64 `[rows]`.
        lengths: int32 `[slots]`, tokens of the sequences, the last one included.
        last_token: int64 `[slots]`.
        records: int32 `[slots, RECORD_WORDS]`, of which `Header.DRAFTS` says how many drafts a row
            may have.
        count: drafts of a row.
        searched: tokens before the last one that are looked at.

    Returns:
        int64 `[rows, count]`; -1 where nothing was found, and beyond the drafts that a row may
            have.
    """
    block_size, rows = block_tokens.size(1), len(row_slots)
    last = lengths[row_slots].long() - 1
    places = torch.arange(int(last.max()) + 1 if rows else 1, device=last.device)
    blocks = block_tables[:, places // block_size].long()
    tokens = block_tokens.view(-1)[blocks * block_size + places % block_size].long()
    tokens.scatter_(1, last[:, None], last_token[row_slots][:, None])
    first = (last - searched).clamp(min=0)
    alive = (places >= first[:, None]) & (places < last[:, None])
    matched = torch.zeros_like(tokens)
    for back in range(LONGEST):
        wanted = tokens.gather(1, (last[:, None] - back).clamp(min=0))
        before = tokens.roll(back, dims=1)
        alive = alive & (places - back >= first[:, None]) & (before == wanted)
        matched += alive
    score = torch.where(matched >= SHORTEST, matched * PLACES + places, -1)
    best = score.max(dim=1).values
    start = (best % PLACES)[:, None] + 1
    draft = torch.arange(count, device=last.device)
    period = (last[:, None] - start + 1).clamp(min=1)
    found = tokens.gather(1, (start + draft % period).clamp(max=len(places) - 1))
    allowed = records[:, Header.DRAFTS].index_select(0, row_slots)[:, None]
    return torch.where((best[:, None] >= 0) & (draft < allowed), found, -1)


@ngram_drafts.gpu
@promising("invariant")
def ngram_drafts_gpu(
    block_tokens: Tensor,
    block_tables: Tensor,
    row_slots: Tensor,
    lengths: Tensor,
    last_token: Tensor,
    records: Tensor,
    count: int,
    searched: int = SEARCHED,
) -> Tensor:
    (rows, blocks), stride = block_tables.shape, block_tables.stride(0)
    block_size = block_tokens.size(1)
    parts = max(triton.cdiv(min(searched, blocks * block_size), TILE), 1)
    best = torch.empty(rows, parts, dtype=torch.int32, device=block_tokens.device)
    drafts = torch.empty(rows, count, dtype=torch.int64, device=block_tokens.device)
    sequence = (block_tokens, block_tables, row_slots, lengths, last_token, records)
    options = launch_options(block_tokens)
    _match_kernel[(rows, parts)](
        *sequence, best, stride, parts, searched, block_size, LONGEST, SHORTEST, PLACES, TILE,
        **options,
    )  # fmt: skip
    _copy_kernel[(rows,)](
        *sequence, best, drafts, stride, parts, count, block_size, PLACES,
        triton.next_power_of_2(parts), triton.next_power_of_2(count), **options,
    )  # fmt: skip
    return drafts


@triton.jit
def _token(
    block_tokens: tl.tensor, table: tl.tensor, place: tl.tensor, exists: tl.tensor,
    block_size: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Tokens of a sequence at these places; -1 where there is none."""
    block = tl.load(table + place // block_size, exists, other=0).to(tl.int64)
    return tl.load(block_tokens + block * block_size + place % block_size, exists, other=-1)


@triton.jit(do_not_specialize=["table_stride", "parts", "searched"])
def _match_kernel(
    block_tokens: tl.tensor,
    block_tables: tl.tensor,
    row_slots: tl.tensor,
    lengths: tl.tensor,
    last_token: tl.tensor,
    records: tl.tensor,
    best: tl.tensor,
    table_stride: tl.tensor,
    parts: tl.tensor,
    searched: tl.tensor,
    block_size: tl.constexpr,
    longest: tl.constexpr,
    shortest: tl.constexpr,
    places: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(row_slots + row)
    last = tl.load(lengths + slot) - 1
    allowed = tl.load(records + slot * WORDS + DRAFTS)
    first = tl.maximum(last - searched, 0)
    begin = first + part * tile
    found = tl.full((), -1, tl.int32)
    if (begin < last) & (allowed > 0):
        table = block_tables + row.to(tl.int64) * table_stride
        place = begin + tl.arange(0, tile)
        alive = tl.full((tile,), 1, tl.int1)
        matched = tl.zeros((tile,), tl.int32)
        for back in tl.static_range(longest):
            if back == 0:
                wanted = tl.load(last_token + slot).to(tl.int32)
            else:
                wanted = _token(block_tokens, table, last - back, last - back >= first, block_size)
            inside = (place < last) & (place - back >= first)
            token = _token(block_tokens, table, place - back, inside, block_size)
            alive = alive & inside & (token == wanted)
            matched += alive.to(tl.int32)
        found = tl.max(tl.where(matched >= shortest, matched * places + place, -1))
    tl.store(best + row * parts + part, found)


@triton.jit(do_not_specialize=["table_stride", "parts", "count"])
def _copy_kernel(
    block_tokens: tl.tensor,
    block_tables: tl.tensor,
    row_slots: tl.tensor,
    lengths: tl.tensor,
    last_token: tl.tensor,
    records: tl.tensor,
    best: tl.tensor,
    drafts: tl.tensor,
    table_stride: tl.tensor,
    parts: tl.tensor,
    count: tl.tensor,
    block_size: tl.constexpr,
    places: tl.constexpr,
    parts_tile: tl.constexpr,
    drafts_tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    row = tl.program_id(0)
    slot = tl.load(row_slots + row)
    last = tl.load(lengths + slot) - 1
    allowed = tl.load(records + slot * WORDS + DRAFTS)
    part = tl.arange(0, parts_tile)
    score = tl.max(tl.load(best + row * parts + part, part < parts, other=-1))
    draft = tl.arange(0, drafts_tile)
    exists = (draft < tl.minimum(count, allowed)) & (score >= 0)
    start = tl.maximum(score, 0) % places + 1
    place = start + draft % tl.maximum(last - start + 1, 1)
    table = block_tables + row.to(tl.int64) * table_stride
    token = _token(block_tokens, table, place, exists & (place < last), block_size).to(tl.int64)
    token = tl.where(place == last, tl.load(last_token + slot), token)
    tl.store(drafts + row * count + draft, tl.where(exists, token, -1), draft < count)
