"""Check the context's state: each block's number of owners is right, and each slot has one."""

from __future__ import annotations

import numpy as np

from megatron_async.planning.kv_block_allocator import KVBlockAllocator
from megatron_async.planning.request_slots import RequestSlots, SlotState


def check_integrity(slots: RequestSlots, blocks: KVBlockAllocator, prefilling: list[int]) -> None:
    """Compare the blocks of slots with the allocator's counts.

    Raises:
        AssertionError: a block's number of owners is wrong, a block is lost or free twice, a slot's
            state contradicts its contents, or lengths are out of order. The message names the slot
            or the block.
    """
    tables = [slots.blocks_of(slot) for slot in range(slots.capacity)]
    for table in tables:
        unique = len(table) == 0 or len(np.unique(table)) == len(table)
        assert unique, f"a slot has a block twice: {table}"
    owned = np.bincount(np.concatenate(tables), minlength=blocks.total)
    assert len(owned) == blocks.total, f"block {len(owned) - 1} does not exist"
    wrong = np.flatnonzero(owned != blocks.owners)
    assert len(wrong) == 0, f"blocks {wrong} have other owners than they count"
    ownerless = np.bincount(blocks.ownerless_blocks(), minlength=blocks.total)
    assert (ownerless <= 1).all(), f"blocks free twice: {np.flatnonzero(ownerless > 1)}"
    missing = np.flatnonzero((ownerless == 1) == (owned > 0))
    assert len(missing) == 0, f"blocks {missing} are lost, or free and owned"

    free = slots.state == SlotState.FREE
    assert np.count_nonzero(free) == slots.num_free, "free slots miscounted"
    assert (slots.num_blocks[free] == 0).all(), "a free slot holds blocks"
    for slot in range(slots.capacity):
        request = slots.requests[slot]
        assert (request is None) == bool(free[slot]), f"slot {slot}: request mismatch"
        if request is not None:
            assert slots.slot_of[request.request_id] == slot, f"slot {slot}: not its request's"
    assert len(slots.slot_of) == slots.capacity - slots.num_free, "a request without a slot"
    used = np.flatnonzero(~free)
    steps, tokens = slots.in_flight_steps[used], slots.in_flight_tokens[used]
    assert (steps >= 0).all(), "booked a sample never launched"
    assert (tokens >= steps).all(), "a step in flight without a width"
    # Rows of several tokens may have come to the limit before steps in flight, which yield nothing.
    least = slots.at_least(used) if slots.max_width == 1 else slots.num_known[used]
    assert (least <= slots.max_length[used]).all(), "launched beyond a length limit"
    if (windows := slots.windows) is not None:
        assert (windows.first <= windows.end).all(), "a table of windows begins behind its end"
        assert (windows.end <= slots.num_blocks).all(), "more blocks in a window than in all"
        decodes = slots.state >= SlotState.DECODING
        same = windows.end[decodes] == slots.num_blocks[decodes]
        assert same.all(), "a decoding request lacks blocks in a table of windows"
        assert (windows.end[free] == 0).all(), "a free slot holds blocks in a table of windows"
    in_prefill = np.flatnonzero(slots.state == SlotState.PREFILLING)
    assert sorted(prefilling) == list(in_prefill), "prefill list disagrees with slot states"
