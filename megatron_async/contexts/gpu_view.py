"""`ContextGPUView`: the device's snapshot of one plan, and all that forward code may read.

The model gets this object as its `inference_context`. Its methods run inside launched work, on the
compute stream; bookkeeping never reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.config import InferenceConfig
from megatron_async.contexts.batch_dimensions import BatchDimensions
from megatron_async.contexts.bookkeeping_layout import BookkeepingLayout
from megatron_async.contexts.device_slots import DeviceSlots
from megatron_async.contexts.kv_cache import PagedKVCache
from megatron_async.models.rotary import RotaryTable
from megatron_async.ops.kernels import kernels_for
from megatron_async.ops.paged_attention import TorchPagedAttention
from megatron_async.ops.philox import MASK
from megatron_async.ops.sampling import SamplingTensors
from megatron_async.ops.unpack_step import (
    StepRows,
    apply_block_updates,
    feed_back_tokens,
    unpack_rows,
)


class ContextGPUView:
    """Typed views into the one bookkeeping buffer, and what follows from them for a step.

    Args:
        config: the engine's configuration.
        buffer_words: capacity of the bookkeeping buffer, int32 words.
        slots: per-slot device state.
        kv_cache: the paged cache.
        rotary: table of the model's rotary embedding.
        norm_eps: epsilon of the model's q/k norms.
        attention: the attention backend.

    Attributes (valid from `begin_step` until the next):
        dims: host-known shape of the batch.
        row_slots: int64 `[rows]`.
        token_ids, position_ids: int64 `[tokens]`, decode rows first.
        sampling: per-row sampling parameters.
    """

    num_speculative_tokens = 0
    use_flashinfer_fused_rope = False

    def __init__(
        self,
        config: InferenceConfig,
        buffer_words: int,
        slots: DeviceSlots,
        kv_cache: PagedKVCache,
        rotary: RotaryTable,
        norm_eps: float,
        attention: TorchPagedAttention,
    ) -> None:
        device = slots.last_token.device
        self.config = config
        self.max_sequence_length = config.max_sequence_length
        self.slots = slots
        self.kv_cache = kv_cache
        # Writer: the step's one copy; readers: the step. Both on the compute stream, so one buffer
        # serves all steps in flight.
        self.buffer = torch.zeros(buffer_words, dtype=torch.int32, device=device)
        # One row for each step in flight. Writer: the step; reader: the copy to the host. A row is
        # written again only after the host has resolved the step that wrote it.
        ring = config.steps_in_flight
        self.samples = torch.zeros(ring, config.max_requests, dtype=torch.int32, device=device)
        self._rotary = rotary
        self._norm_eps = norm_eps
        self._rows = StepRows.empty(config.max_requests, slots.block_table.size(1), device)
        self._attention = attention
        self.dims = BatchDimensions(decode_rows=0)

    # ---- One step ----------------------------------------------------------------------------

    def receive(self, staged: Tensor) -> None:
        """The step's one host-to-device copy: packed words, int32, from staging memory."""
        self.buffer[: len(staged)].copy_(staged, non_blocking=True)

    def begin_step(self, dims: BatchDimensions) -> None:
        """Unpack the bookkeeping buffer: update per-slot state and lay out tokens and positions."""
        self.dims = dims
        fields = BookkeepingLayout.for_batch(dims).device_views(self.buffer)
        slots, block_size = self.slots, self.config.block_size_tokens
        self._kv_lengths = fields["row_kv_lengths"]
        self._sample_entry = fields["sample_entry"]
        if dims.block_updates:
            apply_block_updates(
                slots.block_table,
                fields["block_update_slots"],
                fields["block_update_indices"],
                fields["block_update_blocks"],
            )
        # Prefill rows take part too: their KV length points at their chunk's last token, whose
        # entries are replaced below.
        rows = self._rows.head(dims.rows)
        unpack_rows(
            fields["row_slots"],
            self._kv_lengths,
            slots.last_token,
            slots.block_table,
            block_size,
            rows,
        )
        self.row_slots, self._block_tables = rows.slots, rows.block_tables
        self.token_ids, self.position_ids = rows.token_ids, rows.positions
        self._write_index = rows.write_index
        self._last_token: Tensor | None = None
        if not dims.is_decode_only:
            self._lay_out_prefill(fields, rows)
        self._attention.begin_step(dims, self._block_tables, self._kv_lengths)

    def _lay_out_prefill(self, fields: dict[str, Tensor], rows: StepRows) -> None:
        """Put the tokens of the prefill chunks behind those of the decode rows."""
        decode, block_size = self.dims.decode_rows, self.config.block_size_tokens
        self._load_sampling(fields)
        positions = fields["prefill_positions"].to(torch.int64)
        token_rows = fields["prefill_token_rows"].to(torch.int64)
        block = rows.block_tables[token_rows, positions // block_size].to(torch.int64)
        write_index = block * block_size + positions % block_size
        token_ids = fields["prefill_token_ids"].to(torch.int64)
        self.token_ids = torch.cat((rows.token_ids[:decode], token_ids))
        self.position_ids = torch.cat((rows.positions[:decode], positions))
        self._write_index = torch.cat((rows.write_index[:decode], write_index))
        decode_tokens = torch.arange(decode, device=token_rows.device)
        last_token = fields["prefill_last_token"].to(torch.int64)
        self._last_token = torch.cat((decode_tokens, last_token))

    def _load_sampling(self, fields: dict[str, Tensor]) -> None:
        """Store the sampling parameters that prefill rows bring along, for the steps to come."""
        rows = self.row_slots[self.dims.decode_rows :]
        slots = self.slots
        slots.temperature.index_copy_(0, rows, fields["prefill_temperature"])
        slots.top_k.index_copy_(0, rows, fields["prefill_top_k"])
        slots.top_p.index_copy_(0, rows, fields["prefill_top_p"])
        slots.min_p.index_copy_(0, rows, fields["prefill_min_p"])
        low = fields["prefill_seed_low"].to(torch.int64) & MASK
        high = fields["prefill_seed_high"].to(torch.int64)
        slots.seed.index_copy_(0, rows, (high << 32) | low)

    def sampling_tensors(self) -> SamplingTensors:
        """Per-row sampling parameters; the sampled token's position is the row's KV length."""
        slots, rows = self.slots, self.row_slots
        return SamplingTensors(
            temperature=slots.temperature.index_select(0, rows),
            top_k=slots.top_k.index_select(0, rows),
            top_p=slots.top_p.index_select(0, rows),
            min_p=slots.min_p.index_select(0, rows),
            seeds=slots.seed.index_select(0, rows),
            positions=self._kv_lengths,
        )

    def feed_back(self, sampled: Tensor) -> None:
        """Hand the sampled tokens, int64 `[rows]`, to the next step and to the copy to the host.

        A prefill chunk that leaves part of its prompt stores a meaningless token, which the chunk
        after it overwrites before a decode row could read it.
        """
        feed_back_tokens(
            sampled, self.row_slots, self.slots.last_token, self.samples, self._sample_entry
        )

    # ---- Asked by the model ------------------------------------------------------------------

    def attention(
        self, layer: int, mixed_qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> Tensor:
        """q/k norm, rotary embedding, KV append and causal attention of one layer.

        Args:
            layer: index in the KV cache.
            mixed_qkv: `[tokens, kv_heads * (group + 2) * dim]`, in Megatron's order: for each KV
                head its query heads, its key, its value.
            q_norm, k_norm: `[dim]`, RMSNorm weights of query and key heads, or None.

        Returns:
            `[tokens, heads, dim]`.
        """
        key_cache, value_cache = self.kv_cache.layer(layer)
        query = kernels_for(mixed_qkv).rope_append(
            mixed_qkv,
            self._rotary.cos,
            self._rotary.sin,
            self.position_ids,
            self._write_index,
            key_cache,
            value_cache,
            q_norm,
            k_norm,
            self._norm_eps,
        )
        return self._attention.attend(query, key_cache, value_cache, query.size(-1) ** -0.5)

    def last_token_logits(self, hidden_states: Tensor) -> Tensor:
        """Hidden states that logits are made of: `[1, tokens, hidden]` -> `[rows, hidden]`."""
        hidden_states = hidden_states.squeeze(0)
        if self._last_token is None:
            return hidden_states
        return hidden_states.index_select(0, self._last_token)

    def is_static_batching(self) -> bool:
        """Never: the batch changes from step to step."""
        return False

    def is_dynamic_batching(self) -> bool:
        """Always."""
        return True

    def is_decode_only(self) -> bool:
        """Whether every row has one query token."""
        return self.dims.is_decode_only

    def using_cuda_graph_this_step(self) -> bool:
        """Whether Megatron's own graphs are to be used: never, ours span the whole step."""
        return False
