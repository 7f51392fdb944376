"""Per-request state on the device, indexed by slot, which steps pass to later steps without the
host."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.device_state.bookkeeping_layout import COUNT, LENGTH, TOKENS
from megatron_async.ops.sampling.slot_records import RECORD_WORDS


class DeviceSlots:
    """Arrays that steps gather from and scatter to at `[slot]`. One row more than there are slots:
    the last belongs to rows without a request.

    Writer and reader: steps, on the compute stream, whose order is the only order needed.

    Args:
        capacity: slots.
        max_blocks: block-table columns, of all tables together.
        dummy_block: initial value of block tables, so that a wrong write harms no request.
        device: where the arrays live.
        num_drafts: drafts of a slot.

    Attributes:
        last_token: int64 `[slots + 1]`, the token sampled last.
        length: int32 `[slots + 1]`, tokens of the sequence, the last one included; last slot: 1.
        drafts: int64 `[slots + 1, drafts]`, drafts after the last token; -1: no draft.
        block_table: int32 `[slots + 1, max_blocks]`: a slot's tables side by side.
        records: int32 `[slots + 1, RECORD_WORDS]`: sampling parameters of each slot's request
            (`ops/sampling/slot_records.py`); zeros for the last slot: no processing.
    """

    def __init__(
        self,
        capacity: int,
        max_blocks: int,
        dummy_block: int,
        device: torch.device,
        num_drafts: int = 0,
    ) -> None:
        rows = capacity + 1
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.length = torch.ones(rows, dtype=torch.int32, device=device)
        self.drafts = torch.full((rows, num_drafts), -1, dtype=torch.int64, device=device)
        self.block_table = torch.full(
            (rows, max_blocks), dummy_block, dtype=torch.int32, device=device
        )
        self.records = torch.zeros(rows, RECORD_WORDS, dtype=torch.int32, device=device)

    def store(self, yielded: Tensor, slots: Tensor) -> None:
        """Store the tokens that rows have yielded on another rank.

        Args:
            yielded: int32 `[rows, words]`, of a sample ring (`device_state/feed_back.py`).
            slots: int64 `[rows]`.
        """
        drafts = self.drafts.size(1)
        count, length = yielded[:, COUNT].long(), yielded[:, LENGTH]
        tokens = yielded[:, TOKENS : TOKENS + 1 + drafts].long()
        last = tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0].clamp(min=0)
        kept = self.last_token.index_select(0, slots)
        self.last_token.index_copy_(0, slots, torch.where(count > 0, last, kept))
        self.length.index_copy_(0, slots, length)
        self.drafts.index_copy_(0, slots, yielded[:, TOKENS + 1 + drafts :].long())
