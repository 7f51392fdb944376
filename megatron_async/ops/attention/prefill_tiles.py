"""Arguments of prefill attention's kernels, and their tiles' sizes, as measured on an H200.

docs/records/prefill_attention.md has the figures.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from megatron_async.ops.attention.prefill_parts import PROGRAMS_A_PROCESSOR
from megatron_async.ops.dependent_launch import HOPPER


class Tile(NamedTuple):
    """Sizes of a program's tile, and options of its compilation."""

    queries: int
    """Query tokens times query heads of one KV head."""
    keys: int
    stages: int
    descriptors: bool = False
    """Whether keys and values are loaded by tensor descriptors (TMA)."""

    def programs(self, dim: int) -> int:
        """Programs that should share a processor, if their keys can be divided: with tiles of 128
        keys of 128 elements in three stages one fits."""
        return 1 if self.keys * dim > 64 * 128 else PROGRAMS_A_PROCESSOR


FEW_PROGRAMS = 128
"""A GPU runs as many at once: with fewer, a program's own time counts."""


def queries_of(dtype: torch.dtype, dim: int) -> int:
    """Queries of a tile, of any step."""
    return 32 if dtype == torch.float32 or dim > 128 else 64


def tile_of(query: Tensor, block_size: int) -> Tile:
    """The tile for a step: 64 queries and 4 warps, so that two or more programs share a processor
    and one computes softmax while the other multiplies.

    Args:
        query: `[tokens, heads, dim]`.
        block_size: tokens a KV block.
    """
    tokens, heads, dim = query.shape
    if queries_of(query.dtype, dim) == 32:
        return Tile(32, 32, 2)
    # Larger key tiles are fewer round trips for a program, and leave room for fewer programs.
    few = tokens * heads <= FEW_PROGRAMS * 64
    if block_size % 128 == 0 and (dim <= 64 or few):
        return Tile(64, 128, 3, _descriptors_fit(query))
    fits = block_size % 64 == 0 and _descriptors_fit(query)
    return Tile(64, 64, 2 if dim > 64 else 3, fits)


def _descriptors_fit(query: Tensor) -> bool:
    dim = query.size(2)
    if dim != triton.next_power_of_2(dim):
        return False
    # Off a GPU there is only Triton's interpreter, which has them.
    return not query.is_cuda or _is_hopper(query.device.index)


@lru_cache
def _is_hopper(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index)[0] >= HOPPER


def most_tiles(query: Tensor, group: int, rows: int, max_query_length: int, queries: int) -> int:
    """Tiles of queries that a KV head of any such rows has at most.

    Args:
        query: `[tokens, heads, dim]`.
        group: query heads of a KV head.
        rows: chunks.
        max_query_length: no chunk has more tokens.
        queries: of a tile.
    """
    # Every row may end with a tile that is not full.
    return min(
        rows * triton.cdiv(max_query_length * group, queries),
        (len(query) * group + rows * (queries - 1)) // queries,
    )


def check_rows(
    name: str,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    starts: Tensor,
    out: Tensor,
) -> None:
    """Check arguments of `paged_prefill_attention`, or of another function of this `name`.

    Raises:
        ValueError: shapes do not match.
    """
    rows = kv_lengths.numel()
    heads, dim = query.shape[1:]
    kv_heads, cache_dim = key_cache.shape[2:]
    if cache_dim != dim or heads % kv_heads or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"{name}: query {tuple(query.shape)} does not fit caches {tuple(key_cache.shape)} and "
            f"{tuple(value_cache.shape)}."
        )
    if starts.numel() != rows + 1 or block_tables.size(0) != rows or out.shape != query.shape:
        raise ValueError(
            f"{name}: {rows} rows want {rows + 1} starts and {rows} block tables, found "
            f"{starts.numel()} and {block_tables.size(0)}; out must be like query."
        )
