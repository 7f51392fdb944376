"""The paged KV cache: one tensor for all layers, data by block, and the size of the pool."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_async.devices import makes_ordinary_tensors
from megatron_async.errors import OutOfMemoryError

MIB = 1024**2
GIB = 1024**3
DEFAULT_CPU_POOL_GB = 1.0
DEFAULT_GPU_SHARE = 0.8
TOKEN_BYTES = torch.int32.itemsize
"""Bytes of a token id that is kept beside the keys."""


class PagedKVCache:
    """Keys and values of every layer in blocks.

    Args:
        num_layers: attention layers.
        num_blocks: usable blocks; one more is allocated, the dummy block, which rows without a
            request write to.
        block_size: tokens a block.
        num_heads: key/value heads.
        head_dim: size of a head.
        dtype: of keys and values.
        device: where the cache lives.
        keeps_tokens: keep token ids beside the keys, for requests that begin after shared blocks
            and for the n-gram drafter.
        hidden_size: elements of a hidden state that each block keeps, for a draft model; 0: blocks
            keep none.
        num_hidden: hidden states that each block keeps: one for each depth that drafts.

    Attributes:
        num_layers: as given.
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
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        keeps_tokens: bool = False,
        hidden_size: int = 0,
        num_hidden: int = 1,
    ) -> None:
        self.num_layers = num_layers
        self.dummy_block = num_blocks
        self.block_size = block_size
        self._shape = (num_layers, 2, num_blocks + 1, block_size, num_heads, head_dim)
        self._dtype, self._device = dtype, device
        self._keeps_tokens = keeps_tokens
        self._hidden_shape = num_hidden, num_blocks + 1, hidden_size
        self._data: Tensor | None = None
        self.block_tokens: Tensor | None = None
        self.block_hidden: Tensor | None = None
        self.allocate()

    @property
    def num_bytes(self) -> int:
        """Size of the whole cache, also while it is released."""
        tokens = math.prod(self._shape[2:4]) * TOKEN_BYTES if self._keeps_tokens else 0
        elements = math.prod(self._shape) + math.prod(self._hidden_shape)
        return elements * self._dtype.itemsize + tokens

    @makes_ordinary_tensors
    def allocate(self) -> None:
        """Take the memory."""
        # Zeroed because a masked position has weight 0, and 0 times a stray NaN is NaN.
        self._data = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        if self._keeps_tokens:
            self.block_tokens = torch.zeros(
                self._shape[2:4], dtype=torch.int32, device=self._device
            )
        if self._hidden_shape[-1]:
            self.block_hidden = torch.zeros(
                self._hidden_shape, dtype=self._dtype, device=self._device
            )

    def release(self) -> None:
        """Free the memory, contents included; no step may run until `allocate`."""
        self._data = self.block_tokens = self.block_hidden = None

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Key and value cache of a layer, each `[blocks, block size, heads, dim]`."""
        assert self._data is not None, "a step on a released KV cache"
        data = self._data[index]
        return data[0], data[1]


def bytes_per_block(
    num_layers: int,
    block_size: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    keeps_tokens: bool = False,
    kept_elements: int = 0,
) -> int:
    """Bytes of one block over all layers, its token ids and its `kept_elements` of hidden states
    included where they are kept."""
    tokens = block_size * TOKEN_BYTES if keeps_tokens else 0
    elements = 2 * num_layers * block_size * num_heads * head_dim + kept_elements
    return elements * dtype.itemsize + tokens


def blocks_that_fit(
    block_bytes: int,
    free_bytes: int,
    device: torch.device,
    num_kv_blocks: int | None,
    buffer_size_gb: float | None,
) -> int:
    """Number of usable blocks of the pool that was asked for.

    Args:
        block_bytes: from `bytes_per_block`.
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
