"""Paged attention on a GPU: our decode kernel, and torch's attention for prefill chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.contexts.batch_dimensions import BatchDimensions
from megatron_async.ops.decode_attention import (
    DecodeWorkspace,
    number_of_parts,
    paged_decode_attention,
)
from megatron_async.ops.paged_attention import TorchPagedAttention


class GpuPagedAttention(TorchPagedAttention):
    """Attention backend of a GPU without any package beyond torch; decode steps can be captured.

    Args:
        block_size: tokens a block.
        max_blocks: blocks of the longest row.
        max_rows: most rows of a step.
        heads, kv_heads, dim: of the model's attention.
        device: a GPU.
    """

    def __init__(
        self,
        block_size: int,
        max_blocks: int,
        max_rows: int,
        heads: int,
        kv_heads: int,
        dim: int,
        device: torch.device,
    ) -> None:
        super().__init__(block_size, max_blocks, device)
        self._kv_heads = kv_heads
        self._longest = block_size * max_blocks
        self._workspace = DecodeWorkspace(max_rows, heads, dim, device)

    def _begin_decode(
        self, dims: BatchDimensions, block_tables: Tensor, kv_lengths: Tensor
    ) -> None:
        # A captured step serves every length, so its number of parts is for the longest.
        longest = self._longest if dims.is_captured else dims.max_decode_kv_length
        self._parts = number_of_parts(
            dims.decode_rows, self._kv_heads, longest, self._workspace.processors
        )
        self._decode_tables, self._decode_lengths = block_tables, kv_lengths

    def _decode(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, out: Tensor
    ) -> None:
        paged_decode_attention(
            query,
            key_cache,
            value_cache,
            self._decode_tables,
            self._decode_lengths,
            scale,
            self._parts,
            self._workspace,
            out,
        )
