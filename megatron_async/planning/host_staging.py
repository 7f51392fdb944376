"""The host side of a step's one copy: a ring of staging buffers, filled from a plan."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_async.device_state.bookkeeping_layout import BookkeepingLayout
from megatron_async.device_state.state_table import pack_states
from megatron_async.devices import Device
from megatron_async.ops.sampling.slot_records import NO_TOKEN, RowFeature
from megatron_async.planning.request_slots import RequestSlots
from megatron_async.planning.step_plan import StepPlan


class HostStaging:
    """Ring of (pinned) int32 buffers.

    Writer: the host, in `pack`. Reader: the step's host-to-device copy. The host writes a buffer
    again one turn of the ring later. By then it has resolved the step that read the buffer. So what
    the device's entry of the ring has is known then, and a step of the same words needs no copy: a
    decode step of the same rows without a new block, as nearly all steps of few requests are.

    Args:
        device: supplies the host memory.
        capacity: words of one buffer.
        ring: number of buffers, at least the number of steps in flight.
        dummy_slot: fills padding.
    """

    def __init__(self, device: Device, capacity: int, ring: int, dummy_slot: int) -> None:
        self._dummy_slot = dummy_slot
        self._tensors = [device.host_buffer(capacity, torch.int32) for _ in range(ring)]
        self._arrays = [tensor.numpy() for tensor in self._tensors]  # sync-ok: host memory
        self._on_device: list[bytes | None] = [None] * ring
        """What each entry of the device's ring begins with; None: not known."""

    def pack(self, plan: StepPlan, slots: RequestSlots) -> Tensor | None:
        """Write a plan's bookkeeping into the next buffer.

        Returns:
            the words in use, int32, to be copied to the device as they are; None if the device's
            entry has them already.
        """
        entry = plan.step % len(self._tensors)
        updates = plan.block_updates
        layout = BookkeepingLayout.for_batch(plan.dims, len(updates.slots))
        fields = layout.views(self._arrays[entry])
        # Dummy rows belong to the dummy slot, and to the dummy block.
        decode, row_slots = plan.dims.decode_rows, fields["row_slots"]
        _fill(row_slots[:decode], plan.slots[: plan.num_decode], self._dummy_slot)
        fields["num_block_updates"][0] = len(updates.slots)
        fields["decode_width"][0] = plan.width
        fields["states"][0] = 0
        fields["block_update_slots"][:] = updates.slots
        fields["block_update_indices"][:] = updates.indices
        fields["block_update_blocks"][:] = updates.blocks
        end = layout.size
        if not plan.dims.is_decode_only:
            _fill(row_slots[decode:], plan.slots[plan.num_decode :], self._dummy_slot)
            _pack_prefill(fields, plan)
            end = _pack_records(self._arrays[entry], end, fields, plan, slots)
        if plan.states is not None:
            fields["states"][0] = end
            end = pack_states(self._arrays[entry], end, plan.states)
        words = self._arrays[entry][:end].tobytes()
        if words == self._on_device[entry]:
            return None
        self._on_device[entry] = words
        return self._tensors[entry][:end]

    def forget(self, step: int) -> None:
        """The copy of a step's bookkeeping was not launched."""
        self._on_device[step % len(self._tensors)] = None

    def forget_all(self) -> None:
        """Nobody knows which copies were launched."""
        self._on_device = [None] * len(self._tensors)


def _pack_prefill(fields: dict[str, np.ndarray], plan: StepPlan) -> None:
    # Dummy rows begin and end where the tokens end; tokens beyond that are padding.
    starts = plan.prefill_starts + plan.first_prefill_token
    _fill(fields["prefill_starts"], starts, int(starts[-1]))
    _fill(fields["prefill_kv_lengths"], plan.kv_at_most[plan.num_decode :], 1)
    _fill(fields["prefill_token_ids"], plan.prefill_token_ids, 0)
    _fill(fields["prefill_features"], plan.prefill_features, 0)
    _fill(fields["prefill_following"], plan.prefill_following, NO_TOKEN)


def _pack_records(
    words: np.ndarray, end: int, fields: dict[str, np.ndarray], plan: StepPlan, slots: RequestSlots
) -> int:
    """Append the records of requests that start; returns the words in use."""
    fields["prefill_record"][:] = -1
    starts = (plan.prefill_features & RowFeature.STARTS) != 0
    for chunk in np.flatnonzero(starts):
        record = slots.request_at(plan.slots[plan.num_decode + chunk]).record
        assert record is not None, "a request with a slot has one"
        fields["prefill_record"][chunk] = end
        words[end : end + len(record.words)] = record.words
        end += len(record.words)
    return end


def _fill(field: np.ndarray, values: np.ndarray, padding: int) -> None:
    count = len(values)
    field[:count] = values
    if count < len(field):
        field[count:] = padding
