"""`HostPagedAttention`: attention on a CPU as one loop over the blocks of each row or token."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, override

import numpy as np
import torch
from torch import Tensor

from megatron_async.ops.attention.paged_attention import TorchPagedAttention
from megatron_async.ops.cpu.rows import run_shares, serves

if TYPE_CHECKING:
    from megatron_async.ops.batch_dimensions import BatchDimensions
    from megatron_async.ops.linear.rounded_rows import RoundedRows

LEAST_SHARED = 2**20
"""Elements of keys that decode rows read, counted for each query head, from which on threads share
the rows: some 400 microseconds of one core. To share costs about 130, mostly until a thread is
awake. SmolLM2-135M's step of eight rows takes 9 % less at 400 keys a row, and at 75 it would take 6
to 10 % more (docs/records/cpu_throughput.md, 2026-11-25)."""

LONGEST_CHUNK = 128
"""Keys of a prefill chunk up to which its tokens are decode rows, of one token each. torch's
product over all queries of a longer one takes less time than to read the keys for each."""
NO_SINKS = np.empty(0, np.float32)


def shares_of(lengths: np.ndarray, shares: int) -> list[int]:
    """Where to cut rows of so many keys (int64 `[rows]`, one at least positive) into at most so
    many shares, each of which reads about as many: ascending, from 0 to `rows`."""
    before = np.concatenate(([0], np.cumsum(lengths)))
    wanted = before[-1] * np.arange(1, shares) / shares
    cuts = np.abs(before[:, None] - wanted).argmin(0)
    return sorted({0, *cuts.tolist(), len(lengths)})  # sync-ok: NumPy


class DecodeRows(NamedTuple):
    """The decode rows of a pass, as `attention_kernels.decode_attention` takes them."""

    tables: np.ndarray
    """int32 `[rows, blocks]`."""
    last: np.ndarray
    """int64 `[rows * width]`: the last key that each query token sees."""
    block_size: int
    width: int
    first_key: int


def no_rows(block_size: int, blocks: int, first_key: int) -> DecodeRows:
    """Decode rows of a pass that has none."""
    tables, last = np.empty((0, blocks), np.int32), np.empty(0, np.int64)
    return DecodeRows(tables, last, block_size, 1, first_key)


class HostPagedAttention(TorchPagedAttention):
    """Float32 decode rows without gathering their keys and values; a row depends on no other one.
    Prefill chunks are torch's, as in `TorchPagedAttention`.

    Args:
        takes_chunks: tokens of short prefill chunks are decode rows too, so that compiled layers
            serve them (`models/compiled_layers.py`). In layers that run module by module a float32
            prompt of 32 to 100 tokens took 15 % longer so.
    """

    def __init__(
        self,
        block_size: int,
        max_blocks: int,
        device: torch.device,
        first_key: int = 0,
        takes_chunks: bool = False,
        window: int = 0,
        softcap: float = 0.0,
    ) -> None:
        super().__init__(block_size, max_blocks, device, first_key, window, softcap)
        self._takes_chunks = takes_chunks

    @override
    def begin_step(
        self,
        dims: BatchDimensions,
        block_tables: Tensor,
        kv_lengths: Tensor,
        prefill_starts: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        blocks = block_tables.size(1)
        self._rows = no_rows(self._block_size, blocks, self._first_key)
        self._short: list[tuple[int, DecodeRows]] = []
        self._shares: dict[int, list[tuple[int, int]]] = {}
        self._places = blocks * self._block_size
        super().begin_step(dims, block_tables, kv_lengths, prefill_starts, positions)

    @override
    def _begin_decode(
        self,
        dims: BatchDimensions,
        block_tables: Tensor,
        kv_lengths: Tensor,
        positions: Tensor | None,
    ) -> None:
        tables = np.ascontiguousarray(block_tables.numpy())
        if dims.width == 1:
            last = kv_lengths.numpy().astype(np.int64) - 1
        else:
            assert positions is not None
            last = positions[: dims.decode_tokens].numpy().astype(np.int64)
        self._rows = self._checked(tables, last, dims.width)

    def _checked(self, tables: np.ndarray, last: np.ndarray, width: int) -> DecodeRows:
        if last.min() < 0 or last.max() >= self._places:
            # The loops look up blocks without checks.
            raise IndexError(
                f"a decode row ends outside of the {self._places} tokens of a block table"
            )
        return DecodeRows(tables, last, self._block_size, width, self._first_key)

    @override
    def _begin_chunk(self, table: Tensor, start: int, query_length: int, kv_length: int) -> None:
        if not self._takes_chunks or kv_length > LONGEST_CHUNK:
            super()._begin_chunk(table, start, query_length, kv_length)
            return
        tables = np.repeat(table.numpy()[None], query_length, 0)
        last = np.arange(kv_length - query_length, kv_length)
        self._short.append((start, self._checked(tables, last, 1)))

    @property
    def is_all_rows(self) -> bool:
        """Whether compiled layers, which know no windows and no softcap, serve the pass that runs:
        no prefill chunk of it is torch's."""
        return not self._prefill and not self._window and not self._softcap

    def all_rows(self) -> DecodeRows:
        """Decode rows, and tokens of short chunks, of the pass that runs."""
        if not self._short:
            return self._rows
        tables, last, _, width, _ = self._rows
        parts = [(np.repeat(tables, width, 0), last)]
        parts += [(rows.tables, rows.last) for _, rows in self._short]
        tables, last = (np.concatenate(part) for part in zip(*parts, strict=True))
        return DecodeRows(tables, last, self._block_size, 1, self._first_key)

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
        output = super().attend(query, key_cache, value_cache, scale, scales, sinks, rounded)
        for start, rows in self._short:
            self._attend(rows, start, query, key_cache, value_cache, scale, output, sinks)
        return output

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
    ) -> None:
        self._attend(self._rows, 0, query, key_cache, value_cache, scale, out, sinks)

    def _attend(
        self,
        rows: DecodeRows,
        start: int,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """Attention of these rows, whose first query token is `start`."""
        from megatron_async.ops.attention.cpu import attention_kernels

        tokens = slice(start, start + len(rows.last))
        query, out = query[tokens], out[tokens]
        assert serves(query, key_cache, value_cache, out), "made for float32"
        arguments = (
            query.numpy(), key_cache.flatten(0, 1).numpy(), value_cache.flatten(0, 1).numpy(),
            rows.tables, rows.block_size, rows.last, rows.width, rows.first_key, self._window,
            np.float32(scale), np.float32(self._softcap),
            NO_SINKS if sinks is None else sinks.detach().numpy(),
        )  # fmt: skip
        target = out.numpy()
        if start not in self._shares:  # once for a pass
            self._shares[start] = _divided(rows, query[0].numel(), self._window)

        def attend(first_row: int, end_row: int) -> None:
            attention_kernels.decode_attention(*arguments, first_row, end_row, target)

        run_shares(attend, self._shares[start])


def _divided(rows: DecodeRows, elements: int, window: int) -> list[tuple[int, int]]:
    """Rows divided among threads, from the first of each share to its last; `elements` of a query
    token."""
    seen = rows.last + 1 if not window else np.minimum(rows.last + 1, window)
    keys = seen.reshape(len(rows.tables), rows.width).sum(1)
    if int(keys.sum()) * elements < LEAST_SHARED:
        return [(0, len(keys))]
    return list(pairwise(shares_of(keys, torch.get_num_threads())))
