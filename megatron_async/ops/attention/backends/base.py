"""`PrefillBackend`: the interface of prefill attention, its arguments, and torch's backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import override

import torch
from torch import Tensor

from megatron_async.errors import ConfigurationError
from megatron_async.ops.attention.paged_attention import TorchPagedAttention
from megatron_async.ops.batch_dimensions import BatchDimensions

INVARIANT_PART = 256
"""Keys of a part where the bits of a row depend on no other (`AttentionShape.part`). A row alone
has no more programs than parts, so short ones help it; long ones spare joins of long sequences
(docs/records/one_order.md)."""


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and dtype of an engine's attention, the same for all its steps."""

    heads: int
    kv_heads: int
    dim: int
    """Size of a head."""
    block_size: int
    """Tokens a KV block."""
    max_blocks: int
    """Blocks of the longest row."""
    dtype: torch.dtype
    """Dtype of queries, and of the cache unless `is_narrow`."""
    device: torch.device
    part: int = 0
    """Keys of the parts that are joined, from position 0 on (`DecodeSchedule.part`), so that the
    bits of a row depend on no other row, no chunk and no device; 0: parts follow the step."""
    is_narrow: bool = False
    """Whether the cache has keys and values in e4m3 (`narrow_cache.py`)."""
    window: int = 0
    """Keys that a query sees, its own and those before it; 0: all."""
    softcap: float = 0.0
    """Bound of the scaled scores; 0: none."""
    has_sinks: bool = False
    """Whether layers have sinks."""

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest row."""
        return self.block_size * self.max_blocks


@dataclass(frozen=True)
class PrefillRows:
    """The prefill rows of one step, the same for all layers.

    A captured step has dummy rows, which have no tokens, and padding tokens after the last row's.
    """

    block_tables: Tensor
    """int32 `[rows, blocks]`. Entries beyond a row's length are any blocks."""
    kv_lengths: Tensor
    """int32 `[rows]`, this step's tokens included: a chunk's last token is at length - 1."""
    starts: Tensor
    """int32 `[rows + 1]`: tokens of row i are starts[i] .. starts[i + 1] - 1 of the step's."""
    tokens: int
    """The rows have no more tokens together."""
    max_query_length: int
    """No row has more tokens in this step."""
    max_kv_length: int
    """No row has a longer KV length."""
    lengths: tuple[tuple[int, int], ...] = ()
    """(query, KV) length of each row where the host knows them: not in a captured step."""
    first_token: int = 0
    """The first row's first token, where the host knows it: not in a captured step."""


class PrefillBackend(ABC):
    """Causal attention of prefill rows over the paged cache."""

    name: str
    """The backend's name in `InferenceConfig.attention_backend`."""
    captures: bool
    """Whether it works without `PrefillRows.lengths`, in a graph."""
    lets_others_start: bool = False
    """Whether `attend` launches a kernel, if there are rows, that writes their tokens alone, waits
    for the kernel before it, and lets the next one start then."""
    rows: PrefillRows
    """Prefill rows of the present step, valid after `begin_step`."""

    def begin_step(self, rows: PrefillRows) -> None:
        """Prepare for the layers of one step."""
        self.rows = rows

    @abstractmethod
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
        """Attention of one layer.

        Args:
            query: `[tokens, heads, dim]`, contiguous: the rows' tokens end to end, between decode
                rows' tokens and padding.
            key_cache, value_cache: `[blocks, block size, kv heads, dim]`, contiguous, this step's
                keys and values in place.
            scale: softmax scale.
            out: `[tokens, heads, dim]`, contiguous, to be written; None: a new tensor.
            scales: of a narrow cache.
            sinks: of `TorchPagedAttention`, where the shape has them.

        Returns:
            `out`, undefined for other tokens.
        """


class BackendUnavailable(ConfigurationError):
    """A backend that this machine, model or setting lacks; the message has the remedy."""


def require(condition: bool, name: str, problem: str, remedy: str) -> None:
    """Raise `BackendUnavailable` unless `condition` holds."""
    if not condition:
        raise BackendUnavailable(f"attention_backend={name!r}: {problem}; {remedy}.")


def require_parts_of_the_step(name: str, shape: AttentionShape) -> None:
    """Refuse parts of one length; raises `BackendUnavailable`."""
    problem = f"it has no parts of {shape.part} keys, as one order for all rows wants them"
    require(not shape.part, name, problem, "use attention_backend='triton' or leave it out")


def require_wide_cache(name: str, shape: AttentionShape) -> None:
    """Refuse keys and values in 8 bits; raises `BackendUnavailable`."""
    remedy = "use attention_backend='triton', or kv_cache_dtype='model'"
    require(not shape.is_narrow, name, "it reads no keys and values in fp8", remedy)


def require_all_keys(name: str, shape: AttentionShape) -> None:
    """Refuse windows, sinks and softcaps; raises `BackendUnavailable`."""
    has = {"windows": shape.window, "sinks": shape.has_sinks, "softcaps": shape.softcap}
    problem = f"it has no {' and no '.join(each for each in has if has[each])}"
    require(not any(has.values()), name, problem, "use attention_backend='triton' or leave it out")


def require_tensor_core_shape(name: str, shape: AttentionShape, largest_dim: int) -> None:
    """Check dtype and heads for FlashAttention's kernels; raises `BackendUnavailable`."""
    require_parts_of_the_step(name, shape)
    require_wide_cache(name, shape)
    require(
        shape.dtype in (torch.bfloat16, torch.float16),
        name,
        f"it computes in bfloat16 or float16, not {shape.dtype}",
        "change dtype or use attention_backend='triton'",
    )
    require(
        shape.dim % 8 == 0 and 8 <= shape.dim <= largest_dim,
        name,
        f"heads of dimension {shape.dim} are not a multiple of 8 up to {largest_dim}",
        "use attention_backend='triton'",
    )


class TorchPrefill(PrefillBackend):
    """The prefill half of `TorchPagedAttention`. It needs the host's lengths, so it cannot be
    captured."""

    name = "torch"
    captures = False

    def __init__(self, shape: AttentionShape) -> None:
        require_parts_of_the_step(self.name, shape)
        sizes, rules = (shape.block_size, shape.max_blocks), (shape.window, shape.softcap)
        self._attention = TorchPagedAttention(*sizes, shape.device, 0, *rules)

    @override
    def begin_step(self, rows: PrefillRows) -> None:
        super().begin_step(rows)
        dims = BatchDimensions(decode_rows=0, prefill_lengths=rows.lengths)
        self._attention.begin_step(dims, rows.block_tables, rows.kv_lengths)

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
        first = self.rows.first_token
        rest = query[first:], key_cache, value_cache, scale, scales, sinks
        out[first:] = self._attention.attend(*rest)
        return out
