"""Launches prefill attention on Hopper's warpgroups (`warpgroup_attention_kernel.py`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megatron_async.ops.attention.prefill_attention import LOG2_E
from megatron_async.ops.attention.prefill_tiles import check_rows, most_tiles
from megatron_async.ops.attention.warpgroup_attention_kernel import (
    GROUP_QUERIES,
    warpgroup_attention_kernel,
)
from megatron_async.ops.dependent_launch import HOPPER, launch_options

IN_SHARED_MEMORY = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""How the copy engine stores keys and values, and the matrix units read them."""
DTYPES = (torch.bfloat16, torch.float16)
DIMS = (64, 128)
"""Head dimensions that the kernel serves."""


class WarpgroupTile(NamedTuple):
    """Sizes of a program's tile."""

    warpgroups: int
    """Warpgroups that multiply, of 64 queries each; another warp loads."""
    keys: int
    stages: int
    """Tiles of keys, and of values, in shared memory at a time."""
    in_turns: bool = True
    """Whether the products of one warpgroup are behind those of the other, not between them."""

    @property
    def queries(self) -> int:
        """Query tokens times query heads of one KV head."""
        return self.warpgroups * GROUP_QUERIES.value

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies: a processor's 65,536, less 24 of each of the
        128 threads beside the loading warp."""
        return 240 if self.warpgroups == 2 else 160


def tile_of(dim: int, block_size: int) -> WarpgroupTile | None:
    """The tile for heads of `dim` elements and KV blocks of `block_size` tokens; None: there is
    none, as a tile of keys lies in one block."""
    if dim not in DIMS:
        return None
    if block_size % 128 == 0:
        return WarpgroupTile(2, 128, 2 if dim == 128 else 3)
    if block_size % 64 == 0:
        return WarpgroupTile(3, 64, 3 if dim == 128 else 4)
    return None


def warpgroup_prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    starts: Tensor,
    max_query_length: int,
    scale: float,
    out: Tensor,
    tile: WarpgroupTile | None = None,
) -> None:
    """Attention of prefill rows over the paged cache, this step's keys and values already in place.

    Args:
        query: `[tokens, heads, dim]`, contiguous, bfloat16 or float16: the chunks' tokens end to
            end, perhaps between others.
        key_cache, value_cache: `[blocks, block size, kv heads, dim]`, contiguous.
        block_tables: int32 `[rows, blocks]`.
        kv_lengths: int32 `[rows]`: a chunk's last token is at position KV length - 1.
        starts: int32 `[rows + 1]`: tokens of row i are starts[i] .. starts[i + 1] - 1.
        max_query_length: no chunk has more tokens.
        scale: softmax scale, above 0.
        out: `[tokens, heads, dim]`, contiguous; written for the rows' tokens, left alone for
            others.
        tile: its keys divide the block size; None: the rule's (`tile_of`).

    Raises:
        ValueError: shapes do not match, or there is no tile for them.
    """
    check_rows(
        "warpgroup_prefill_attention",
        query,
        key_cache,
        value_cache,
        block_tables,
        kv_lengths,
        starts,
        out,
    )
    _tokens, heads, dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    rows = kv_lengths.numel()
    tile = tile or tile_of(dim, block_size)
    if tile is None or query.dtype not in DTYPES or block_size % tile.keys:
        raise ValueError(
            f"warpgroup_prefill_attention: no tile for {query.dtype}, heads of {dim} and blocks of "
            f"{block_size} tokens; it serves 16-bit dtypes, heads of 64 and 128 and blocks of a "
            "multiple of 64 (use paged_prefill_attention)."
        )
    if not rows or not max_query_length:
        return
    group = heads // kv_heads
    tiles = most_tiles(query, group, rows, max_query_length, tile.queries)
    keys, values = (
        TensorDescriptor.from_tensor(
            cache.view(-1, kv_heads * dim), [tile.keys, dim], IN_SHARED_MEMORY
        )
        for cache in (key_cache, value_cache)
    )
    warpgroup_attention_kernel[kv_heads, tiles](
        query,
        keys,
        values,
        block_tables,
        block_tables.stride(0),
        kv_lengths,
        starts,
        rows,
        scale * LOG2_E,
        out,
        block_size=block_size,
        group=group,
        kv_heads=kv_heads,
        rows_tile=max(triton.next_power_of_2(rows), 16),
        warpgroups=tile.warpgroups,
        stages=tile.stages,
        registers=tile.registers,
        in_turns=tile.in_turns,
        num_warps=4,
        **launch_options(query),
    )


def is_supported(device: torch.device) -> bool:
    """Whether a device has the matrix units of these warpgroups: compute capability 9.x alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER
