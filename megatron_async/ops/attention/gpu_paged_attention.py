"""Paged attention on a GPU: our decode kernel, and a prefill backend for chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, override

import torch
from torch import Tensor

from megatron_async.ops.attention.backends.base import AttentionShape, PrefillBackend, PrefillRows
from megatron_async.ops.attention.backends.selection import PrefillChoice
from megatron_async.ops.attention.decode_attention import DecodeWorkspace, paged_decode_attention
from megatron_async.ops.attention.paged_attention import TorchPagedAttention
from megatron_async.ops.linear.quantised_weight import BLOCK
from megatron_async.ops.linear.rounded_rows import RoundedRows

if TYPE_CHECKING:
    from megatron_async.ops.batch_dimensions import BatchDimensions


class GpuPagedAttention(TorchPagedAttention):
    """Attention of a GPU's steps of at most `max_rows` rows: decode rows of up to `max_width` query
    tokens, and prefill rows by the backends of `prefill`, which must know `first_key` too."""

    def __init__(
        self,
        shape: AttentionShape,
        max_rows: int,
        prefill: PrefillChoice,
        max_width: int = 1,
        first_key: int = 0,
    ) -> None:
        rules = first_key, shape.window, shape.softcap
        super().__init__(shape.block_size, shape.max_blocks, shape.device, *rules)
        self.captures_prefill = prefill.captures
        self.report = str(prefill)
        self.prefill_backends = tuple(backend.name for backend in prefill.backends)
        self._choice = prefill
        self._backend: PrefillBackend | None = None
        heads = shape.heads, shape.kv_heads, shape.dim
        parts = shape.part, shape.longest_sequence, shape.window
        self._workspace = DecodeWorkspace(max_rows, *heads, shape.device, max_width, *parts)

    @override
    def begin_step(
        self,
        dims: BatchDimensions,
        block_tables: Tensor,
        kv_lengths: Tensor,
        prefill_starts: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        decode, self._decode_tokens = dims.decode_rows, dims.decode_tokens
        self._backend = None
        self.may_round = self._workspace.output.size(2) == BLOCK and dims.is_decode_only
        if dims.prefill_rows:
            assert prefill_starts is not None
            self._backend = self._choice.pick(dims.max_query_length, decode > 0)
            self._backend.begin_step(
                PrefillRows(
                    block_tables[decode:],
                    kv_lengths[decode:],
                    prefill_starts,
                    dims.prefill_tokens,
                    dims.max_query_length,
                    dims.max_prefill_kv_length,
                    dims.prefill_lengths,
                    dims.decode_tokens,
                )
            )
        if decode:
            # Dummy decode rows of a packed shape have no tokens that they might write.
            limit = prefill_starts if dims.is_packed else None
            self._begin_decode(dims, block_tables[:decode], kv_lengths[:decode], positions, limit)

    @override
    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        scales: Tensor | None = None,
        sinks: Tensor | None = None,
        rounded: RoundedRows | None = None,
    ) -> Tensor:
        decode, prefill = self._decode_tokens, self._backend
        if prefill is not None and not decode:
            return prefill.attend(query, key_cache, value_cache, scale, None, scales, sinks)
        if rounded is not None:
            output = rounded.codes[: len(query)].view(query.shape)
        else:
            output = torch.empty_like(query)
        if prefill is not None:
            prefill.attend(query, key_cache, value_cache, scale, output, scales, sinks)
        if decode:
            # Behind the prefill rows, as a backend of theirs may write all tokens.
            rows = query[:decode], key_cache, value_cache, scale, output[:decode]
            self._decode(*rows, scales, sinks, rounded)
        return output

    @override
    def _begin_decode(
        self,
        dims: BatchDimensions,
        block_tables: Tensor,
        kv_lengths: Tensor,
        positions: Tensor | None,
        limit: Tensor | None = None,
    ) -> None:
        self._workspace.schedule.update(kv_lengths, limit, dims.width)
        self._decode_tables = block_tables
        self._query_positions = None
        if dims.width > 1:
            assert positions is not None
            self._query_positions = positions[: dims.decode_tokens]

    @override
    def _decode(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        out: Tensor,
        scales: Tensor | None,
        sinks: Tensor | None,
        rounded: RoundedRows | None = None,
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
            positions=self._query_positions,
            first_key=self._first_key,
            is_beside=self._backend is not None and self._backend.lets_others_start,
            scales=scales,
            sinks=sinks,
            softcap=self._softcap,
            rounded=rounded,
        )
