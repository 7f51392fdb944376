"""`SamplingState`: token counts and recent tokens of each request, which the sampler reads."""

from __future__ import annotations

import torch

from megatron_async.device_state.pools import Pools
from megatron_async.device_state.slot_states import PerSlotState, StateStep
from megatron_async.ops.sampling.logits_processing import (
    CachedTokens,
    ChunkTensors,
    DraftTensors,
    ProcessingRows,
    TokenMemory,
)
from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.ops.sampling.slot_records import WINDOW


class SamplingState(PerSlotState):
    """Per-slot memory for steps with processed logits. Steps update it on the compute stream, so
    all earlier tokens are counted when a step reads it. Without arrays until `allocate`.

    Attributes:
        memory: counts and recent tokens.
    """

    def __init__(self, capacity: int, vocab_size: int, pools: Pools) -> None:
        self._slots, self._pools = capacity + 1, pools
        self._widths = {"token counts": vocab_size, "recent tokens": WINDOW}
        self.release()

    @property
    def bytes_per_slot(self) -> int:
        return sum(self._widths.values()) * torch.int32.itemsize

    def allocate(self) -> None:
        self.memory = TokenMemory(
            *(
                self._pools.zeros(name, (self._slots, width), torch.int32)
                for name, width in self._widths.items()
            )
        )

    def release(self) -> None:
        self.memory = TokenMemory(
            *(
                torch.zeros(0, width, dtype=torch.int32, device=self._pools.device)
                for width in self._widths.values()
            )
        )

    def rows(self, view: StateStep) -> ProcessingRows:
        """The rows of logits of a step."""
        step = view.step
        return ProcessingRows(
            slots=step.slots,
            positions=step.sample_positions,
            records=view.slots.records,
            features=step.features,
            memory=self.memory,
            drafts=None if view.dims.width == 1 else DraftTensors(
                decode_rows=view.dims.decode_rows,
                width=view.dims.width,
                token_ids=step.token_ids,
                yielded=view.sample_ring,
                entry=step.entry,
            ),
        )  # fmt: skip

    def begin_chunks(self, view: StateStep, mode: SamplingMode) -> None:
        """Count the tokens of prefill chunks. Counts of requests that start are reset first; if a
        request begins after cached tokens, these are counted too."""
        if mode != SamplingMode.PROCESSED:
            return
        dims, block_tokens = view.dims, view.kv_cache.block_tokens
        chunks = ChunkTensors(
            first_row=dims.decode_tokens,
            starts=view.step.prefill_starts,
            token_ids=view.step.token_ids,
            max_query_length=dims.max_query_length,
            cached=None if block_tokens is None else CachedTokens(
                view.step.block_tables[dims.decode_rows :], block_tokens
            ),
        )  # fmt: skip
        view.ops.begin_chunks(self.rows(view), chunks)
