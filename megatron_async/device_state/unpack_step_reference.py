"""`device_state/unpack_step.py` in plain torch: for the CPU, and what the kernels are tested
against."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.device_state.bookkeeping_layout import BookkeepingLayout
from megatron_async.device_state.device_slots import DeviceSlots
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.sampling.slot_records import EDIT_WORDS, HEADER, WINDOW, Header, RowFeature
from megatron_async.ops.step_tensors import StepTensors


def unpack_step_reference(
    words: Tensor,
    next_entry: Tensor,
    dims: BatchDimensions,
    slots: DeviceSlots,
    block_size: int,
    out: StepTensors,
    lengths: Tensor | None = None,
    block_tokens: Tensor | None = None,
) -> None:
    """`unpack_step_kernels` in plain torch. It reads numbers back: for the CPU and for tests."""
    entry = int(next_entry)
    head = BookkeepingLayout.for_batch(dims, 0)
    updates = int(words[entry, head.start("num_block_updates")])
    fields = BookkeepingLayout.for_batch(dims, updates).views(words[entry])
    out.entry.fill_(entry)
    blocks = fields["block_update_blocks"]
    if updates and not ((blocks >= 0) & (blocks <= slots.block_table[-1, 0])).all():
        raise IndexError("a block that the KV cache does not have")
    slots.block_table.index_put_(
        (fields["block_update_slots"].long(), fields["block_update_indices"].long()),
        blocks,
    )
    out.row_slots.copy_(fields["row_slots"])
    out.block_tables.copy_(slots.block_table.index_select(0, out.row_slots))
    decode = dims.decode_rows
    for chunk, start in enumerate(fields["prefill_record"].tolist()):  # sync-ok: CPU
        if start >= 0:
            given = words[entry, start:]
            length = _record_words(given)
            slots.records[out.row_slots[decode + chunk], :length] = given[:length]
    if decode:
        _unpack_decode_rows(fields, dims, slots, block_size, out, lengths)
    if dims.prefill_rows:
        _unpack_chunks(fields, dims, slots, block_size, out)
    if block_tokens is not None:
        block_tokens.view(-1)[out.write_index] = out.token_ids.int()


def _unpack_decode_rows(
    fields: dict[str, Tensor],
    dims: BatchDimensions,
    slots: DeviceSlots,
    block_size: int,
    out: StepTensors,
    lengths: Tensor | None,
) -> None:
    rows, width, tokens = dims.decode_rows, dims.width, dims.decode_tokens
    owners = out.row_slots[:rows]
    length = slots.length.index_select(0, owners) if lengths is None else lengths
    limit = slots.records[:, Header.MAX_LENGTH].index_select(0, owners)
    features = slots.records[:, Header.FEATURES].index_select(0, owners)
    own = 1 + slots.records[:, Header.DRAFTS].index_select(0, owners)
    brought = torch.minimum(fields["decode_width"], own)
    out.lengths[:rows] = length
    out.kv_lengths[:rows] = torch.minimum(length - 1 + brought, limit - 1).clamp(min=1)
    query = torch.arange(width, device=owners.device)
    position = length[:, None] - 1 + query
    fed = (position >= 0) & (position < limit[:, None] - 1) & (query < brought[:, None])
    fed, position = fed.flatten(), position.where(fed, 0).flatten()
    out.features[:tokens] = features.repeat_interleave(width) | int(RowFeature.PRODUCES)
    out.last_token[:tokens] = torch.arange(tokens, device=owners.device)
    last = slots.last_token.index_select(0, owners)[:, None]
    drafts = slots.drafts.index_select(0, owners)[:, : width - 1].clamp(min=0)
    out.token_ids[:tokens] = torch.cat((last, drafts), dim=1).flatten()
    out.positions[:tokens] = position
    tables = out.block_tables[:rows].repeat_interleave(width, dim=0)
    tables = tables.where(fed[:, None], slots.block_table[-1])
    _write_index(tables, position, block_size, out.write_indices)
    if width > 1:
        out.slots[:tokens] = owners.repeat_interleave(width)
        out.sample_positions[:tokens] = (length[:, None] + query).flatten()


def _unpack_chunks(
    fields: dict[str, Tensor],
    dims: BatchDimensions,
    slots: DeviceSlots,
    block_size: int,
    out: StepTensors,
) -> None:
    decode, sample = dims.decode_rows, dims.decode_tokens
    owners, kv_lengths = out.row_slots[decode:], fields["prefill_kv_lengths"]
    out.lengths[decode:] = out.kv_lengths[decode:] = kv_lengths
    out.slots[sample:], out.sample_positions[sample:] = owners, kv_lengths
    features = slots.records[:, Header.FEATURES].index_select(0, owners)
    out.features[sample:] = features | fields["prefill_features"]
    starts = fields["prefill_starts"]
    out.prefill_starts.copy_(starts)
    out.last_token[sample:] = (starts[1:] - 1).clamp(min=0)
    first = int(starts[0])
    token = torch.arange(first, dims.tokens, device=owners.device)
    chunk = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    inside = token < starts[-1]
    chunk = chunk.clamp(max=dims.prefill_rows - 1)
    writes = inside & ((fields["prefill_features"] & RowFeature.REPEATS) == 0)[chunk]
    position = (kv_lengths[chunk] - starts[chunk + 1] + token).where(inside, 0)
    out.token_ids[first:] = fields["prefill_token_ids"][: len(token)].where(inside, 0)
    out.positions[first:] = position
    tables = out.block_tables[decode + chunk].where(writes[:, None], slots.block_table[-1])
    _write_index(tables, position, block_size, out.write_indices[:, first:])


def _record_words(record: Tensor) -> int:
    edits, bad_words = int(record[Header.NUM_EDITS]), int(record[Header.NUM_BAD_WORDS])
    return HEADER + edits * EDIT_WORDS + bad_words * WINDOW


def _write_index(tables: Tensor, positions: Tensor, block_size: int, out: Tensor) -> None:
    for table, places in zip(tables.chunk(len(out), dim=1), out):
        block = table.gather(1, (positions // block_size)[:, None])[:, 0].long()
        places[: len(positions)] = block * block_size + positions % block_size
