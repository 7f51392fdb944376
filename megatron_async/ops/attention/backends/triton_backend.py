"""Prefill attention with our own kernel: every dtype, head and block size, no package."""

from __future__ import annotations

from functools import partial

from megatron_async.ops.attention.backends.base import AttentionShape
from megatron_async.ops.attention.backends.own_kernel import OwnKernelPrefill
from megatron_async.ops.attention.prefill_attention import paged_prefill_attention
from megatron_async.ops.attention.prefill_tiles import (
    PROGRAMS_A_PROCESSOR,
    Tile,
    queries_of,
    tile_of,
)


class TritonPrefill(OwnKernelPrefill):
    """Prefill attention by the Triton kernel of `ops/attention/prefill_attention.py`.

    Args:
        shape: of the engine's attention.
        first_key: queries behind this position do not see the keys before it.
    """

    name = "triton"

    def __init__(self, shape: AttentionShape, first_key: int = 0) -> None:
        def tile(tokens: int) -> Tile:
            return tile_of(
                tokens, shape.heads, shape.dim, shape.block_size, shape.dtype, shape.device
            )

        super().__init__(
            shape,
            partial(paged_prefill_attention, first_key=first_key),
            tile,
            [queries_of(shape.dtype, shape.dim)],
            PROGRAMS_A_PROCESSOR,
            divides=not first_key,
        )
