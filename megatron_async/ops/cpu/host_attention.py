"""`HostPagedAttention`: attention of decode rows on a CPU as one loop over the blocks of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, override

import numpy as np
from torch import Tensor

from megatron_async.ops.attention.paged_attention import TorchPagedAttention
from megatron_async.ops.cpu.rows import serves

if TYPE_CHECKING:
    from megatron_async.device_state.batch_dimensions import BatchDimensions


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

    @override
    def _decode(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, out: Tensor
    ) -> None:
        from megatron_async.ops.cpu import attention_kernels

        assert serves(query, key_cache, value_cache, out), "made for float32"
        attention_kernels.decode_attention(
            query.numpy(), key_cache.flatten(0, 1).numpy(), value_cache.flatten(0, 1).numpy(),
            self._tables, self._block_size, self._last, self._width, self._first_key,
            np.float32(scale), 0, len(self._tables), out.numpy(),
        )  # fmt: skip
