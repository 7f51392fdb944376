"""`BookkeepingLayout`: the place of each field of a step's bookkeeping in the one copied buffer.

Host and device build their views from the same table, so they cannot disagree. Every field is
int32, so the buffer is one array. The number of block-table updates comes first. After the fields
come the updates, so that a captured step, whose addresses are fixed, serves any number of them.
Then come the records of requests that start (`ops/sampling/slot_records.py`); a prefill row has the
first word of its record, or -1 if the record is on the device already. The section of recurrent
states (`device_state/state_table.py`) is last and begins at word `states`; 0: there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.sampling.slot_records import RECORD_WORDS

# (field, which count of the batch is its length)
FIELDS: tuple[tuple[str, str], ...] = (
    ("num_block_updates", "one"),
    ("decode_width", "one"),
    ("states", "one"),
    ("row_slots", "rows"),
    ("prefill_starts", "prefill_bounds"),
    ("prefill_kv_lengths", "prefill_rows"),
    ("prefill_features", "prefill_rows"),
    ("prefill_record", "prefill_rows"),
    ("prefill_following", "prefill_rows"),
    ("prefill_token_ids", "prefill_tokens"),
    ("block_update_slots", "block_updates"),
    ("block_update_indices", "block_updates"),
    ("block_update_blocks", "block_updates"),
)
"""The field table. A decode-only step has 4 bytes a row and 12 a block-table entry: the device
knows the rows' lengths."""
UPDATE_FIELDS = tuple(name for name, count in FIELDS if count == "block_updates")
"""The arrays of the list of block-table updates, which lie end to end."""
COUNT, LENGTH, TOKENS = 0, 1, 2
"""Words of a row in the sample ring: the number of tokens that it yields, the length of its
sequence after them, and the first token. The row's next drafts follow the space for the most tokens
that a row may yield."""


def ring_words(max_width: int) -> int:
    """Words of a row in the sample ring, where a row yields up to `max_width` tokens."""
    return TOKENS + max_width + max_width - 1


@dataclass(frozen=True)
class BookkeepingLayout:
    """Offsets, in int32 words, of every field for one set of counts."""

    spans: dict[str, tuple[int, int]]
    """field -> (start, end)."""
    size: int
    """Words in use."""

    @classmethod
    def for_batch(cls, dims: BatchDimensions, block_updates: int) -> BookkeepingLayout:
        """The layout of a step of this shape with this many block-table updates; cached, because
        decode steps repeat their counts."""
        return _layout(dims.rows, dims.prefill_rows, dims.prefill_tokens, block_updates)

    @classmethod
    def capacity(cls, max_rows: int, max_tokens: int, num_blocks: int) -> int:
        """Words that no step exceeds.

        Args:
            max_rows: rows of a step, padding included.
            max_tokens: prefill tokens of a step, padding included.
            num_blocks: blocks of the pool; admission stops where a step would have more updates.

        The section of recurrent states is not counted.
        """
        return _layout(max_rows, max_rows, max_tokens, num_blocks).size + max_rows * RECORD_WORDS

    def start(self, field: str) -> int:
        """First word of a field."""
        return self.spans[field][0]

    def views[Words: (NDArray[np.int32], Tensor)](self, buffer: Words) -> dict[str, Words]:
        """Views of each field into a buffer, int32 `[words]`, of the host or of the device."""
        return {name: buffer[start:end] for name, (start, end) in self.spans.items()}


@lru_cache(maxsize=512)
def _layout(
    rows: int, prefill_rows: int, prefill_tokens: int, block_updates: int
) -> BookkeepingLayout:
    counts = {
        "one": 1,
        "rows": rows,
        "prefill_rows": prefill_rows,
        "prefill_bounds": prefill_rows + 1 if prefill_rows else 0,
        "prefill_tokens": prefill_tokens,
        "block_updates": block_updates,
    }
    spans: dict[str, tuple[int, int]] = {}
    offset = 0
    for name, count in FIELDS:
        spans[name] = (offset, offset + counts[count])
        offset += counts[count]
    return BookkeepingLayout(spans, offset)
