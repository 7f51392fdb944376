"""The host side of a step's one copy: a ring of staging buffers, filled from a plan."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_async.contexts.bookkeeping_layout import BookkeepingLayout
from megatron_async.contexts.request_slots import RequestSlots
from megatron_async.contexts.step_plan import IntArray, StepPlan
from megatron_async.devices import Device


class HostStaging:
    """Ring of (pinned) int32 buffers.

    Writer: the host, in `pack`. Reader: the step's host-to-device copy. Buffer i is written again
    one ring later, and by then the host has resolved the step that read it, which orders the two.

    Args:
        device: supplies the host memory.
        capacity: words of one buffer.
        ring: number of buffers, at least the number of steps in flight.
        dummy_slot, dummy_block: fill padding.
    """

    def __init__(
        self, device: Device, capacity: int, ring: int, dummy_slot: int, dummy_block: int
    ) -> None:
        self._dummy_slot, self._dummy_block = dummy_slot, dummy_block
        self._tensors = [device.host_buffer(capacity, torch.int32) for _ in range(ring)]
        self._arrays = [tensor.numpy() for tensor in self._tensors]  # sync-ok: host memory

    def pack(self, plan: StepPlan, slots: RequestSlots) -> Tensor:
        """Write a plan's bookkeeping into the next buffer.

        Returns:
            the words in use, int32, to be copied to the device as they are.
        """
        entry = plan.step % len(self._tensors)
        layout = BookkeepingLayout.for_batch(plan.dims)
        fields = layout.host_views(self._arrays[entry])
        fields["sample_entry"][0] = entry
        # Dummy rows: one token of the dummy slot, in the dummy block.
        _fill(fields["row_slots"], plan.slots, self._dummy_slot)
        _fill(fields["row_kv_lengths"], plan.kv_lengths, 1)
        updates = plan.block_updates
        _fill(fields["block_update_slots"], updates.slots, self._dummy_slot)
        _fill(fields["block_update_indices"], updates.indices, 0)
        _fill(fields["block_update_blocks"], updates.blocks, self._dummy_block)
        if not plan.dims.is_decode_only:
            self._pack_prefill(fields, plan, slots)
        return self._tensors[entry][: layout.size]

    @staticmethod
    def _pack_prefill(
        fields: dict[str, np.ndarray], plan: StepPlan, slots: RequestSlots
    ) -> None:
        dims = plan.dims
        query_lengths = [query for query, _ in dims.prefill_lengths]
        fields["prefill_last_token"][:] = dims.decode_rows + np.cumsum(query_lengths) - 1
        rows = plan.slots[dims.decode_rows :]
        fields["prefill_temperature"][:] = slots.temperature[rows]
        fields["prefill_top_k"][:] = slots.top_k[rows]
        fields["prefill_top_p"][:] = slots.top_p[rows]
        fields["prefill_min_p"][:] = slots.min_p[rows]
        seeds = slots.seed[rows].view(np.int32).reshape(-1, 2)  # little-endian: low word first
        fields["prefill_seed_low"][:] = seeds[:, 0]
        fields["prefill_seed_high"][:] = seeds[:, 1]
        fields["prefill_token_ids"][:] = plan.prefill.token_ids
        fields["prefill_positions"][:] = plan.prefill.positions
        fields["prefill_token_rows"][:] = plan.prefill.rows


def _fill(field: np.ndarray, values: IntArray, padding: int) -> None:
    count = len(values)
    field[:count] = values
    if count < len(field):
        field[count:] = padding
