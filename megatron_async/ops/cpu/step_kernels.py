"""Loops of a step's first and last work on a CPU: rows unpacked, samples stored.

Imported only where loops are compiled. What is written is what the references in plain torch write
(`device_state/unpack_step_reference.py`, `device_state/feed_back.py`), which launch dozens of
small operations: with 8-bit weights of SmolLM2-135M 1.0 to 1.4 ms of CPU time in a step of 9 to 20
ms, and 0.2 to 0.3 with these loops. They are too short to release Python's lock.

Their indices come from a step's words. A wrong one raises IndexError, as it does in plain torch: it
must fail the step, not write over other memory. What the loops of layers read (places in
the KV cache, columns of block tables) is right if these loops have passed it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from megatron_async.ops.cpu.kept_loops import njit


def arrays(*tensors: Tensor) -> tuple[Any, ...]:
    """NumPy's views of tensors in a CPU's memory."""
    return tuple(tensor.numpy() for tensor in tensors)


@njit(cache=True, boundscheck=True)
def unpack_rows(
    words: Any, next_entry: Any, fields: Any, header: Any, width: Any, block_size: Any,
    last_token: Any, lengths: Any, by_slot: Any, drafts: Any, block_table: Any, records: Any,
    entry_out: Any, row_slots: Any, lengths_out: Any, kv_lengths: Any, tables: Any, slots_out: Any,
    sample_positions: Any, features: Any, last_index: Any, token_ids: Any, positions: Any,
    write_indices: Any, block_tokens: Any, keeps: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """A step of decode rows alone; see `unpack_step_kernels`.

    Args:
        fields: first words of `num_block_updates`, `decode_width`, `row_slots` and the updates.
        header: words `FEATURES`, `MAX_LENGTH` and `DRAFTS` of a record, and the bit `PRODUCES`.
        last_token, drafts, block_table, records: of `DeviceSlots`; the table is changed.
        lengths: by slot if `by_slot`, else by row.
        entry_out: and all up to `write_indices`: of `StepTensors`, written.
        block_tokens: `[blocks * block size]`, changed if `keeps`.
    """
    entry = next_entry[0]
    entry_out[0] = entry
    step = words[entry]
    updates, planned = step[fields[0]], step[fields[1]]
    first, dummy = fields[3], len(block_table) - 1
    last_block = block_table[dummy, 0]
    columns = block_table.shape[1] // len(write_indices)
    for i in range(first, first + updates):
        block = step[i + 2 * updates]
        if block < 0 or block > last_block:
            raise IndexError("a block that the KV cache does not have")
        block_table[step[i], step[i + updates]] = block
    for row in range(len(row_slots)):
        slot = step[fields[2] + row]
        row_slots[row] = slot
        tables[row] = block_table[slot]
        length = lengths[slot] if by_slot else lengths[row]
        record = records[slot]
        limit, brought = record[header[1]], min(planned, 1 + record[header[2]])
        lengths_out[row] = length
        kv_lengths[row] = max(min(length - 1 + brought, limit - 1), 1)
        for query in range(width):
            index, position = row * width + query, length - 1 + query
            owner = slot
            if position < 0 or position >= limit - 1 or query >= brought:
                position, owner = 0, dummy
            place = block_table[owner, position // block_size] * block_size + position % block_size
            token = last_token[slot] if query == 0 else max(drafts[slot, query - 1], 0)
            features[index] = record[header[0]] | header[3]
            last_index[index] = index
            token_ids[index], positions[index], write_indices[0, index] = token, position, place
            for number in range(1, len(write_indices)):
                block = block_table[owner, number * columns + position // block_size]
                write_indices[number, index] = block * block_size + position % block_size
            if width > 1:
                slots_out[index], sample_positions[index] = slot, length + query
            if keeps:
                block_tokens[place] = token


@njit(cache=True, boundscheck=True)
def store_samples(
    sampled: Any, row_slots: Any, lengths: Any, token_ids: Any, words: Any, width_field: Any,
    header: Any, last_token: Any, slot_lengths: Any, records: Any, ring: Any, host: Any,
    entry: Any, next_entry: Any, decode_rows: Any, width: Any,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """What each row yields; see `feed_back_kernel`.

    Args:
        row_slots, lengths, token_ids, entry: of `StepTensors`.
        width_field: word of `decode_width`.
        header: words `MAX_LENGTH` and `DRAFTS` of a record.
        last_token, slot_lengths, records: of `DeviceSlots`; the first two are changed.
        ring, host: int32 `[entries, max rows, words]`, changed, as is `next_entry`.
    """
    now, dummy = entry[0], len(last_token) - 1
    for row in range(len(row_slots)):
        decodes, slot, length = row < decode_rows, row_slots[row], lengths[row]
        first = row * width if decodes else row + decode_rows * (width - 1)
        found, last = ring[now, row], sampled[first]
        room = records[slot, header[0]] - length
        count = 1 if room > 0 or not decodes else 0
        found[2] = last
        if width > 1 and not decodes:
            found[3 : 2 + width] = 0
        elif width > 1:
            most = min(words[now, width_field], 1 + records[slot, header[1]], room)
            agrees, token = count > 0, last
            for query in range(1, width):
                agrees = agrees and query < most and token_ids[first + query] == token
                token = sampled[first + query]
                found[2 + query] = token
                if agrees:
                    last, count = token, count + 1
        length += count if decodes else 1
        if slot >= dummy:
            length = 1
        elif count > 0:
            last_token[slot] = max(last, 0)
        slot_lengths[slot] = length
        found[0], found[1] = count, length
        host[now, row, : 2 + width] = found[: 2 + width]
    next_entry[0] = (now + 1) % len(ring)


def compile_loops() -> None:
    """Compile both, by calls for a step of one row of a dummy slot."""
    number, index, word = np.zeros(1, np.int32), np.zeros(1, np.int64), np.zeros(4, np.int32)
    words, ring = np.zeros((1, 8), np.int32), np.zeros((1, 1, 3), np.int32)
    table, records = np.zeros((1, 1), np.int32), np.zeros((1, 16), np.int32)
    drafts = np.zeros((1, 0), np.int64)
    unpack_rows(
        words, number, (0, 1, 2, 3), word, 1, 1, index, number, True, drafts, table, records,
        number, index, number, number, table, index, number, number, index, index, index,
        index.reshape(1, 1), number, False,
    )  # fmt: skip
    store_samples(
        index, index, number, index, words, 1, word[:2], index, number, records, ring, ring,
        number, number, 1, 1,
    )  # fmt: skip
