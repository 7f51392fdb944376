"""`BookkeepingLayout`: where each field of a step's bookkeeping lies in the one buffer that is
copied.

Host and device build their views from the same table, so they cannot disagree. Every field is four
bytes wide, which keeps the buffer one int32 array; floats are reinterpreted, seeds are two words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_async.contexts.batch_dimensions import BatchDimensions

# (field, float?, which count of the batch is its length)
FIELDS: tuple[tuple[str, bool, str], ...] = (
    ("sample_entry", False, "one"),
    ("row_slots", False, "rows"),
    ("row_kv_lengths", False, "rows"),
    ("block_update_slots", False, "block_updates"),
    ("block_update_indices", False, "block_updates"),
    ("block_update_blocks", False, "block_updates"),
    ("prefill_last_token", False, "prefill_rows"),
    ("prefill_temperature", True, "prefill_rows"),
    ("prefill_top_k", False, "prefill_rows"),
    ("prefill_top_p", True, "prefill_rows"),
    ("prefill_min_p", True, "prefill_rows"),
    ("prefill_seed_low", False, "prefill_rows"),
    ("prefill_seed_high", False, "prefill_rows"),
    ("prefill_token_ids", False, "prefill_tokens"),
    ("prefill_positions", False, "prefill_tokens"),
    ("prefill_token_rows", False, "prefill_tokens"),
)
"""The field table. A decode-only step carries 8 bytes a row and 12 a block-table entry."""


@dataclass(frozen=True)
class BookkeepingLayout:
    """Offsets, in int32 words, of every field for one set of counts."""

    spans: dict[str, tuple[int, int, bool]]
    """field -> (start, end, is float)."""
    size: int
    """Words in use."""

    @classmethod
    def for_batch(cls, dims: BatchDimensions) -> BookkeepingLayout:
        """The layout of a step; cached, because decode steps repeat their counts."""
        return _layout(dims.rows, dims.block_updates, dims.prefill_rows, dims.prefill_tokens)

    @classmethod
    def capacity(cls, max_requests: int, max_tokens: int, num_blocks: int) -> int:
        """Words that no step exceeds.

        Block-table updates are new owners of blocks, so at most `num_blocks` a step, or padding.
        """
        updates = max(num_blocks, max_requests)
        return _layout(max_requests, updates, max_requests, max_tokens).size

    def host_views(self, buffer: NDArray[np.int32]) -> dict[str, NDArray[np.generic]]:
        """NumPy views of each field into the host staging buffer."""
        return {
            name: buffer[start:end].view(np.float32) if is_float else buffer[start:end]
            for name, (start, end, is_float) in self.spans.items()
        }

    def device_views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Tensor views of each field into the device buffer (int32)."""
        return {
            name: buffer[start:end].view(torch.float32) if is_float else buffer[start:end]
            for name, (start, end, is_float) in self.spans.items()
        }


@lru_cache(maxsize=4096)
def _layout(
    rows: int, block_updates: int, prefill_rows: int, prefill_tokens: int
) -> BookkeepingLayout:
    counts = {
        "one": 1,
        "rows": rows,
        "block_updates": block_updates,
        "prefill_rows": prefill_rows,
        "prefill_tokens": prefill_tokens,
    }
    spans: dict[str, tuple[int, int, bool]] = {}
    offset = 0
    for name, is_float, count in FIELDS:
        spans[name] = (offset, offset + counts[count], is_float)
        offset += counts[count]
    return BookkeepingLayout(spans, offset)
