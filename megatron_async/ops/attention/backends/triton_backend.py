"""Prefill attention with our own kernel: every dtype, head and block size, no package."""

from __future__ import annotations

from typing import override

import torch
from torch import Tensor

from megatron_async.ops.attention.backends.base import AttentionShape, PrefillBackend
from megatron_async.ops.attention.prefill_attention import paged_prefill_attention
from megatron_async.ops.attention.prefill_parts import PrefillParts
from megatron_async.ops.attention.prefill_tiles import queries_of


class TritonPrefill(PrefillBackend):
    """Prefill attention by the Triton kernel of `ops/attention/prefill_attention.py`.

    Args:
        shape: of the engine's attention.
        first_key: queries behind this position do not see the keys before it.
    """

    name = "triton"
    captures = True
    lets_others_start = True

    def __init__(self, shape: AttentionShape, first_key: int = 0) -> None:
        self._first_key = first_key
        self._parts: PrefillParts | None = None
        if shape.device.type == "cuda" and not first_key:
            properties = torch.cuda.get_device_properties(shape.device)
            queries = queries_of(shape.dtype, shape.dim)
            self._parts = PrefillParts(
                properties.multi_processor_count, shape.kv_heads, queries, shape.dim, shape.device
            )

    @override
    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        rows = self.rows
        out = torch.empty_like(query) if out is None else out
        paged_prefill_attention(
            query,
            key_cache,
            value_cache,
            rows.block_tables,
            rows.kv_lengths,
            rows.starts,
            rows.max_query_length,
            scale,
            out,
            self._first_key,
            self._parts,
        )
        return out
