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
from megatron_async.ops.paged_attention import TorchPagedAttention
from megatron_async.ops.philox import MASK
from megatron_async.ops.rotary import apply_rotary_reference
from megatron_async.ops.sampling import SamplingTensors


class ContextGPUView:
    """Typed views into the one bookkeeping buffer, and what follows from them for a step.

    Args:
        config: the engine's configuration.
        buffer_words: capacity of the bookkeeping buffer, int32 words.
        slots: per-slot device state.
        kv_cache: the paged cache.
        rotary: table of the model's rotary embedding, or None.
        dtype: compute dtype of the model.

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
        rotary: RotaryTable | None,
        dtype: torch.dtype,
    ) -> None:
        device = slots.last_token.device
        self.config = config
        self.max_sequence_length = config.max_sequence_length
        self.slots = slots
        self.kv_cache = kv_cache
        # Writer: the step's one copy; readers: the step. Both on the compute stream, so one buffer
        # serves all steps in flight.
        self.buffer = torch.zeros(buffer_words, dtype=torch.int32, device=device)
        self._rotary = rotary
        self._dtype = dtype
        self._attention = TorchPagedAttention(
            config.block_size_tokens, slots.block_table.size(1), device
        )
        self.dims = BatchDimensions(decode_rows=0)

    # ---- One step ----------------------------------------------------------------------------

    def receive(self, staged: Tensor) -> None:
        """The step's one host-to-device copy: packed words, int32, from staging memory."""
        self.buffer[: len(staged)].copy_(staged, non_blocking=True)

    def begin_step(self, dims: BatchDimensions) -> None:
        """Unpack the bookkeeping buffer: update per-slot state and lay out tokens and positions."""
        self.dims = dims
        fields = BookkeepingLayout.for_batch(dims).device_views(self.buffer)
        slots, decode = self.slots, dims.decode_rows
        self.row_slots = fields["row_slots"].to(torch.int64)
        kv_lengths = fields["row_kv_lengths"]
        if dims.block_updates:
            slots.block_table.index_put_(
                (
                    fields["block_update_slots"].to(torch.int64),
                    fields["block_update_indices"].to(torch.int64),
                ),
                fields["block_update_blocks"],
            )
        self.token_ids = slots.last_token.index_select(0, self.row_slots[:decode])
        self.position_ids = (kv_lengths[:decode] - 1).to(torch.int64)
        token_slots = self.row_slots[:decode]
        self._last_token: Tensor | None = None
        if not dims.is_decode_only:
            self._load_sampling(fields)
            token_rows = fields["prefill_token_rows"].to(torch.int64)
            token_slots = torch.cat((token_slots, self.row_slots.index_select(0, token_rows)))
            prefill_ids = fields["prefill_token_ids"].to(torch.int64)
            self.token_ids = torch.cat((self.token_ids, prefill_ids))
            self.position_ids = torch.cat(
                (self.position_ids, fields["prefill_positions"].to(torch.int64))
            )
            decode_tokens = torch.arange(decode, device=token_rows.device)
            self._last_token = torch.cat(
                (decode_tokens, fields["prefill_last_token"].to(torch.int64))
            )
        self._kv_lengths = kv_lengths
        block_size = self.config.block_size_tokens
        block = slots.block_table[token_slots, self.position_ids // block_size].to(torch.int64)
        self._write_index = block * block_size + self.position_ids % block_size
        self._attention.begin_step(
            dims, slots.block_table.index_select(0, self.row_slots), kv_lengths
        )
        if self._rotary is not None:
            rows = self.position_ids
            self._cos = self._rotary.cos.index_select(0, rows)[:, None].to(self._dtype)
            self._sin = self._rotary.sin.index_select(0, rows)[:, None].to(self._dtype)

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
        """Hand the sampled tokens, int64 `[rows]`, to the next step.

        A prefill chunk that leaves part of its prompt stores a meaningless token, which the chunk
        after it overwrites before a decode row could read it.
        """
        self.slots.last_token.index_copy_(0, self.row_slots, sampled)

    # ---- Asked by the model ------------------------------------------------------------------

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Rotary embedding, KV append and causal attention of one layer.

        Args:
            layer: index in the KV cache.
            query: `[tokens, heads, dim]`.
            key, value: `[tokens, kv heads, dim]`.

        Returns:
            `[tokens, heads, dim]`.
        """
        if self._rotary is not None:
            query, key = apply_rotary_reference(query, key, self._cos, self._sin)
        self.kv_cache.append(layer, self._write_index, key, value)
        key_cache, value_cache = self.kv_cache.layer(layer)
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
