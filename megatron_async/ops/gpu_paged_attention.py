"""Paged attention on a GPU: our decode kernel, and our prefill kernel for chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.contexts.batch_dimensions import BatchDimensions
from megatron_async.ops.decode_attention import DecodeWorkspace, paged_decode_attention
from megatron_async.ops.paged_attention import TorchPagedAttention
from megatron_async.ops.prefill_attention import paged_prefill_attention


class GpuPagedAttention(TorchPagedAttention):
    """Attention backend of a GPU without any package beyond torch; every step can be captured.

    Args:
        block_size: tokens a block.
        max_blocks: blocks of the longest row.
        max_rows: most rows of a step.
        heads, kv_heads, dim: of the model's attention.
        device: a GPU.
    """

    captures_prefill = True

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
        self._workspace = DecodeWorkspace(max_rows, heads, kv_heads, dim, device)

    def begin_step(
        self,
        dims: BatchDimensions,
        block_tables: Tensor,
        kv_lengths: Tensor,
        prefill_starts: Tensor | None = None,
    ) -> None:
        """As `TorchPagedAttention.begin_step`; `prefill_starts` is needed where rows prefill."""
        decode = self._num_decode = dims.decode_rows
        self._max_query_length = dims.max_query_length
        self._starts = prefill_starts
        self._prefill_tables, self._prefill_lengths = block_tables[decode:], kv_lengths[decode:]
        if decode:
            self._begin_decode(dims, block_tables[:decode], kv_lengths[:decode])

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        """As `TorchPagedAttention.attend`; the output of padding tokens is undefined."""
        output = torch.empty_like(query)
        decode = self._num_decode
        if decode:
            self._decode(query[:decode], key_cache, value_cache, scale, output[:decode])
        if self._starts is not None:
            paged_prefill_attention(
                query[decode:],
                key_cache,
                value_cache,
                self._prefill_tables,
                self._prefill_lengths,
                self._starts,
                self._max_query_length,
                scale,
                output[decode:],
            )
        return output

    def _begin_decode(
        self, dims: BatchDimensions, block_tables: Tensor, kv_lengths: Tensor
    ) -> None:
        self._workspace.schedule.update(kv_lengths)
        self._decode_tables = block_tables

    def _decode(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, out: Tensor
    ) -> None:
        paged_decode_attention(
            query,
            key_cache,
            value_cache,
            self._decode_tables,
            scale,
            self._workspace,
            out,
            # The kernel that put this step's keys and values in place came after `begin_step`.
            is_settled=True,
        )
