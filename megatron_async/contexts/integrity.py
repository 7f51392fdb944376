"""Check that the context's books balance: every block and slot has exactly one owner."""

from __future__ import annotations

import numpy as np

from megatron_async.contexts.kv_block_allocator import KVBlockAllocator
from megatron_async.contexts.request_slots import RequestSlots, SlotState


def check_integrity(
    slots: RequestSlots, blocks: KVBlockAllocator, prefilling: list[int]
) -> None:
    """Compare the owners' books with the allocator's.

    Raises:
        AssertionError: a block is owned twice or lost, a slot's state contradicts its contents, or
            lengths are out of order; the message names slot or block.
    """
    owned = [slots.block_table[slot, : slots.num_blocks[slot]] for slot in range(slots.capacity)]
    ids = np.concatenate([*owned, blocks.free_blocks()])
    counts = np.bincount(ids, minlength=blocks.total)
    assert len(counts) == blocks.total, f"block {ids.max()} does not exist"
    assert (counts <= 1).all(), f"blocks owned twice: {np.flatnonzero(counts > 1)}"
    assert (counts == 1).all(), f"blocks lost: {np.flatnonzero(counts == 0)}"

    free = slots.state == SlotState.FREE
    assert np.count_nonzero(free) == slots.num_free, "free slots miscounted"
    assert (slots.num_blocks[free] == 0).all(), "a free slot holds blocks"
    for slot in range(slots.capacity):
        request = slots.requests[slot]
        assert (request is None) == bool(free[slot]), f"slot {slot}: request mismatch"
        if request is not None:
            assert slots.slot_of[request.request_id] == slot, f"slot {slot}: not its request's"
    assert len(slots.slot_of) == slots.capacity - slots.num_free, "a request without a slot"
    used = ~free
    assert (slots.num_known <= slots.num_launched)[used].all(), "booked a sample never launched"
    assert (slots.num_launched <= slots.max_length)[used].all(), "launched beyond a length limit"
    in_prefill = np.flatnonzero(slots.state == SlotState.PREFILLING)
    assert sorted(prefilling) == list(in_prefill), "prefill list disagrees with slot states"
