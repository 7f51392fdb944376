"""Prefill attention by our own kernels (Triton, and Gluon for warpgroups), as backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import override

import torch
from torch import Tensor

from megatron_async.ops.attention.backends.base import (
    AttentionShape,
    PrefillBackend,
    PrefillRows,
    require,
    require_all_keys,
)
from megatron_async.ops.attention.prefill_attention import paged_prefill_attention
from megatron_async.ops.attention.prefill_schedule import PrefillSchedule
from megatron_async.ops.attention.prefill_tile import (
    PROGRAMS_A_PROCESSOR,
    Tile,
    queries_of,
    tile_of,
)
from megatron_async.ops.attention.warpgroup_attention import (
    DIMS,
    DTYPES,
    MANY_TOKENS,
    WarpgroupTile,
    is_supported,
    warpgroup_prefill_attention,
    warpgroup_tile_of,
)

OTHER = "use attention_backend='triton'"


class OwnKernelPrefill(PrefillBackend):
    """Prefill attention by a kernel that has its work from a `PrefillSchedule`, which runs once a
    step and is read by all layers.

    Args:
        shape: of the engine's attention.
        launch: launches the kernel for one layer, as `paged_prefill_attention` does.
        tile_of: the tile for a step whose chunks have at most so many tokens.
        queries: of a tile; each number that `tile_of` may choose.
        programs: most that share a processor.
        divides: whether keys of few queries are divided among programs.
        part: keys of the parts that the kernel walks; 0: parts follow the step.
    """

    captures = True
    lets_others_start = True

    def __init__(
        self,
        shape: AttentionShape,
        launch: Callable[..., None],
        tile_of: Callable[[int], Tile | WarpgroupTile],
        queries: Sequence[int],
        programs: int = 1,
        divides: bool = True,
        part: int = 0,
    ) -> None:
        self._launch, self._tile_of = launch, tile_of
        processors = 0
        if divides and shape.device.type == "cuda":
            processors = torch.cuda.get_device_properties(shape.device).multi_processor_count
        self._schedules = {
            count: PrefillSchedule(
                shape.kv_heads,
                shape.heads // shape.kv_heads,
                count,
                shape.dim,
                shape.device,
                processors,
                programs,
                part,
            )
            for count in queries
        }
        self._is_settled = False

    @override
    def begin_step(self, rows: PrefillRows) -> None:
        super().begin_step(rows)
        self._tile = tile = self._tile_of(rows.tokens)
        self._schedules[tile.queries].update(
            rows.kv_lengths,
            rows.starts,
            rows.tokens,
            rows.max_query_length,
            tile.keys,
            tile.programs,
        )
        self._is_settled = False

    @override
    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        out: Tensor | None = None,
        scales: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(query) if out is None else out
        self._launch(
            query,
            key_cache,
            value_cache,
            self.rows.block_tables,
            self._schedules[self._tile.queries],
            self._tile,
            scale,
            out,
            self._is_settled,
            **({} if scales is None else {"scales": scales}),
            **({} if sinks is None else {"sinks": sinks}),
        )
        # The first layer waited for the schedule before it let the next kernel start.
        self._is_settled = True
        return out


class TritonPrefill(OwnKernelPrefill):
    """Prefill attention by the Triton kernel of `ops/attention/prefill_attention.py`. Queries
    behind position `first_key` do not see the keys before it; without it, in parts of the shape's
    length, a query has the bits of a decode row."""

    name = "triton"

    def __init__(self, shape: AttentionShape, first_key: int = 0) -> None:
        part = 0 if first_key else shape.part
        sizes = shape.heads, shape.dim, shape.block_size, shape.dtype, shape.device

        def tile(tokens: int) -> Tile:
            return tile_of(tokens, *sizes, in_parts=part > 0)

        super().__init__(
            shape,
            partial(
                paged_prefill_attention,
                first_key=first_key,
                part=part,
                window=shape.window,
                softcap=shape.softcap,
            ),
            tile,
            [queries_of(shape.dtype, shape.dim)],
            PROGRAMS_A_PROCESSOR,
            divides=not first_key and not shape.window,
            part=part,
        )


class WarpgroupPrefill(OwnKernelPrefill):
    """Prefill attention by the Gluon kernel of `ops/attention/warpgroup_attention_kernel.py`. In
    parts of the shape's length a query has the bits of a decode row, and no keys are divided.

    Raises:
        BackendUnavailable: the GPU or the shape does not fit.
    """

    name = "warpgroup"

    def __init__(self, shape: AttentionShape) -> None:
        part = shape.part
        require_all_keys(self.name, replace(shape, window=0, has_sinks=False))
        is_hopper = is_supported(shape.device)
        require(is_hopper, self.name, f"{shape.device} is not a Hopper GPU", OTHER)
        require(
            shape.dtype in DTYPES,
            self.name,
            f"it computes in bfloat16 or float16, not {shape.dtype}",
            f"change dtype or {OTHER}",
        )
        require(
            warpgroup_tile_of(shape.dim, shape.block_size) is not None,
            self.name,
            f"heads of dimension {shape.dim} with blocks of {shape.block_size} tokens are not "
            f"heads of {' or '.join(map(str, DIMS))} with blocks of a multiple of 64",
            f"change block_size_tokens or {OTHER}",
        )

        def tile(tokens: int) -> WarpgroupTile:
            sizes = shape.dim, shape.block_size
            found = warpgroup_tile_of(*sizes, tokens, part > 0, shape.is_narrow)
            assert found is not None
            return found

        super().__init__(
            shape,
            partial(warpgroup_prefill_attention, part=part, window=shape.window),
            tile,
            sorted({tile(tokens).queries for tokens in (1, MANY_TOKENS)}),
            divides=not part and not shape.window,
            part=part,
        )
