"""Cases of the ops beside a draft model: of the tokens it processes, their hidden states, and its
drafts."""

from __future__ import annotations

import random

import torch

from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.drafting.draft_tokens import DraftedStep, lay_out_draft, lay_out_entries
from megatron_async.ops.drafting.hidden_states import gather_hidden, keep_hidden
from megatron_async.ops.drafting.store_drafts import store_drafts
from megatron_async.ops.sampling.slot_records import RECORD_WORDS, Header, RowFeature
from megatron_async.ops.step_tensors import StepTensors
from tests.unit_tests.ops.cases import Arguments, Axes, Numbers, grid

SLOTS, BLOCKS_A_ROW = 14, 9
"""Slots, the last of which is the dummy slot."""


def drafted_step(
    at: Numbers, width: int, block_size: int, decode: int, chunks: int, dummies: int
) -> DraftedStep:
    """A step of random rows, as it stands behind sampling, with dummies of both kinds."""
    chooser = random.Random(int(torch.randint(2**31, ())))
    dummy_block, most = SLOTS * BLOCKS_A_ROW, BLOCKS_A_ROW * block_size
    lengths = torch.ones(SLOTS, dtype=torch.int32)
    records = torch.zeros(SLOTS, RECORD_WORDS, dtype=torch.int32)
    tables = torch.arange(dummy_block, dtype=torch.int32).view(SLOTS, BLOCKS_A_ROW)
    tables[-1] = dummy_block
    slots = chooser.sample(range(SLOTS - 1), decode + chunks)
    queries = [1 + 5 * chunk % min(4 * block_size, 7) for chunk in range(chunks)]
    limits = [chooser.randint(max(query + 1, 3), most) for query in [0] * decode + queries]
    records[slots, Header.MAX_LENGTH] = torch.tensor(limits, dtype=torch.int32)
    before = [chooser.randint(1, limit) for limit in limits[:decode]]
    for slot, length, limit in zip(slots, before, limits):
        lengths[slot] = length + min(chooser.randint(0, width), limit - length)
    ends = [chooser.randint(*bounds) for bounds in zip(queries, [n - 1 for n in limits[decode:]])]
    lengths[slots[decode:]] = torch.tensor(ends, dtype=torch.int32) + 1
    empty = dummies if chunks else 0
    dims = BatchDimensions(
        decode + dummies, width, is_captured=True, padded_prefill_rows=chunks + empty,
        padded_prefill_tokens=sum(queries) + empty,
    )  # fmt: skip
    device = torch.device(at.device)
    step = StepTensors.empty(40, 2000, BLOCKS_A_ROW, device, 200).head(dims)
    owners = [*slots[:decode], *[SLOTS - 1] * dummies, *slots[decode:], *[SLOTS - 1] * empty]
    step.row_slots.copy_(torch.tensor(owners))
    step.lengths.copy_(torch.tensor([*before, *[1] * dummies, *ends, *[0] * empty]))
    step.block_tables.copy_(tables[owners])
    if chunks:
        starts = torch.tensor([0, *queries, *[0] * empty]).cumsum(0)
        step.prefill_starts.copy_(starts + dims.decode_tokens)
    kinds = [0, RowFeature.PRODUCES, RowFeature.PRODUCES | RowFeature.REPEATS]
    features = [int(RowFeature.PRODUCES)] * dims.decode_tokens
    features += [int(chooser.choice(kinds)) for _ in ends]
    step.features.copy_(torch.tensor(features + [0] * empty))
    step.token_ids.random_(1000)
    return DraftedStep(step, dims, records.to(device), lengths.to(device), dummy_block, block_size)


def entry_arguments(at: Numbers, *sizes: int, **named: int) -> Arguments:
    """Arguments of `lay_out_entries`."""
    of = drafted_step(at, *sizes, **named)
    return of, torch.randint(-1, 1000, (of.dims.sample_rows,), device=at.device)


def draft_arguments(at: Numbers, number: int, **sizes: int) -> Arguments:
    """Arguments of `lay_out_draft`."""
    of, sampled = entry_arguments(at, **sizes)
    tokens = torch.randint(-1, 1000, (of.dims.rows,), device=at.device)
    return of, lay_out_entries.reference(of, sampled), tokens, number


def keep_arguments(at: Numbers, size: int) -> Arguments:
    """Arguments of `keep_hidden`, of which no two tokens are kept for one block of four places."""
    places = torch.randperm(40, device=at.device)
    ends = (places % 4 == 3).nonzero()[:, 0]
    ends = torch.cat((ends[:1], ends[:1], ends[4:6]))
    # Two that end a chunk are not the last of their blocks, but the last that the step writes.
    places[ends[2:]] = places[ends[2:]] // 4 * 4 + 44
    places[(places == 0).nonzero()] = 99  # of no request, the last of its block
    return at.rows(40, size), places, ends, 4, at.rows(25, size)


def gather_arguments(at: Numbers, size: int) -> Arguments:
    """Arguments of `gather_hidden`."""
    source = torch.randint(-11, 40, (60,), device=at.device)
    return at.rows(40, size), at.rows(11, size), source


def store_arguments(at: Numbers, rows: int, count: int) -> Arguments:
    """Arguments of `store_drafts`, in the second of three entries of the rings."""
    slots = torch.randperm(rows + 20, device=at.device)[:rows]
    drafts = torch.randint(-1, 50, (rows, count), device=at.device)
    by_slot = torch.full((rows + 20, count), -9, device=at.device)
    rings = torch.full((2, 3, rows + 5, count + 7), -9, dtype=torch.int32, device=at.device)
    return drafts, slots, torch.ones_like(rings[0, 0, 0, :1]), by_slot, rings[0], rings[1], 6


STEPS: Axes = {
    "width block_size": [(1, 16), (2, 1), (4, 3)],
    "decode chunks dummies": [(5, 3, 1), (6, 0, 0), (0, 4, 2), (1, 8, 0)],
}
CASES = [
    *grid(lay_out_entries, entry_arguments, STEPS),
    *grid(lay_out_draft, draft_arguments, {"number": [1, 2], **STEPS}),
    *grid(keep_hidden, keep_arguments, {"size": [16, 3000]}),
    *grid(gather_hidden, gather_arguments, {"size": [16, 3000]}),
    *grid(store_drafts, store_arguments, {"rows count": [(70, 3), (1, 1)]}),
]
