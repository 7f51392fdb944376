"""`OwnKernelPrefill`: what our own kernels of prefill attention have in common as backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, override

import torch
from torch import Tensor

from megatron_async.ops.attention.backends.base import (
    AttentionShape,
    PrefillBackend,
    PrefillRows,
)
from megatron_async.ops.attention.prefill_attention import (
    PROGRAMS_A_PROCESSOR,
    Tile,
    paged_prefill_attention,
    queries_of,
    tile_of,
)
from megatron_async.ops.attention.prefill_schedule import PrefillSchedule


class KernelTile(Protocol):
    """What a schedule has to know of a kernel's tile."""

    @property
    def queries(self) -> int:
        """Query tokens times query heads of one KV head."""
        ...

    @property
    def keys(self) -> int:
        """Keys that a program takes together."""
        ...

    @property
    def programs(self) -> int:
        """Programs that should share a processor, if keys are divided."""
        ...


class OwnKernelPrefill(PrefillBackend):
    """Prefill attention by a kernel that has its work from a `PrefillSchedule`.

    The schedule's kernel runs once a step, and the layers read what it wrote.

    Args:
        shape: of the engine's attention.
        launch: launches the kernel for one layer, as `paged_prefill_attention` does.
        tile_of: the tile for a step whose chunks have at most so many tokens.
        queries: of a tile; each number that `tile_of` may choose.
        programs: most that share a processor.
        divides: whether keys of few queries are divided among programs.
    """

    captures = True
    lets_others_start = True

    def __init__(
        self,
        shape: AttentionShape,
        launch: Callable[..., None],
        tile_of: Callable[[int], KernelTile],
        queries: Sequence[int],
        programs: int = 1,
        divides: bool = True,
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
        )
        # The first layer waited for the schedule before it let the next kernel start.
        self._is_settled = True
        return out


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
