"""First and last work of a step on a CPU: by compiled loops where there are some, else in plain
torch. Steps with prefill chunks are unpacked in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from megatron_async.device_state.bookkeeping_layout import UPDATE_FIELDS, BookkeepingLayout
from megatron_async.device_state.feed_back import feed_back_reference
from megatron_async.device_state.unpack_step_reference import unpack_step_reference
from megatron_async.ops.cpu.compiler import compiles
from megatron_async.ops.sampling.slot_records import Header, RowFeature

if TYPE_CHECKING:
    from megatron_async.device_state.device_slots import DeviceSlots
    from megatron_async.ops.batch_dimensions import BatchDimensions
    from megatron_async.ops.step_tensors import StepTensors

UNPACKED = np.array(
    [Header.FEATURES, Header.MAX_LENGTH, Header.DRAFTS, RowFeature.PRODUCES], np.int32
)
FED_BACK = np.array([Header.MAX_LENGTH, Header.DRAFTS], np.int32)


def unpack_step_on_host(
    words: Tensor,
    next_entry: Tensor,
    dims: BatchDimensions,
    slots: DeviceSlots,
    block_size: int,
    out: StepTensors,
    lengths: Tensor | None = None,
    block_tokens: Tensor | None = None,
) -> None:
    """`unpack_step_kernels` on a CPU."""
    if dims.prefill_rows or not compiles():
        unpack_step_reference(
            words, next_entry, dims, slots, block_size, out, lengths, block_tokens
        )
        return
    from megatron_async.ops.cpu.step_kernels import arrays, unpack_rows

    start = BookkeepingLayout.for_batch(dims, 0).start
    fields = (
        start("num_block_updates"),
        start("decode_width"),
        start("row_slots"),
        start(UPDATE_FIELDS[0]),
    )
    given = slots.length if lengths is None else lengths
    kept = next_entry if block_tokens is None else block_tokens.view(-1)  # any, where none is kept
    unpack_rows(
        *arrays(words, next_entry),
        fields,
        UNPACKED,
        dims.width,
        block_size,
        *arrays(slots.last_token, given),
        lengths is None,
        *arrays(slots.drafts, slots.block_table, slots.records),
        *arrays(out.entry, out.row_slots, out.lengths, out.kv_lengths, out.block_tables),
        *arrays(out.slots, out.sample_positions, out.features, out.last_token),
        *arrays(out.token_ids, out.positions, out.write_indices, kept),
        block_tokens is not None,
    )


def feed_back_on_host(
    sampled: Tensor,
    step: StepTensors,
    dims: BatchDimensions,
    words: Tensor,
    slots: DeviceSlots,
    ring: Tensor,
    host: Tensor,
    next_entry: Tensor,
) -> None:
    """`feed_back_kernel` on a CPU."""
    if not compiles():
        feed_back_reference(sampled, step, dims, words, slots, ring, host, next_entry)
        return
    from megatron_async.ops.cpu.step_kernels import arrays, store_samples

    store_samples(
        *arrays(sampled.contiguous(), step.row_slots, step.lengths, step.token_ids, words),
        BookkeepingLayout.for_batch(dims, 0).start("decode_width"),
        FED_BACK,
        *arrays(slots.last_token, slots.length, slots.records, ring, host),
        *arrays(step.entry, next_entry),
        dims.decode_rows,
        dims.width,
    )
