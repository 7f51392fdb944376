"""Launches prefill attention on Hopper's warpgroups (`warpgroup_attention_kernel.py`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megatron_async.ops.attention.decode_attention import decode_tile
from megatron_async.ops.attention.join_parts import LOG2_E
from megatron_async.ops.attention.narrow_cache import check_dtypes
from megatron_async.ops.attention.prefill_attention import check_rows
from megatron_async.ops.attention.prefill_schedule import GROUP_QUERIES, PrefillSchedule
from megatron_async.ops.attention.warpgroup_attention_kernel import warpgroup_attention_kernel
from megatron_async.ops.attention.warpgroup_tiles import IN_SHARED_MEMORY, words_in_shared_memory
from megatron_async.ops.dependent_launch import HOPPER, launch_options

DTYPES = (torch.bfloat16, torch.float16)
DIMS = (64, 128)
"""Head dimensions that the kernel serves."""
MANY_TOKENS = 4096
"""Tokens of a step from which on large tiles of queries are enough for the whole device."""


class WarpgroupTile(NamedTuple):
    """Sizes of a program's tile."""

    warpgroups: int
    """Warpgroups that multiply, of 64 queries each; another warp loads."""
    keys: int
    stages: int
    """Tiles of keys, and of values, in shared memory at a time."""
    in_turns: bool = True
    """Whether the products of one warpgroup are behind those of the other, not between them."""
    widens: bool = False
    """Whether a third warpgroup widens a narrow cache beside two that multiply."""

    @property
    def programs(self) -> int:
        """Programs that fit a processor."""
        return 1

    @property
    def queries(self) -> int:
        """Query tokens times query heads of one KV head."""
        return self.warpgroups * GROUP_QUERIES.value

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies: a processor's 65,536, less 24 of each of the
        128 threads beside the loading warp, or 64 of each that widens."""
        if self.widens:
            return 224
        return 240 if self.warpgroups == 2 else 160


def warpgroup_tile_of(
    dim: int,
    block_size: int,
    tokens: int = MANY_TOKENS,
    in_parts: bool = False,
    is_narrow: bool = False,
) -> WarpgroupTile | None:
    """The tile for heads of `dim` elements, KV blocks of `block_size` tokens and a step of at most
    `tokens` tokens; None: there is none, as a tile of keys lies in one block. `in_parts`: as many
    keys as `decode_tile` has; the parts' sums leave registers for two warpgroups. `is_narrow`: of a
    cache in e4m3, which a third one widens.

    Tiles of 192 queries need fewer bytes, but are too large for few tokens. Products in turns pay
    with heads of 128, whose products take longer than their weights, and if a program has tens of
    tiles of keys (docs/records/prefill_attention.md).
    """
    if dim not in DIMS or block_size % 64:
        return None
    are_many = tokens >= 2048
    if in_parts:
        in_turns = are_many and dim == 128
        return WarpgroupTile(2, decode_tile(dim), 3 if is_narrow else 4, in_turns, is_narrow)
    if is_narrow:
        return WarpgroupTile(2, 64, 3, are_many and dim == 128, is_narrow)
    if dim == 128:
        if block_size % 128 == 0:
            return WarpgroupTile(2, 128, 2, in_turns=are_many)
        return WarpgroupTile(3, 64, 3) if are_many else WarpgroupTile(2, 64, 4, in_turns=False)
    if block_size % 128 == 0 and tokens < MANY_TOKENS:
        return WarpgroupTile(2, 128, 3, in_turns=False)
    return WarpgroupTile(3, 64, 4, in_turns=False)


def warpgroup_prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    schedule: PrefillSchedule,
    tile: WarpgroupTile,
    scale: float,
    out: Tensor,
    is_settled: bool = False,
    part: int = 0,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
    window: int = 0,
) -> None:
    """`paged_prefill_attention` of bfloat16 or float16; the tile's keys divide the block size, and
    with a `part` or a window the schedule divides no keys."""
    name = "warpgroup_prefill_attention"
    check_rows(name, query, key_cache, value_cache, block_tables, schedule, tile.queries, out)
    check_dtypes(name, query.dtype, key_cache, value_cache, scales)
    dim = query.size(2)
    block_size, kv_heads = key_cache.shape[1:3]
    if dim not in DIMS or query.dtype not in DTYPES or block_size % tile.keys:
        raise ValueError(
            f"{name}: no tile of {tile.keys} keys for {query.dtype}, heads of "
            f"{dim} and blocks of {block_size} tokens; it serves 16-bit dtypes, heads of 64 and "
            "128 and blocks of whole tiles (use paged_prefill_attention)."
        )
    if tile.widens != (scales is not None):
        raise ValueError(
            f"{name}: a tile that {'widens' if tile.widens else 'does not widen'} for caches of "
            f"{key_cache.dtype}: make it by warpgroup_tile_of(..., is_narrow=...)."
        )
    parts = schedule.parts
    if window and parts is not None:
        raise ValueError(
            f"{name}: keys are divided, which window={window} does not allow; make the schedule "
            "with processors=0."
        )
    if part and (parts is not None or part % tile.keys or tile.keys != decode_tile(dim)):
        raise ValueError(
            f"{name}: parts of {part} keys want a schedule of processors=0, and whole tiles of "
            f"{decode_tile(dim)} keys; found processors={schedule.processors} and tiles of "
            f"{tile.keys}."
        )
    if not len(schedule.units):
        return
    caches, columns, layout = (key_cache, value_cache), dim, IN_SHARED_MEMORY.value
    if scales is not None:
        # In words of four numbers.
        columns //= 4
        caches = key_cache.view(torch.int32), value_cache.view(torch.int32)
        layout = words_in_shared_memory(dim)
    keys, values = (
        TensorDescriptor.from_tensor(
            cache.view(-1, kv_heads * columns), [tile.keys, columns], layout
        )
        for cache in caches
    )
    # Without parts nothing is read of these.
    nothing = (out, out, out, schedule.units)
    warpgroup_attention_kernel[kv_heads, len(schedule.units)](
        query,
        keys,
        values,
        block_tables,
        block_tables.stride(0),
        schedule.units,
        scale * LOG2_E.value,
        scales,
        sinks,
        out,
        *(parts or nothing),
        schedule.slots,
        divides=parts is not None,
        block_size=block_size,
        group=schedule.group,
        kv_heads=kv_heads,
        dim=dim,
        key_tile=tile.keys,
        warpgroups=tile.warpgroups,
        stages=tile.stages,
        registers=tile.registers,
        in_turns=tile.in_turns,
        part=part,
        window=window,
        is_settled=is_settled,
        num_warps=4,
        **launch_options(query),
    )


def is_supported(device: torch.device) -> bool:
    """Whether a device has the matrix units of these warpgroups: compute capability 9.x alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER
