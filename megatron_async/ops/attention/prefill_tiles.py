"""Arguments of prefill attention's kernels, and their tiles' sizes, as measured on an H200.

docs/records/prefill_attention.md has the figures.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from megatron_async.ops.attention.prefill_schedule import PrefillSchedule
from megatron_async.ops.dependent_launch import HOPPER

PROGRAMS_A_PROCESSOR = 2
"""Programs that the parts of a step should make, if two fit a processor; decode attention's parts
make as many (`decode_schedule.py`)."""


class Tile(NamedTuple):
    """Sizes of a program's tile, and options of its compilation."""

    queries: int
    """Query tokens times query heads of one KV head."""
    keys: int
    stages: int
    descriptors: bool = False
    """Whether keys and values are loaded by tensor descriptors (TMA)."""
    programs: int = 1
    """That should share a processor, if their keys can be divided."""


FEW_PROGRAMS = 128
"""A GPU runs as many at once: with fewer, a program's own time counts."""


def queries_of(dtype: torch.dtype, dim: int) -> int:
    """Queries of a tile, of any step."""
    return 32 if dtype == torch.float32 or dim > 128 else 64


def tile_of(
    tokens: int, heads: int, dim: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tile:
    """The tile for a step: 64 queries and 4 warps, so that two or more programs share a processor
    and one computes softmax while the other multiplies.

    Args:
        tokens: of the step's chunks, at most.
        heads, dim: query heads, and size of a head.
        block_size: tokens a KV block.
        dtype: of queries and cache.
        device: where they are.
    """
    if queries_of(dtype, dim) == 32:
        return Tile(32, 32, 2, programs=PROGRAMS_A_PROCESSOR)
    # Larger key tiles are fewer round trips for a program, and leave room for fewer programs.
    few = tokens * heads <= FEW_PROGRAMS * 64
    if block_size % 128 == 0 and (dim <= 64 or few):
        # In three stages, tiles of 128 keys of 128 elements leave room for one program.
        programs = 1 if dim > 64 else PROGRAMS_A_PROCESSOR
        return Tile(64, 128, 3, _descriptors_fit(dim, device), programs)
    fits = block_size % 64 == 0 and _descriptors_fit(dim, device)
    return Tile(64, 64, 2 if dim > 64 else 3, fits, PROGRAMS_A_PROCESSOR)


def _descriptors_fit(dim: int, device: torch.device) -> bool:
    if dim != triton.next_power_of_2(dim):
        return False
    # Off a GPU there is only Triton's interpreter, which has them.
    return device.type != "cuda" or _is_hopper(device.index)


@lru_cache
def _is_hopper(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index)[0] >= HOPPER


def check_rows(
    name: str,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    schedule: PrefillSchedule,
    queries: int,
    out: Tensor,
) -> None:
    """Check arguments of `paged_prefill_attention`, or of another function of this `name`.

    Raises:
        ValueError: shapes do not match.
    """
    heads, dim = query.shape[1:]
    kv_heads, cache_dim = key_cache.shape[2:]
    if cache_dim != dim or heads % kv_heads or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"{name}: query {tuple(query.shape)} does not fit caches {tuple(key_cache.shape)} and "
            f"{tuple(value_cache.shape)}."
        )
    if block_tables.size(0) != schedule.rows or out.shape != query.shape:
        raise ValueError(
            f"{name}: {schedule.rows} rows want {schedule.rows} block tables, found "
            f"{block_tables.size(0)}; out must be like query."
        )
    made_for = schedule.kv_heads, schedule.group, schedule.queries, schedule.dim
    if made_for != (kv_heads, heads // kv_heads, queries, dim):
        raise ValueError(
            f"{name}: the schedule was made for {made_for[0]} KV heads of {made_for[1]} query "
            f"heads and tiles of {made_for[2]} queries of {made_for[3]}; here are {kv_heads} of "
            f"{heads // kv_heads}, {queries} and {dim}."
        )
