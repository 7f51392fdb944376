"""`TrainingView`: whole sequences of a training batch, as the engine's layers see a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import override

import torch
from torch import Tensor, nn

from megatron_async.device_state.kv_cache import BlockShape, PagedKVCache
from megatron_async.device_state.paged_step_view import PagedStepView
from megatron_async.device_state.pools import Pools
from megatron_async.models.model_config import ModelConfig
from megatron_async.models.partition import layer_windows, local_heads
from megatron_async.models.rotary import RotaryTable, described_frequencies, take_over_positions
from megatron_async.ops.all_ops import Ops
from megatron_async.ops.attention.backends.base import INVARIANT_PART, AttentionShape
from megatron_async.ops.attention.backends.own_kernel import TritonPrefill
from megatron_async.ops.attention.backends.selection import PrefillChoice
from megatron_async.ops.attention.gpu_paged_attention import GpuPagedAttention
from megatron_async.ops.attention.paged_attention import TorchPagedAttention
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.triton_folder import choose_triton_folder

BLOCK = 64
"""Tokens of a block of keys; no bit depends on it."""


@dataclass(frozen=True)
class _Tokens:
    token_ids: Tensor
    positions: Tensor
    write_index: Tensor


class TrainingView(PagedStepView):
    """A step of prefill chunks alone, each a whole sequence. Layers of one window use one cache,
    one after the other.

    Args:
        model: that runs, a served model on the meta device or with weights; its rotary embedding is
            taken over.
        config: of the model.
        ops: bound for the device.
        device: of the batches.
    """

    def __init__(
        self, model: nn.Module, config: ModelConfig, ops: Ops, device: torch.device
    ) -> None:
        self._model, self._config, self._device = model, config, device
        self._shape = (0, 0)
        self._attentions: list[TorchPagedAttention] = []
        self.windows = sorted({window for stage in layer_windows(config) for window in stage})
        self._longest = 0
        self.norm_eps, self.ops = config.layernorm_epsilon, ops

    @override
    def backend(self, layer: int) -> TorchPagedAttention:
        return self._attentions[layer]

    def lay_out(self, rows: int, length: int) -> None:
        """Make the next pass one over `rows` sequences of `length` tokens each, row after row."""
        if self._shape == (rows, length):
            return
        device, blocks = self._device, -(-length // BLOCK)
        if length > self._longest:
            self._longest = max(length, 2 * self._longest)
            table = take_over_positions(self._model, self._longest, device)
            nothing = described_frequencies(self._config)
            self.rotary = table or RotaryTable(nothing, self._longest, device)
        heads, kv_heads = local_heads(self._config)
        dim, dtype = self._config.kv_channels, self._config.params_dtype
        shape = BlockShape(len(self.windows), BLOCK, kv_heads, dim, dtype)
        self.kv_cache = PagedKVCache(shape, rows * blocks, Pools(device))
        at = torch.arange(length, device=device)
        first = torch.arange(rows, device=device)[:, None] * blocks
        self.step = _Tokens(
            # Layers read no ids.
            token_ids=at.new_zeros(rows * length),
            positions=at.repeat(rows),
            write_index=(first * BLOCK + at).flatten(),
        )
        self.dims = BatchDimensions(0, prefill_lengths=((length, length),) * rows)
        if device.type == "cuda":
            choose_triton_folder()
            sizes = heads, kv_heads, dim, BLOCK, blocks, dtype, device
            whole = AttentionShape(*sizes, INVARIANT_PART)
            shapes = [replace(whole, window=each) for each in self.windows]
            prefills = [PrefillChoice.of_one(TritonPrefill(each)) for each in shapes]
            self._attentions = [
                GpuPagedAttention(each, 1, prefill) for each, prefill in zip(shapes, prefills)
            ]
        else:
            self._attentions = [
                TorchPagedAttention(BLOCK, blocks, device, window=each) for each in self.windows
            ]
        tables = first + torch.arange(blocks, device=device)
        lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
        starts = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)
        for attention in self._attentions:
            attention.begin_step(self.dims, tables.int(), lengths, starts)
        self._shape = rows, length
