"""`Tile`: sizes of a program of prefill attention, as measured on an H200
(docs/records/prefill_attention.md)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

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
    """Programs that should share a processor, if their keys can be divided."""


FEW_PROGRAMS = 128
"""A GPU runs as many at once: with fewer, a program's own time counts."""


def queries_of(dtype: torch.dtype, dim: int) -> int:
    """Queries of a tile, of any step."""
    return 32 if dtype == torch.float32 or dim > 128 else 64


def tile_of(
    tokens: int,
    heads: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    in_parts: bool = False,
) -> Tile:
    """The tile for a step whose chunks have at most so many tokens: 64 queries and 4 warps, so that
    two or more programs share a processor and one computes softmax while the other multiplies.
    `in_parts`: as many keys as `decode_tile` has, whatever the step."""
    if queries_of(dtype, dim) == 32:
        return Tile(32, 32, 2, programs=PROGRAMS_A_PROCESSOR)
    # Larger key tiles are fewer round trips for a program, and leave room for fewer programs.
    few = tokens * heads <= FEW_PROGRAMS * 64
    if block_size % 128 == 0 and (dim <= 64 or few) and not in_parts:
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
