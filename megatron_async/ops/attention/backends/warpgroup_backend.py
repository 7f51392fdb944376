"""Prefill attention with our own kernel for Hopper's warpgroups."""

from __future__ import annotations

from megatron_async.ops.attention.backends.base import AttentionShape, require
from megatron_async.ops.attention.backends.own_kernel import OwnKernelPrefill
from megatron_async.ops.attention.warpgroup_attention import (
    DIMS,
    DTYPES,
    MANY_TOKENS,
    WarpgroupTile,
    is_supported,
    tile_of,
    warpgroup_prefill_attention,
)

OTHER = "use attention_backend='triton'"


class WarpgroupPrefill(OwnKernelPrefill):
    """Prefill attention by the Gluon kernel of `ops/attention/warpgroup_attention_kernel.py`.

    Args:
        shape: of the engine's attention.

    Raises:
        BackendUnavailable: the GPU or the shape does not fit.
    """

    name = "warpgroup"

    def __init__(self, shape: AttentionShape) -> None:
        is_hopper = is_supported(shape.device)
        require(is_hopper, self.name, f"{shape.device} is not a Hopper GPU", OTHER)
        require(
            shape.dtype in DTYPES,
            self.name,
            f"it computes in bfloat16 or float16, not {shape.dtype}",
            f"change dtype or {OTHER}",
        )
        require(
            tile_of(shape.dim, shape.block_size) is not None,
            self.name,
            f"heads of dimension {shape.dim} with blocks of {shape.block_size} tokens are not "
            f"heads of {' or '.join(map(str, DIMS))} with blocks of a multiple of 64",
            f"change block_size_tokens or {OTHER}",
        )

        def tile(tokens: int) -> WarpgroupTile:
            found = tile_of(shape.dim, shape.block_size, tokens)
            assert found is not None
            return found

        queries = {tile(tokens).queries for tokens in (1, MANY_TOKENS)}
        super().__init__(shape, warpgroup_prefill_attention, tile, sorted(queries))
