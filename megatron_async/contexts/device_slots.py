"""Per-request state on the device, indexed by slot: what flows from step to step without the
host."""

from __future__ import annotations

import torch

from megatron_async.ops.slot_records import RECORD_WORDS


class DeviceSlots:
    """Arrays that steps gather from and scatter to at `[slot]`. One row more than there are slots:
    the last belongs to rows without a request.

    Writer and reader: steps, on the compute stream, whose order is the only order needed.

    Args:
        capacity: slots.
        max_blocks: block-table columns.
        dummy_block: fills block tables at first, so that a stray write hurts nobody.
        device: where the arrays live.

    Attributes:
        last_token: int64 `[slots + 1]`, the token sampled last.
        block_table: int32 `[slots + 1, max_blocks]`.
        records: int32 `[slots + 1, RECORD_WORDS]`: what each slot's request asks of the sampling
            step (`ops/slot_records.py`); of the last slot zeros, which ask for nothing.
    """

    def __init__(
        self, capacity: int, max_blocks: int, dummy_block: int, device: torch.device
    ) -> None:
        rows = capacity + 1
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.block_table = torch.full(
            (rows, max_blocks), dummy_block, dtype=torch.int32, device=device
        )
        self.records = torch.zeros(rows, RECORD_WORDS, dtype=torch.int32, device=device)
