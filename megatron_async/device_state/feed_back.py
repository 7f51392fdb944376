"""Last work of a step: store its samples for the next step and for the host.

The samples are stored twice: in a ring on the device, for later kernels, copies and pipeline
stages, and in a ring in host memory, which a GPU writes over the bus. So a step that has no log
probs needs no copy of its samples (docs/records/whole_steps.md, "A step without copies").

A decode row yields its samples up to and including the first that differs from the draft after it.
Each of these was drawn from the logits and with the noise of plain decoding at its position. So the
tokens are those of plain decoding, whatever was drafted. (There is no rejection sampling: the
sampler is Gumbel-max with noise by seed and position, `ops/sampling/sampling.py`.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.device_state.bookkeeping_layout import COUNT, LENGTH, TOKENS, BookkeepingLayout
from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.sampling.slot_records import RECORD_WORDS, Header

if TYPE_CHECKING:
    from megatron_async.device_state.device_slots import DeviceSlots
    from megatron_async.ops.batch_dimensions import BatchDimensions
    from megatron_async.ops.step_tensors import StepTensors

TILE = 128
WORDS = tl.constexpr(RECORD_WORDS)
MAX_LENGTH = tl.constexpr(int(Header.MAX_LENGTH))
DRAFTS = tl.constexpr(int(Header.DRAFTS))
COUNT_WORD, LENGTH_WORD, TOKENS_WORD = map(tl.constexpr, (COUNT, LENGTH, TOKENS))


def feed_back_kernel(
    sampled: Tensor,
    step: StepTensors,
    dims: BatchDimensions,
    words: Tensor,
    slots: DeviceSlots,
    ring: Tensor,
    host: Tensor,
    next_entry: Tensor,
) -> None:
    """Store what each row yields by slot and in the sample rings, then move the rings on: by a
    Triton kernel.

    A prefill chunk that is not its prompt's last stores a meaningless token. The next chunk
    overwrites it before a decode row could read it.

    Args:
        sampled: int64 `[sample rows]`; -1 where there is no token: the ring has this -1 for the
            host, and the next step, which may be in flight already, gets token 0.
        step: the step, as it was unpacked.
        dims: its shape.
        words: int32 `[ring, words]`: bookkeeping, for the width that the plan gave decode rows.
        slots: changed: `last_token` and `length` of the rows' slots.
        ring: int32 `[entries, max rows, ring_words]`, changed in the step's entry.
        host: as `ring`, host memory that the device may write.
        next_entry: int32 `[1]`, written: the entry after the step's, a number on the device because
            a graph's addresses are fixed.
    """
    _feed_back_kernel[(triton.cdiv(dims.rows, TILE),)](
        sampled,
        step.row_slots,
        step.lengths,
        step.token_ids,
        words,
        words.stride(0),
        BookkeepingLayout.for_batch(dims, 0).start("decode_width"),
        slots.records,
        slots.last_token,
        slots.length,
        len(slots.last_token) - 1,
        ring,
        host,
        ring.stride(0),
        len(ring),
        step.entry,
        next_entry,
        dims.decode_rows,
        dims.rows,
        ring.size(2),
        dims.width,
        TILE,
        **launch_options(sampled),
    )


def feed_back_reference(
    sampled: Tensor,
    step: StepTensors,
    dims: BatchDimensions,
    words: Tensor,
    slots: DeviceSlots,
    ring: Tensor,
    host: Tensor,
    next_entry: Tensor,
) -> None:
    """`feed_back_kernel` in plain torch: for the CPU, and what the kernel is tested against."""
    rows, decode, width = dims.rows, dims.decode_rows, dims.width
    table = sampled[:, None]
    if width > 1:
        table = torch.zeros(rows, width, dtype=torch.int64, device=sampled.device)
        table[:decode] = sampled[: dims.decode_tokens].view(decode, width)
        table[decode:, 0] = sampled[dims.decode_tokens :]
    count = torch.ones(rows, dtype=torch.int64, device=sampled.device)
    length = step.lengths + 1
    if decode:
        owners = step.row_slots[:decode]
        limits = slots.records[:, Header.MAX_LENGTH].index_select(0, owners)
        most = limits - step.lengths[:decode]
        if width > 1:
            own = 1 + slots.records[:, Header.DRAFTS].index_select(0, owners)
            field = BookkeepingLayout.for_batch(dims, 0).start("decode_width")
            allowed = words[:, field].index_select(0, step.entry.long()).expand(decode)
            most = torch.minimum(most, torch.minimum(own, allowed))
            drafts = step.token_ids[: dims.decode_tokens].view(decode, width)[:, 1:]
            agreed = (drafts == table[:decode, :-1]).int().cumprod(dim=1).sum(dim=1)
            most = torch.minimum(1 + agreed, most)
        count[:decode] = most.clamp(0, width)
        length[:decode] = step.lengths[:decode] + count[:decode]
    is_real = step.row_slots < len(slots.last_token) - 1
    length = torch.where(is_real, length, 1).to(torch.int32)
    last = sampled.clamp(min=0)
    if width > 1:
        last = table.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0].clamp(min=0)
    kept = slots.last_token.index_select(0, step.row_slots)
    slots.last_token.index_copy_(0, step.row_slots, torch.where(is_real & (count > 0), last, kept))
    slots.length.index_copy_(0, step.row_slots, length)
    found = torch.cat((count[:, None], length[:, None], table), dim=1).int()
    for samples in (ring, host):
        place = samples[:, :rows, : TOKENS + width]
        place.index_copy_(0, step.entry.long(), found[None])
    next_entry.copy_((step.entry + 1) % len(ring))


@triton.jit(
    do_not_specialize=[
        "words_stride",
        "width_field",
        "dummy_slot",
        "ring_stride",
        "entries",
        "decode_rows",
        "rows",
    ]
)
def _feed_back_kernel(
    sampled: tl.tensor,
    row_slots: tl.tensor,
    row_lengths: tl.tensor,
    token_ids: tl.tensor,
    words: tl.tensor,
    words_stride: tl.tensor,
    width_field: tl.tensor,
    records: tl.tensor,
    last_token: tl.tensor,
    lengths: tl.tensor,
    dummy_slot: tl.tensor,
    ring: tl.tensor,
    host: tl.tensor,
    ring_stride: tl.tensor,
    entries: tl.tensor,
    entry: tl.tensor,
    next_entry: tl.tensor,
    decode_rows: tl.tensor,
    rows: tl.tensor,
    row_words: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = row < rows
    decodes = row < decode_rows
    first = tl.where(decodes, row * width, row + decode_rows * (width - 1))
    current = tl.load(entry)
    slot = tl.load(row_slots + row, inside, other=0)
    length = tl.load(row_lengths + row, inside, other=0)
    record = records + slot * WORDS
    room = tl.load(record + MAX_LENGTH, inside, other=0) - length
    token = tl.load(sampled + first, inside, other=0)
    place = current.to(tl.int64) * ring_stride + row * row_words
    found, told = ring + place, host + place
    tl.store(found + TOKENS_WORD, token.to(tl.int32), inside)
    tl.store(told + TOKENS_WORD, token.to(tl.int32), inside)
    count = tl.where((room > 0) | (row >= decode_rows), 1, 0)
    last = token
    if width > 1:
        allowed = tl.load(words + current.to(tl.int64) * words_stride + width_field)
        allowed = tl.minimum(allowed, 1 + tl.load(record + DRAFTS, inside, other=0))
        agrees = decodes & (count > 0)
        for query in tl.static_range(1, width):
            wide = inside & decodes
            draft = tl.load(token_ids + first + query, wide, other=-2)
            agrees = agrees & (draft == token) & (query < allowed) & (query < room)
            token = tl.load(sampled + first + query, wide, other=0)
            tl.store(found + TOKENS_WORD + query, token.to(tl.int32), wide)
            tl.store(told + TOKENS_WORD + query, token.to(tl.int32), wide)
            last = tl.where(agrees, token, last)
            count += tl.where(agrees, 1, 0)
    is_real = inside & (slot < dummy_slot)
    length += tl.where(decodes, count, 1)
    tl.store(lengths + slot, length, is_real)
    tl.store(last_token + slot, tl.maximum(last, 0), is_real & (count > 0))
    length = tl.where(slot < dummy_slot, length, 1)
    tl.store(found + COUNT_WORD, count, inside)
    tl.store(told + COUNT_WORD, count, inside)
    tl.store(found + LENGTH_WORD, length, inside)
    tl.store(told + LENGTH_WORD, length, inside)
    if tl.program_id(0) == 0:
        tl.store(next_entry, (current + 1) % entries)
