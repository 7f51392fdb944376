"""`StepTensors`: what a step's layers read, unpacked from its bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class StepTensors:
    """Buffers for the largest step, or views of their beginnings for a smaller one. Their addresses
    are fixed, so that graphs may read them.

    Attributes:
        entry: int32 `[1]`: the step's entry in the rings of bookkeeping and of samples.
        slots: int64 `[rows]`.
        kv_lengths: int32 `[rows]`, this step's tokens included.
        features: int32 `[rows]`, bits of `RowFeature`.
        last_token: int64 `[rows]`: index of the row's last token among the tokens.
        block_tables: int32 `[rows, blocks]`.
        prefill_starts: int32 `[prefill rows + 1]`: tokens of each prefill row, counted from the
            first prefill token.
        token_ids: int64 `[tokens]`, decode rows first.
        positions: int64 `[tokens]`.
        write_index: int64 `[tokens]`: place in the flat KV cache.
    """

    entry: Tensor
    slots: Tensor
    kv_lengths: Tensor
    features: Tensor
    last_token: Tensor
    block_tables: Tensor
    prefill_starts: Tensor
    token_ids: Tensor
    positions: Tensor
    write_index: Tensor

    @classmethod
    def empty(
        cls, max_rows: int, max_tokens: int, max_blocks: int, device: torch.device
    ) -> StepTensors:
        """Buffers for the largest step, zeroed."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            entry=zeros(1, dtype=torch.int32),
            slots=zeros(max_rows),
            kv_lengths=zeros(max_rows, dtype=torch.int32),
            features=zeros(max_rows, dtype=torch.int32),
            last_token=zeros(max_rows),
            block_tables=zeros(max_rows, max_blocks, dtype=torch.int32),
            prefill_starts=zeros(max_rows + 1, dtype=torch.int32),
            token_ids=zeros(max_tokens),
            positions=zeros(max_tokens),
            write_index=zeros(max_tokens),
        )

    def head(self, rows: int, prefill_rows: int, tokens: int) -> StepTensors:
        """Views for a step of this size."""
        return StepTensors(
            self.entry,
            self.slots[:rows],
            self.kv_lengths[:rows],
            self.features[:rows],
            self.last_token[:rows],
            self.block_tables[:rows],
            self.prefill_starts[: prefill_rows + 1 if prefill_rows else 0],
            self.token_ids[:tokens],
            self.positions[:tokens],
            self.write_index[:tokens],
        )
