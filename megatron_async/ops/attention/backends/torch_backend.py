"""Prefill attention in plain torch: the reference, by gathering keys and values."""

from __future__ import annotations

from typing import override

import torch
from torch import Tensor

from megatron_async.ops.attention.backends.base import (
    AttentionShape,
    PrefillBackend,
    PrefillRows,
)
from megatron_async.ops.attention.paged_attention import TorchPagedAttention
from megatron_async.ops.batch_dimensions import BatchDimensions


class TorchPrefill(PrefillBackend):
    """The prefill half of `TorchPagedAttention`.

    It needs the host's lengths, so it cannot be captured.

    Args:
        shape: of the engine's attention.
    """

    name = "torch"
    captures = False

    def __init__(self, shape: AttentionShape) -> None:
        self._attention = TorchPagedAttention(shape.block_size, shape.max_blocks, shape.device)

    @override
    def begin_step(self, rows: PrefillRows) -> None:
        super().begin_step(rows)
        dims = BatchDimensions(decode_rows=0, prefill_lengths=rows.lengths)
        self._attention.begin_step(dims, rows.block_tables, rows.kv_lengths)

    @override
    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(query) if out is None else out
        first = self.rows.first_token
        out[first:] = self._attention.attend(query[first:], key_cache, value_cache, scale)
        return out
