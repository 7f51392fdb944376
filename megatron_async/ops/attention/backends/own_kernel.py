"""`OwnKernelPrefill`: what our own kernels of prefill attention have in common as backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import override

import torch
from torch import Tensor

from megatron_async.ops.attention.backends.base import PrefillBackend


class OwnKernelPrefill(PrefillBackend):
    """Prefill attention by a kernel that finds its rows on the device.

    Args:
        launch: takes query, caches, block tables, KV lengths, starts, the longest chunk's tokens,
            the scale and the output, as `paged_prefill_attention` does.
    """

    captures = True
    lets_others_start = True

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

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
        self._launch(
            query,
            key_cache,
            value_cache,
            rows.block_tables,
            rows.kv_lengths,
            rows.starts,
            rows.max_query_length,
            scale,
            out,
        )
        return out
