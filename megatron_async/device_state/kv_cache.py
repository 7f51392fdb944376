"""The paged KV cache: one tensor for all layers, data by block, and the size of the pool."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_async.device_state.cache_layout import CacheLayout, cache_layout
from megatron_async.device_state.pools import GIB, Pools
from megatron_async.errors import OutOfMemoryError
from megatron_async.ops.attention.narrow_cache import NARROW, scales_of

logger = logging.getLogger("megatron_async")
MIB = 1024**2
DEFAULT_CPU_POOL_GB = 1.0
DEFAULT_GPU_SHARE = 0.8
TOKEN_BYTES = torch.int32.itemsize
"""Bytes of a token id that is kept beside the keys."""


@dataclass(frozen=True)
class RoutingShape:
    """The routing record of a token: the experts that it goes to in each layer."""

    num_layers: int
    """Layers with experts."""
    topk: int
    """Experts of a token in a layer."""
    num_experts: int
    """Experts of a layer, on all ranks."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the ids: the smallest that holds them, read as one without a sign. (Torch
        computes little with uint16.)"""
        return torch.uint8 if self.num_experts <= 256 else torch.int16

    @property
    def num_bytes(self) -> int:
        """Size of a token's record."""
        return self.num_layers * self.topk * self.dtype.itemsize


@dataclass(frozen=True)
class BlockShape:
    """What a KV block holds on one rank."""

    num_layers: int
    """Layers whose keys and values it holds."""
    block_size: int
    """Tokens of a block."""
    num_heads: int
    """Key/value heads."""
    head_dim: int
    """Elements of a head."""
    dtype: torch.dtype
    """Dtype of hidden states, and of keys and values unless `is_narrow`."""
    keeps_tokens: bool = False
    """Whether token ids are kept beside the keys, for requests that begin after shared blocks and
    for the n-gram drafter."""
    hidden_size: int = 0
    """Elements of a hidden state that is kept for a draft model."""
    num_hidden: int = 0
    """Hidden states that are kept: one for each depth that drafts."""

    routing: RoutingShape | None = None
    """Sizes of the routing record that is kept beside the keys; None: none is."""
    is_narrow: bool = False
    """Whether keys and values are e4m3, with a scale for each head (`narrow_cache.py`)."""

    @property
    def key_dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return NARROW if self.is_narrow else self.dtype

    @property
    def num_bytes(self) -> int:
        """Size of a block over all layers."""
        tokens = self.block_size * TOKEN_BYTES if self.keeps_tokens else 0
        if self.routing is not None:
            tokens += self.block_size * self.routing.num_bytes
        elements = 2 * self.num_layers * self.block_size * self.num_heads * self.head_dim
        hidden = self.num_hidden * self.hidden_size * self.dtype.itemsize
        return elements * self.key_dtype.itemsize + hidden + tokens


class PagedKVCache:
    """Keys and values of every layer in blocks.

    Args:
        shape: of a block.
        num_blocks: usable blocks; one more is allocated, the dummy block, which rows without a
            request write to.
        pools: its memory.
        layout: of the layers; None: all are full.

    Attributes:
        num_layers: of the stage.
        block_size: of `shape`.
        layout: as given.
        scales: of keys and values that are e4m3, by layer, as `scales_of` makes them: 1, unless a
            model has its own. Kept while the cache is released. None: they are not e4m3.
        dummy_block: id of the dummy block.
        block_tokens: int32 `[blocks, block size]`: the token whose keys are at the same place.
            Written by the unpacking of each step, before the keys. None if no tokens are kept, and
            while the cache is released.
        block_hidden: `[hidden states, blocks, hidden size]`: the input of each depth of a draft
            model. The first is the model's hidden state, after its last norm, of a full block's
            last token, or of the last token of a chunk that ended in the block. The others are the
            previous depth's output for the same token, or for the last known token. A depth needs
            the hidden state before its first token; a row reads it here, from a shared block or
            from its own. Zeros for the dummy block. Written by each step after its forward; None
            if no hidden states are kept, and while the cache is released.
        block_routing: `[blocks, block size, layers, topk]`, in the dtype of a `RoutingShape`: the
            experts of the token whose keys are at the same place. Written by each step after its
            forward; None if no record is kept, and while the cache is released.
    """

    def __init__(
        self,
        shape: BlockShape,
        num_blocks: int,
        pools: Pools,
        layout: CacheLayout | None = None,
    ) -> None:
        self._shape, self._pools = shape, pools
        self.layout = layout or cache_layout([[0] * shape.num_layers])
        self.num_layers, self.block_size = len(self.layout.places), shape.block_size
        self.dummy_block = num_blocks
        self.scales: list[Tensor] | None = None
        if shape.is_narrow:
            ones = torch.ones(shape.num_heads, device=pools.device)
            self.scales = [scales_of(ones, ones)] * len(self.layout.places)
        self._data: Tensor | None = None
        self.block_tokens: Tensor | None = None
        self.block_hidden: Tensor | None = None
        self.block_routing: Tensor | None = None
        self.allocate()

    @property
    def num_bytes(self) -> int:
        """Size of the whole cache, also while it is released."""
        return (self.dummy_block + 1) * self._shape.num_bytes

    def allocate(self) -> None:
        """Take the tensors, which are zeros."""
        shape, blocks, zeros = self._shape, self.dummy_block + 1, self._pools.zeros
        places, head = (blocks, shape.block_size), (shape.num_heads, shape.head_dim)
        # Zeroed because a masked position has weight 0, and 0 times a stray NaN is NaN.
        whole = (shape.num_layers, 2, *places, *head)
        self._data = zeros("keys and values", whole, shape.key_dtype)
        if shape.keeps_tokens:
            self.block_tokens = zeros("tokens of blocks", places, torch.int32)
        if shape.num_hidden:
            hidden = (shape.num_hidden, blocks, shape.hidden_size)
            self.block_hidden = zeros("hidden states of blocks", hidden, shape.dtype)
        if (routing := shape.routing) is not None:
            record = (*places, routing.num_layers, routing.topk)
            self.block_routing = zeros("routing of blocks", record, routing.dtype)

    def release(self) -> None:
        """Let go of the tensors, before the pools do; no step may run until `allocate`."""
        self._data = self.block_tokens = self.block_hidden = self.block_routing = None

    def table_of(self, layer: int) -> int:
        """The block table of a layer."""
        return self.layout.places[layer][0]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Key and value cache of a layer, each `[blocks, block size, heads, dim]`."""
        assert self._data is not None, "a step on a released KV cache"
        data = self._data[self.layout.places[index][1]]
        return data[0], data[1]

    def take_scales(self, of_model: Sequence[Tensor | None]) -> None:
        """Take the scales that a model has of its layers, if keys and values are e4m3, and tell
        what has none."""
        if self.scales is None:
            return
        self.scales = [
            own if given is None else given
            for own, given in zip(self.scales, of_model, strict=True)
        ]
        if without := sum(given is None for given in of_model):
            logger.warning(
                "keys and values in fp8: the model's files have no scales for %d of %d layers, "
                "where 1 is taken: numbers beyond 448 are cut.", without, len(of_model),
            )  # fmt: skip

    def scales_of_layer(self, index: int) -> Tensor | None:
        """`scales` of a layer; None: its keys and values are not e4m3."""
        return None if self.scales is None else self.scales[index]


def blocks_that_fit(
    block_bytes: int,
    free_bytes: int,
    device: torch.device,
    num_kv_blocks: int | None,
    buffer_size_gb: float | None,
) -> int:
    """Number of usable blocks of the pool that was asked for.

    Args:
        block_bytes: `BlockShape.num_bytes`.
        free_bytes: memory free on the device.
        device: decides the default size.
        num_kv_blocks: exact number, or None.
        buffer_size_gb: pool size in GiB, or None for the default.

    Raises:
        OutOfMemoryError: it does not fit, or not even one block does.
    """
    if num_kv_blocks is None:
        if buffer_size_gb is not None:
            pool = int(buffer_size_gb * GIB)
        elif device.type == "cpu":
            pool = min(int(DEFAULT_CPU_POOL_GB * GIB), int(DEFAULT_GPU_SHARE * free_bytes))
        else:
            pool = int(DEFAULT_GPU_SHARE * free_bytes)
        # One block of the pool is the dummy block.
        num_kv_blocks = pool // block_bytes - 1
        asked = f"buffer_size_gb={pool / GIB:.3g}"
        if num_kv_blocks < 1:
            least = _gib(2 * block_bytes, math.ceil)
            raise OutOfMemoryError(
                f"{asked} holds no usable KV block: one block takes {block_bytes / GIB:.3g} GiB "
                f"and one more is the dummy block. Give at least buffer_size_gb={least}, or a "
                "smaller block_size_tokens."
            )
    else:
        asked = f"num_kv_blocks={num_kv_blocks}"
    needed = (num_kv_blocks + 1) * block_bytes
    if needed > free_bytes:
        fit = free_bytes // block_bytes - 1
        remedy = "Not even one block fits: lower block_size_tokens."
        if fit > 0:
            largest = _gib(free_bytes, math.floor)
            remedy = f"At most num_kv_blocks={fit} (buffer_size_gb={largest}) fits."
        raise OutOfMemoryError(
            f"{asked} needs {needed / GIB:.3g} GiB on {device}, but {free_bytes / GIB:.3g} GiB is "
            f"free. {remedy}"
        )
    return num_kv_blocks


def _gib(size: int, rounding: Callable[[float], int]) -> float:
    """`size` bytes in GiB, rounded to the safe side, so that the advice works when followed."""
    return rounding(size / GIB * 1e6) / 1e6
