"""`StepTensors`: inputs of a step's layers and sampler, unpacked from its bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_async.ops.batch_dimensions import BatchDimensions


@dataclass
class StepTensors:
    """Buffers for the largest step, or views of their beginnings for a smaller one. Their addresses
    are fixed, so that graphs may read them.

    A *sample row* is a row of logits: each query token of a decode row has one, and each chunk.

    Attributes:
        entry: int32 `[1]`: the step's entry in the rings of bookkeeping and of samples.
        row_slots: int64 `[rows]`.
        lengths: int32 `[rows]`: tokens of the sequence: of a decode row before the step, of a chunk
            after the step.
        kv_lengths: int32 `[rows]`: keys that the row's last query token sees.
        block_tables: int32 `[rows, tables * blocks]`: a row's tables side by side.
        prefill_starts: int32 `[prefill rows + 1]`: where the tokens of each prefill row begin among
            the step's, and the end of the last row's.
        slots: int64 `[sample rows]`.
        sample_positions: int32 `[sample rows]`: position of the token to be sampled.
        features: int32 `[sample rows]`, bits of `RowFeature`.
        last_token: int64 `[sample rows]`: index of the row's last token among the tokens.
        token_ids: int64 `[tokens]`, decode rows first.
        positions: int64 `[tokens]`.
        write_index: int64 `[tokens]`: place in the flat KV cache, by the first table.
        write_indices: int64 `[tables, tokens]`: by each table; `write_index` is its first row.
    """

    entry: Tensor
    row_slots: Tensor
    lengths: Tensor
    kv_lengths: Tensor
    block_tables: Tensor
    prefill_starts: Tensor
    slots: Tensor
    sample_positions: Tensor
    features: Tensor
    last_token: Tensor
    token_ids: Tensor
    positions: Tensor
    write_index: Tensor
    write_indices: Tensor

    @classmethod
    def empty(
        cls,
        max_rows: int,
        max_tokens: int,
        max_blocks: int,
        device: torch.device,
        max_sample_rows: int,
        tables: int = 1,
    ) -> StepTensors:
        """Buffers for the largest step, zeroed; `max_blocks` are of each table."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        write_indices = zeros(tables, max_tokens)
        return cls(
            entry=zeros(1, dtype=torch.int32),
            row_slots=zeros(max_rows),
            lengths=zeros(max_rows, dtype=torch.int32),
            kv_lengths=zeros(max_rows, dtype=torch.int32),
            block_tables=zeros(max_rows, tables * max_blocks, dtype=torch.int32),
            prefill_starts=zeros(max_rows + 1, dtype=torch.int32),
            slots=zeros(max_sample_rows),
            sample_positions=zeros(max_sample_rows, dtype=torch.int32),
            features=zeros(max_sample_rows, dtype=torch.int32),
            last_token=zeros(max_sample_rows),
            token_ids=zeros(max_tokens),
            positions=zeros(max_tokens),
            write_index=write_indices[0],
            write_indices=write_indices,
        )

    def head(self, dims: BatchDimensions) -> StepTensors:
        """Views for a step of this shape. Where rows have one query token, their slots and lengths
        are those of the sample rows, and stand in memory once."""
        rows, samples, tokens = dims.rows, dims.sample_rows, dims.tokens
        row_slots, lengths = self.row_slots[:rows], self.lengths[:rows]
        is_one = dims.width == 1
        return StepTensors(
            entry=self.entry,
            row_slots=row_slots,
            lengths=lengths,
            kv_lengths=self.kv_lengths[:rows],
            block_tables=self.block_tables[:rows],
            prefill_starts=self.prefill_starts[: dims.prefill_rows + 1 if dims.prefill_rows else 0],
            slots=row_slots if is_one else self.slots[:samples],
            sample_positions=lengths if is_one else self.sample_positions[:samples],
            features=self.features[:samples],
            last_token=self.last_token[:samples],
            token_ids=self.token_ids[:tokens],
            positions=self.positions[:tokens],
            write_index=self.write_index[:tokens],
            write_indices=self.write_indices[:, :tokens],
        )
