"""`HostPagedAttention`: attention of decode rows on a CPU as one loop over the blocks of each."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, override

import numpy as np
import torch
from torch import Tensor

from megatron_async.ops.attention.paged_attention import TorchPagedAttention
from megatron_async.ops.cpu.rows import serves
from megatron_async.ops.cpu.threads import run_shares

if TYPE_CHECKING:
    from megatron_async.device_state.batch_dimensions import BatchDimensions

LEAST_SHARED = 2**20
"""Elements of keys that decode rows read, counted for each query head, from which on threads share
the rows: some 400 microseconds of one core. To share costs about 130, mostly until a thread is
awake. SmolLM2-135M's step of eight rows takes 9 % less at 400 keys a row, and at 75 it would take 6
to 10 % more (docs/records/cpu_throughput.md, 2026-11-25)."""


def shares_of(lengths: np.ndarray, shares: int) -> list[int]:
    """Where to cut rows so that each share reads about as many keys.

    Args:
        lengths: int64 `[rows]`, keys of each row, at least one of them positive.
        shares: at most so many; at least 1.

    Returns:
        ascending, from 0 to `rows`; share i is the rows from element i to element i + 1.
    """
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


class HostPagedAttention(TorchPagedAttention):
    """Float32 decode rows without gathering their keys and values; a row depends on no other one.

    Prefill rows are torch's, as in `TorchPagedAttention`, whose arguments it takes.
    """

    @override
    def _begin_decode(
        self,
        dims: BatchDimensions,
        block_tables: Tensor,
        kv_lengths: Tensor,
        positions: Tensor | None,
    ) -> None:
        self._tables = np.ascontiguousarray(block_tables.numpy())
        if dims.width == 1:
            self._last = kv_lengths.numpy().astype(np.int64) - 1
        else:
            assert positions is not None
            self._last = positions[: dims.decode_tokens].numpy().astype(np.int64)
        places = self._tables.shape[1] * self._block_size
        if self._last.min() < 0 or self._last.max() >= places:
            # The loops look up blocks without checks.
            raise IndexError(f"a decode row ends outside of the {places} tokens of a block table")
        self._shares: list[tuple[int, int]] = []

    def _divide(self) -> None:
        """Divide the rows among threads, once for a pass; compiled layers do it by themselves."""
        rows, width = len(self._tables), self._width
        keys = self._last[: rows * width].reshape(rows, width).sum(1) + width
        self._num_keys = int(keys.sum())
        self._shares = list(pairwise(shares_of(keys, torch.get_num_threads())))

    def decode_rows(self) -> DecodeRows:
        """The decode rows of the pass that runs."""
        return DecodeRows(self._tables, self._last, self._block_size, self._width, self._first_key)

    @override
    def _decode(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, out: Tensor
    ) -> None:
        from megatron_async.ops.cpu import attention_kernels

        assert serves(query, key_cache, value_cache, out), "made for float32"
        arguments = (
            query.numpy(), key_cache.flatten(0, 1).numpy(), value_cache.flatten(0, 1).numpy(),
            self._tables, self._block_size, self._last, self._width, self._first_key,
            np.float32(scale),
        )  # fmt: skip
        target = out.numpy()
        if not self._shares:
            self._divide()

        def attend(first_row: int, end_row: int) -> None:
            attention_kernels.decode_attention(*arguments, first_row, end_row, target)

        is_small = self._num_keys * query[0].numel() < LEAST_SHARED
        run_shares(attend, [(0, len(self._tables))] if is_small else self._shares)
