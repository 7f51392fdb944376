"""`ContextGPUView`: the device's snapshot of one plan, and all that forward code may read.

The model gets this object as its `inference_context`. Its methods run inside launched work, on the
compute stream; bookkeeping never reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, override

import torch
from torch import Tensor

from megatron_async.config import InferenceConfig
from megatron_async.device_state.bookkeeping_layout import BookkeepingLayout
from megatron_async.device_state.device_slots import DeviceSlots
from megatron_async.device_state.feed_back import feed_back_kernel
from megatron_async.device_state.kv_cache import PagedKVCache
from megatron_async.device_state.paged_step_view import PagedStepView
from megatron_async.device_state.pools import Pools
from megatron_async.device_state.recurrent_state import RecurrentState
from megatron_async.device_state.slot_states import SlotStates
from megatron_async.device_state.step_on_host import feed_back_on_host, unpack_step_on_host
from megatron_async.device_state.unpack_step import unpack_step_kernels
from megatron_async.models.rotary import RotaryTable
from megatron_async.models.step_view import RecurrentStepView
from megatron_async.ops.all_ops import Ops
from megatron_async.ops.attention.paged_attention import TorchPagedAttention
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.recurrent.mamba_pools import MambaParams
from megatron_async.ops.recurrent.recurrent_pools import DecodeRows, RecurrentPools
from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.ops.step_tensors import StepTensors


class ContextGPUView(PagedStepView, RecurrentStepView):
    """Typed views into the bookkeeping buffer, and the step's tensors computed from them.

    Args:
        config: the engine's configuration.
        buffer_words: capacity of one step's bookkeeping, int32 words.
        tensors: what steps are unpacked to, for the largest step.
        slots: per-slot device state.
        kv_cache: the paged cache.
        rotary: table of the rotary embedding that the model's configuration describes.
        norm_eps: epsilon of the model's q/k norms.
        attentions: the attention backend of each block table.
        pools: memory of cache and states.
        states: slot states: data that steps leave for later steps, by slot.
        host_samples: as `sample_ring`, host memory.
        ops: bound for the device.
        draft_attentions: the attention backend of each depth of an MTP drafter; empty without one.

    Attributes:
        rotary: as given, or of the model's own rotary embedding, where it has one.
        sample_ring: int32 `[steps in flight, rows, words]`: what each row of a step yields
            (`device_state/feed_back.py`).
        host_samples: as given: the same, which steps write besides, for the host.

    Attributes (valid from `begin_step` until the next):
        dims: host-known shape of the batch.
        mode: of its sampling.
        step: the unpacked `StepTensors`.
        hidden_states: `[tokens, hidden]`, after the last norm, valid after the model's forward;
            only on the last pipeline stage.
        sampled: int64 `[sample rows]`, from `feed_back` on.
    """

    step: StepTensors

    def __init__(
        self,
        config: InferenceConfig,
        buffer_words: int,
        tensors: StepTensors,
        slots: DeviceSlots,
        kv_cache: PagedKVCache,
        rotary: RotaryTable,
        norm_eps: float,
        attentions: tuple[TorchPagedAttention, ...],
        pools: Pools,
        states: SlotStates,
        host_samples: Tensor,
        ops: Ops,
        draft_attentions: tuple[TorchPagedAttention, ...] = (),
    ) -> None:
        super().__init__(kv_cache, norm_eps, attentions, ops)
        device, ring = slots.last_token.device, config.steps_in_flight
        self.config = config
        self.max_sequence_length = config.max_sequence_length
        self.slots = slots
        # Both rings have one entry for each step in flight, and an entry is written again only
        # after the host has resolved the step that used it. Bookkeeping: written by the step's one
        # copy, on the upload stream; read by the step, which waits for the copy's event. Samples:
        # written by the step, here and on the host, which waits for the step's event.
        self.bookkeeping = torch.zeros(ring, buffer_words, dtype=torch.int32, device=device)
        self.host_samples = host_samples
        self.sample_ring = torch.zeros_like(host_samples, device=device)
        # One view for each entry: to make one takes a launch some microseconds.
        self._entries = self.bookkeeping.unbind()
        # Counted on the device, because a graph's arguments are fixed: each step moves it on.
        self._next_entry = torch.zeros(1, dtype=torch.int32, device=device)
        self.pools, self.states = pools, states
        self._recurrent = states.find(RecurrentState)
        self._tensors = tensors
        self.rotary = rotary
        self.draft_attentions = draft_attentions
        self.dims = BatchDimensions(decode_rows=0)
        self.mode = SamplingMode.GREEDY

    @property
    def captures_prefill(self) -> bool:
        """Whether steps with prefill chunks can be captured."""
        return all(attention.captures_prefill for attention in self._attentions)

    @property
    def prefill_backends(self) -> tuple[str, ...]:
        """Names of the attention backends of prefill chunks, by class of steps; () on a CPU."""
        named = [attention.prefill_backends for attention in self._attentions]
        return tuple(chain.from_iterable(dict.fromkeys(named)))

    @property
    def attention_report(self) -> str | None:
        """Which attention backends were chosen, and why; None where there was no choice."""
        told = dict.fromkeys(filter(None, (each.report for each in self._attentions)))
        return "\n".join(told) or None

    # ---- One step ----------------------------------------------------------------------------

    def receive(self, staged: Tensor, step: int) -> None:
        """The step's one host-to-device copy: packed words, int32, from staging memory."""
        entry = self._entries[step % len(self._entries)]
        entry[: len(staged)].copy_(staged, non_blocking=True)

    def expect_step(self, step: int) -> None:
        """Make `step` the next to be unpacked; needed only if earlier steps did not run to their
        ends."""
        self._next_entry.fill_(step % len(self.bookkeeping))

    def take_block_updates(self, step: int, dims: BatchDimensions, count: int) -> None:
        """Enter the `count` blocks that a failed step brought, as its unpacking would have: rows of
        the same requests may be in flight behind it, and write where their tables say."""
        if count:
            words = self._entries[step % len(self._entries)]
            fields = BookkeepingLayout.for_batch(dims, count).views(words)
            owners, places = fields["block_update_slots"], fields["block_update_indices"]
            blocks = fields["block_update_blocks"]
            self.slots.block_table.index_put_((owners.long(), places.long()), blocks)

    def begin_step(
        self, dims: BatchDimensions, mode: SamplingMode, lengths: Tensor | None = None
    ) -> None:
        """Unpack the next bookkeeping: update per-slot state and lay out tokens and positions.

        Args:
            dims: shape of the step.
            mode: of its sampling.
            lengths: int32 `[decode rows]` of the sequences, from the pipeline stage before; None on
                the first stage, whose steps have left them by slot.
        """
        self.dims, self.mode = dims, mode
        self.step = step = self._tensors.head(dims)
        unpack = unpack_step_kernels if self.bookkeeping.is_cuda else unpack_step_on_host
        unpack(
            self.bookkeeping,
            self._next_entry,
            dims,
            self.slots,
            self.config.block_size_tokens,
            step,
            lengths,
            self.kv_cache.block_tokens,
        )
        starts = step.prefill_starts if dims.prefill_rows else None
        tables = step.block_tables.chunk(len(self._attentions), dim=1)
        for attention, table in zip(self._attentions, tables):
            attention.begin_step(dims, table, step.kv_lengths, starts, step.positions)
        for state in self.states:
            state.begin_step(self)
        if dims.prefill_rows:
            for state in self.states:
                state.begin_chunks(self, mode)

    def feed_back(self, sampled: Tensor) -> None:
        """Store the tokens that each row yields, of the sampled ones, int64 `[sample rows]`, for
        the next step and for the host."""
        self.sampled = sampled
        feed_back = feed_back_kernel if sampled.is_cuda else feed_back_on_host
        feed_back(
            sampled,
            self.step,
            self.dims,
            self.bookkeeping,
            self.slots,
            self.sample_ring,
            self.host_samples,
            self._next_entry,
        )

    def row_lengths(self, rows: int) -> Tensor:
        """Lengths of the sequences of the first `rows` rows of the step that ran last, int32. Valid
        also after a replayed graph, when `step` may have another shape."""
        return self._tensors.lengths[:rows]

    def move_on(self) -> None:
        """End a step whose samples are made on another pipeline stage, the last one."""
        self._next_entry.copy_((self.step.entry + 1) % len(self.sample_ring))

    # ---- Asked by the model ------------------------------------------------------------------

    @override
    def recurrent(self, layer: int, projected: Tensor, params: Any) -> Tensor:
        assert self._recurrent is not None, "the context was made for a model without such layers"
        return self._recurrent.run(self, layer, projected, params)

    @override
    def recurrent_decoding(self) -> tuple[DecodeRows, Sequence[RecurrentPools]] | None:
        return None if self._recurrent is None else self._recurrent.decoding()

    @override
    def recurrent_gated(
        self, layer: int, projected: Tensor, params: MambaParams, norm_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert self._recurrent is not None, "the context was made for a model without such layers"
        return self._recurrent.run_gated(self, layer, projected, params, norm_weight)

    @override
    def _write_index(self, layer: int) -> Tensor:
        table = self.kv_cache.table_of(layer)
        return self.step.write_indices[table] if table else self.step.write_index

    @property
    @override
    def may_gate(self) -> bool:
        return self.dims.is_decode_only and self.dims.width == 1

    def last_token_logits(self, hidden_states: Tensor) -> Tensor:
        """Hidden states that logits are made of: `[1, tokens, hidden]` -> `[sample rows,
        hidden]`."""
        self.hidden_states = hidden_states = hidden_states.squeeze(0)
        if self.dims.is_decode_only:
            return hidden_states
        return hidden_states.index_select(0, self.step.last_token)
