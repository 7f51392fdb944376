"""Causal attention over a paged KV cache: the plain-torch reference backend.

`begin_step` does once the work that depends only on the step: which cache rows belong to which
sequence, and masks. Every layer then gathers its keys and values and calls torch's
scaled_dot_product_attention. The host knows all shapes from the plan, so it never waits for the
device.

A *window* is the number of keys that a query sees, its own included (Beltagy et al. 2020). A *sink*
is a learned score of each head that takes part in the softmax and has no value (Xiao et al. 2023,
gpt-oss). A *softcap* bounds scores: cap * tanh(score / cap) (Gemma 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.ops.attention.narrow_cache import KEYS, VALUES, as_bytes, widened

if TYPE_CHECKING:
    from megatron_async.ops.batch_dimensions import BatchDimensions
    from megatron_async.ops.linear.rounded_rows import RoundedRows


MASK_ALIGNMENT = 16


@dataclass
class _PrefillRow:
    """One prefill chunk: where its tokens stand, and its causal mask against its whole sequence."""

    start: int
    end: int
    kv_index: Tensor
    """int64 `[kv length]`: rows of the flat KV cache."""
    mask: Tensor | None
    """bool `[1, query, kv]`; None where plain causality is right (the chunk is the sequence)."""


class TorchPagedAttention:
    """Reference attention backend.

    Args:
        block_size: tokens a block.
        max_blocks: blocks of the longest row.
        device: of the tensors.
        first_key: queries after this position do not see the keys before it, because these do not
            exist (a draft model's first entry is at 1).
        window: keys that a query sees, its own and those before it; 0: all. Blocks that are wholly
            before the first query's window are not read.
        softcap: bound of the scaled scores; 0: none.
    """

    captures_prefill = False
    """Whether a captured step may have prefill rows. False: this backend needs the host's
    lengths."""
    report: str | None = None
    """The choice at the start, with its reason, for the user; None if there was no choice."""
    prefill_backends: tuple[str, ...] = ()
    """Names of the chosen backends, by class of steps."""
    may_round = False
    """Whether this step's rows may be rounded to FP8: all decode, of heads of 128."""

    def __init__(
        self,
        block_size: int,
        max_blocks: int,
        device: torch.device,
        first_key: int = 0,
        window: int = 0,
        softcap: float = 0.0,
    ) -> None:
        self._block_size = block_size
        self._first_key, self._window, self._softcap = first_key, window, softcap
        positions = torch.arange(block_size * max_blocks, device=device)
        self._positions = positions
        self._block_of = positions // block_size
        self._offset_of = positions % block_size
        self._decode_tokens = 0
        self._width = 1
        self._decode_index: Tensor = positions
        self._decode_mask: Tensor = positions
        self._prefill: list[_PrefillRow] = []

    def begin_step(
        self,
        dims: BatchDimensions,
        block_tables: Tensor,
        kv_lengths: Tensor,
        prefill_starts: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        """Prepare for the layers of one step.

        Args:
            dims: the host's knowledge of the batch.
            block_tables: int32 `[rows, blocks]`, decode rows first.
            kv_lengths: int32 `[rows]`, this step's tokens included.
            prefill_starts: int32 `[prefill rows + 1]`; not needed here, where the host's lengths
                are exact.
            positions: int64 `[tokens]`, decode rows first; needed where decode rows have several
                query tokens, each of which sees the keys up to its own position.
        """
        self._decode_tokens, self._width = dims.decode_tokens, dims.width
        if dims.decode_rows:
            rows = slice(0, dims.decode_rows)
            self._begin_decode(dims, block_tables[rows], kv_lengths[rows], positions)
        self._begin_prefill(dims, block_tables)

    def _begin_decode(
        self,
        dims: BatchDimensions,
        block_tables: Tensor,
        kv_lengths: Tensor,
        positions: Tensor | None,
    ) -> None:
        # Rounded up, because torch's fused kernels want masks aligned; the mask hides the rest.
        length = -(-dims.max_decode_kv_length // MASK_ALIGNMENT) * MASK_ALIGNMENT
        length = min(length, len(self._positions))
        keys = self._positions[:length]
        if self._window:
            in_window = self._window + dims.width - 1
            keys = keys[:in_window] + (kv_lengths[:, None] - in_window).clamp(min=0)
            keys = keys.clamp(max=len(self._positions) - 1)
            blocks = block_tables.gather(1, self._block_of[keys])
        else:
            blocks = block_tables.index_select(1, self._block_of[:length])
        index = blocks.to(torch.int64) * self._block_size + self._offset_of[keys]
        valid = keys < kv_lengths[:, None]
        self._decode_mask = valid[:, None, None, :]
        last = kv_lengths[:, None, None] - 1
        if dims.width > 1:
            assert positions is not None
            last = positions[: dims.decode_tokens].view(dims.decode_rows, dims.width, 1)
        # Masked positions read one of the row's tokens instead of what a block's other owner left:
        # a weight of zero does not hide a NaN. At its limit a row has fewer query tokens, and the
        # window of the first one begins later.
        nobodys = index[:, :1]
        if self._window:
            first = torch.maximum(last[:, 0], kv_lengths[:, None] - dims.width)
            valid &= keys > first - self._window
            nobodys = index.gather(1, kv_lengths[:, None].long() - 1 - keys[:, :1])
        self._decode_index = torch.where(valid, index, nobodys).view(-1)
        if dims.width > 1 or self._first_key:
            self._decode_mask = self._sees(last, keys.unsqueeze(-2))[:, None]

    def _begin_prefill(self, dims: BatchDimensions, block_tables: Tensor) -> None:
        self._prefill = []
        start = dims.decode_tokens
        for row, (query_length, kv_length) in enumerate(dims.prefill_lengths, dims.decode_rows):
            self._begin_chunk(block_tables[row], start, query_length, kv_length)
            start += query_length

    def _begin_chunk(self, table: Tensor, start: int, query_length: int, kv_length: int) -> None:
        """Prepare for a prefill chunk whose first token is the step's `start`th; its block table is
        int32 `[blocks]`."""
        first = max(kv_length - query_length - self._window + 1, 0) if self._window else 0
        blocks = table.index_select(0, self._block_of[first:kv_length]).to(torch.int64)
        kv_index = blocks * self._block_size + self._offset_of[first:kv_length]
        mask = None
        if query_length < kv_length or self._first_key or 0 < self._window < kv_length:
            queries = self._positions[kv_length - query_length : kv_length, None]
            mask = self._sees(queries, self._positions[first:kv_length])[None]
        self._prefill.append(_PrefillRow(start, start + query_length, kv_index, mask))

    def _sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys each query sees, bool, by the positions of both."""
        seen = keys <= queries
        if self._window:
            seen &= keys > queries - self._window
        return seen & (keys >= queries.clamp(max=self._first_key)) if self._first_key else seen

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
        """Attention of one layer.

        Args:
            query: `[tokens, heads, dim]`, decode rows first.
            key_cache, value_cache: `[blocks, block size, kv heads, dim]`, this step's keys and
                values already in place.
            scale: softmax scale.
            scales: of caches in e4m3 (`narrow_cache.py`).
            sinks: float32 `[heads]`, contiguous; None: there are none.
            rounded: where rows go in FP8, for a product, if the step's `may_round`.

        Returns:
            `[tokens, heads, dim]`; of `rounded` the codes.
        """
        assert rounded is None, "see may_round"
        output = torch.empty_like(query)
        if self._decode_tokens:
            tokens = slice(0, self._decode_tokens)
            rows = query[tokens], key_cache, value_cache, scale, output[tokens]
            self._decode(*rows, scales, sinks)
        for row in self._prefill:
            tokens = slice(row.start, row.end)
            keys, values = (
                _gather(cache, row.kv_index, scales, of, query.dtype)
                for of, cache in ((KEYS, key_cache), (VALUES, value_cache))
            )
            output[tokens] = self._attention(
                query[tokens].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                row.mask,
                scale,
                sinks,
            )[0].transpose(0, 1)
        return output

    def _attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Query heads `[rows, heads, queries, dim]` and as many KV heads, or fewer that share them.
        `mask`: None is plain causality; `sinks`: of each head, or of each of its queries."""
        if sinks is None and not self._softcap:
            return F.scaled_dot_product_attention(
                query, keys, values, mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
        group, length = query.size(1) // keys.size(1), keys.size(2)
        keys, values = (x.repeat_interleave(group, 1).to(torch.float32) for x in (keys, values))
        scores = query.to(torch.float32) @ keys.mT * scale
        if self._softcap:
            scores = self._softcap * torch.tanh(scores / self._softcap)
        if mask is None:
            mask = self._sees(self._positions[:length, None], self._positions[:length])
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            column = sinks.view(query.size(1), -1, 1).expand(len(query), -1, scores.size(2), 1)
            scores = torch.cat((scores, column), -1)
        return (scores.softmax(-1)[..., :length] @ values).to(query.dtype)

    def _decode(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        out: Tensor,
        scales: Tensor | None,
        sinks: Tensor | None,
    ) -> None:
        """The query heads of a KV head, of all query tokens of a row, are its "sequence" (no
        causality but the mask's among them), so that each key and value is read once."""
        tokens, heads, dim = query.shape
        width, kv_heads, index = self._width, key_cache.size(2), self._decode_index
        rows, group, mask = tokens // width, heads // kv_heads, self._decode_mask
        if width > 1:
            mask = mask.repeat_interleave(group, dim=2)

        def gather(cache: Tensor, of: int) -> Tensor:
            # [rows, kv heads, kv length, dim]
            flat = _gather(cache, index, scales, of, query.dtype)
            return flat.view(rows, -1, kv_heads, dim).transpose(1, 2)

        if sinks is not None:
            sinks = sinks.view(kv_heads, group).repeat(1, width)
        by_head = query.view(rows, width, kv_heads, group, dim).transpose(1, 2)
        attended = self._attention(
            by_head.reshape(rows, kv_heads, width * group, dim),
            gather(key_cache, KEYS),
            gather(value_cache, VALUES),
            mask,
            scale,
            sinks,
        )
        by_token = attended.reshape(rows, kv_heads, width, group, dim).transpose(1, 2)
        out.copy_(by_token.reshape(tokens, heads, dim))


def _gather(
    cache: Tensor, index: Tensor, scales: Tensor | None, of: int, dtype: torch.dtype
) -> Tensor:
    """Keys or values at places of a cache, `[places, kv_heads, dim]` of `dtype`."""
    found = as_bytes(cache).flatten(0, 1).index_select(0, index).view(cache.dtype)
    return widened(found, scales, of, dtype)
